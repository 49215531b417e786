"""Builds every program from Go modules, once for each digest of versions and sources. A killed build goes on where it was."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.cluster import machine, versions
from tests.cluster.console import ClusterError, locked, run, run_logged, say

COMPILE_SECONDS = 3600
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
KEPT_BUILDS = 3
LOCAL_PATH = "github.com/rancher/local-path-provisioner"


@dataclass(frozen=True)
class Program:
    """One binary: its file name, and the `go` arguments that make it."""

    file: str
    package: str
    source: Literal["ours", "gvisor", "release"]
    version: str = ""
    tags: str = ""
    cgo: bool = False

    @property
    def title(self) -> str:
        """For progress lines."""
        return f"{self.file} {self.version}".rstrip()


def programs() -> list[Program]:
    """Everything to build, the longest first: what it compiles, the others reuse."""
    made = versions.load()
    ours = [
        Program("kubernetes", "./kubernetes", "ours", f"v{made.kubernetes}"),
        Program("helm", "helm.sh/helm/v3/cmd/helm", "ours", made.modules["helm.sh/helm/v3"]),
        Program("coredns", "./coredns", "ours", made.modules["github.com/coredns/coredns"]),
        Program("firewall", "./firewall", "ours", made.modules["github.com/cloudnativelabs/kube-router/v2"]),
        Program("local-path-provisioner", LOCAL_PATH, "ours", made.modules[LOCAL_PATH]),
        *(Program(name, f"./{name}", "ours") for name in ("volumes", "pause", "static")),
    ]
    theirs = []
    for command in made.commands:
        for package in command.packages:
            if command.name == "gvisor":
                theirs.append(Program(versions.GVISOR_FILES[package], f"./{package}", "gvisor", command.version))
            else:
                file = command.name if package == "." else Path(package).name
                path = f"{command.module}/{package}".removesuffix("/.")
                theirs.append(Program(file, path, "release", command.version, command.tags, command.cgo))
    return ours + theirs


def folder() -> Path:
    """Where this digest's build is kept."""
    return versions.cache_dir() / versions.digest()


def binaries() -> Path:
    """The folder of the binaries, built or not."""
    return folder() / "bin"


def unbuilt() -> list[Program]:
    """Programs whose binary is not there yet."""
    return [program for program in programs() if not (binaries() / program.file).exists()]


def ensure() -> Path:
    """Builds what is missing; returns the folder of the binaries."""
    if unbuilt() or not all((binaries() / name).is_symlink() for name in COMPONENTS):
        machine.ensure_packages()
        with locked(versions.cache_dir() / "build.lock", seconds=2 * COMPILE_SECONDS, what="the build"):
            build(unbuilt())
            prune()
    return binaries()


def build(missing: list[Program]) -> None:
    """Builds these, one after the other: each names itself, and each is kept when a later one fails."""
    binaries().mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if missing:
        go = machine.find_go()
        say(f"building {len(missing)} programs with {go} into {binaries()}; the first time this takes about a quarter of an hour on two cores")
        for number, program in enumerate(missing, 1):
            compile_program(go, program, f"[{number}/{len(missing)}] {program.title}")
    for name in COMPONENTS:
        link = binaries() / name
        if not link.is_symlink():
            link.symlink_to("kubernetes")
    say(f"everything is built: {time.monotonic() - began:.0f} s")


def compile_program(go: str, program: Program, title: str) -> None:
    """Compiles one program and puts it into place in one step."""
    log = folder() / "logs" / f"{program.file}.log"
    with tempfile.TemporaryDirectory(dir=folder(), prefix="new-") as work:
        environment = os.environ | {
            "CGO_ENABLED": "1" if program.cgo else "0", "GOFLAGS": "", "GOWORK": "off", "GOTOOLCHAIN": "local", "GOBIN": work,
        }  # fmt: skip
        flags = [*versions.FLAGS, "-ldflags", versions.link_flags()]
        if program.tags:
            flags += ["-tags", program.tags]
        if program.source == "release":
            command, where = [go, "install", *flags, f"{program.package}@{program.version}"], Path(work)
        else:
            command, where = [go, "build", *flags, "-o", f"{work}/", program.package], source_of(go, program)
        # Compiles are the machine's background work: tests and people come first.
        run_logged(title, ["nice", "-n", "10", *command], log, seconds=COMPILE_SECONDS, env=environment, cwd=where)
        made = Path(work) / Path(program.package).name
        if not made.exists():
            raise ClusterError(f"{title}: go made no {made.name}; see {log}")
        made.replace(binaries() / program.file)


def source_of(go: str, program: Program) -> Path:
    """The folder of the module that a program is part of."""
    return gvisor_source(go) if program.source == "gvisor" else versions.PROGRAMS


def gvisor_source(go: str) -> Path:
    """A copy of gVisor's source with the one constant changed; both of its programs are built from it."""
    target = folder() / "gvisor"
    if target.exists():
        return target
    module = next(command for command in versions.load().commands if command.name == "gvisor")
    work = folder() / "new-gvisor"
    work.mkdir(exist_ok=True)
    shown = run(go, "mod", "download", "-json", f"{module.module}@{module.version}", seconds=900, cwd=work)
    text = (Path(json.loads(shown.stdout)["Dir"]) / versions.SHIM_FILE).read_text()
    if text.count(versions.SHIM_FROM) != 1:
        raise ClusterError(
            f"{versions.SHIM_FILE} of gVisor {module.version} is not as expected: see how it sets the OOM score, and adapt SHIM_FROM in versions.py"
        )
    shutil.rmtree(work)
    # The module cache is read-only; contents are copied without its modes.
    shutil.copytree(json.loads(shown.stdout)["Dir"], work, copy_function=shutil.copyfile)
    for path in (work, *(path for path in work.rglob("*") if path.is_dir())):
        path.chmod(0o755)
    (work / versions.SHIM_FILE).write_text(text.replace(versions.SHIM_FROM, versions.SHIM_TO))
    work.replace(target)
    return target


def prune() -> None:
    """Removes builds but the newest few, sources that were only needed for building, and what killed builds left."""
    for leftover in (*folder().glob("new-*"), folder() / "gvisor"):
        shutil.rmtree(leftover, ignore_errors=True)
    builds = [path.parent for path in versions.cache_dir().glob("*/bin") if path.parent != folder()]
    builds.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for old in builds[KEPT_BUILDS - 1 :]:
        say(f"removing the old build {old.name}")
        shutil.rmtree(old, ignore_errors=True)
