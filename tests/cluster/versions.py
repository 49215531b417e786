"""versions.toml as data, the digest under which its build is cached, and the lock of its Go module."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.console import run, say, write_if_changed

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
# Commands of other modules that are built inside ours, with our dependencies.
TOOLS = ("github.com/rancher/local-path-provisioner", "helm.sh/helm/v3/cmd/helm")
# Modules of the Kubernetes release, required at v0.0.0 by k8s.io/kubernetes and ours to pin.
STAGING = re.compile(r"^\s+(k8s\.io/[a-z0-9-]+) v0\.0\.0(?: |$)", re.MULTILINE)

FLAGS = ("-trimpath", "-buildvcs=false")
GVISOR_FILES = {"runsc": "runsc", "shim": "containerd-shim-runsc-v1"}
# gVisor's shim lowers its OOM score by a constant; a root without CAP_SYS_RESOURCE may not, and no pod would start. Everybody may set 0.
SHIM_FILE = "pkg/shim/v1/manager.go"
SHIM_FROM, SHIM_TO = "cmd.Process.Pid, oomScoreMax)", "cmd.Process.Pid, 0)"


@dataclass(frozen=True)
class Command:
    """One release of somebody's Go commands, built with its own dependencies."""

    name: str
    module: str
    version: str
    packages: tuple[str, ...]
    tags: str = ""
    cgo: bool = False


@dataclass(frozen=True)
class Versions:
    """versions.toml, typed."""

    oldest_go: str
    go_wheel: str
    kubernetes: str
    modules: dict[str, str]
    commands: tuple[Command, ...]
    apt: tuple[tuple[str, str], ...]

    @property
    def staging(self) -> str:
        """The version of client-go and its siblings in this release."""
        return f"v0.{self.kubernetes.split('.', 1)[1]}"


@functools.cache
def load() -> Versions:
    """Reads versions.toml."""
    raw = tomllib.loads((HERE / "versions.toml").read_text())
    commands = tuple(
        Command(name, c["module"], c["version"], tuple(c["packages"]), c.get("tags", ""), c.get("cgo", False)) for name, c in raw["commands"].items()
    )
    apt = tuple((package, file) for package, file in raw["debian"]["apt"])
    return Versions(raw["go"]["oldest"], raw["go"]["wheel"], raw["kubernetes"]["version"], raw["modules"], commands, apt)


def link_flags() -> str:
    """Without the version the node would report v0.0.0."""
    version = load().kubernetes
    major, minor, _ = version.split(".")
    package = "k8s.io/component-base/version"
    stamps = [f"-X {package}.gitVersion=v{version}", f"-X {package}.gitMajor={major}", f"-X {package}.gitMinor={minor}"]
    return " ".join(["-s", "-w", *stamps, f"-X k8s.io/client-go/pkg/version.gitVersion=v{version}"])


@functools.cache
def digest() -> str:
    """Changes with everything that changes a binary: the versions, how they are built, our programs, the machine's architecture."""
    versions = load()
    recipe = [versions.modules, [vars(command) for command in versions.commands], FLAGS, link_flags(), SHIM_FILE, SHIM_FROM, SHIM_TO]
    total = hashlib.sha256(json.dumps([platform.machine(), *recipe], sort_keys=True).encode())
    for path in sorted(PROGRAMS.rglob("*")):
        if path.is_file():
            total.update(f"{path.name}\0".encode() + path.read_bytes())
    return total.hexdigest()[:16]


def cache_dir() -> Path:
    """Where builds and images are kept, outside the checkout and shared by all checkouts."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "agent-sandbox" / "cluster"


def lock(go: str) -> None:
    """Writes programs/go.mod from versions.toml, and go.sum with the checksums of all that it needs."""
    versions = load()
    shown = run(go, "mod", "download", "-json", f"k8s.io/kubernetes@v{versions.kubernetes}", seconds=300)
    required = Path(json.loads(shown.stdout)["GoMod"]).read_text()
    modules = {
        "k8s.io/kubernetes": f"v{versions.kubernetes}",
        "k8s.io/component-base": versions.staging,
        "k8s.io/kubectl": versions.staging,
        **versions.modules,
    }
    lines = [
        "// Written by `python3 -m tests.cluster lock` from versions.toml.",
        "module cluster.test/programs",
        "",
        f"go {versions.oldest_go}.0",
        "",
    ]
    lines += ["require (", *(f"\t{module} {version}" for module, version in sorted(modules.items())), ")", ""]
    lines += ["replace (", *(f"\t{module} => {module} {versions.staging}" for module in sorted(set(STAGING.findall(required)))), ")", ""]
    lines += ["tool (", *(f"\t{tool}" for tool in TOOLS), ")", ""]
    write_if_changed(PROGRAMS / "go.mod", "\n".join(lines))
    say("resolving the dependencies (a minute)")
    run(go, "mod", "tidy", cwd=PROGRAMS, seconds=900)
