"""The wheel holds both guests, and is built without any network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built in a network namespace that has nothing in it, when we may make one; without proxies and indexes otherwise."""
    out = tmp_path_factory.mktemp("dist")
    build = "import sys, hatchling.build; print(hatchling.build.build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", build, str(out)]
    if os.geteuid() == 0 and shutil.which("unshare"):
        command = ["unshare", "--net", *command]
    environment = os.environ | {"GOPROXY": "off", "GOFLAGS": "-mod=vendor"}
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=True)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_is_pure_and_holds_both_guests(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        for arch, machine in (("amd64", 62), ("arm64", 183)):
            binary = content.read(f"agent_sandbox_core/_guest/sandbox-init-linux-{arch}")
            assert binary[:4] == b"\x7fELF"
            assert int.from_bytes(binary[18:20], "little") == machine
            assert len(binary) <= 8 << 20
    assert not any(name.startswith(("operator/", "tests/", "agent_sandbox/")) for name in names)


def test_the_metadata_names_the_script_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        (entry_points,) = (content.read(name).decode() for name in content.namelist() if name.endswith("entry_points.txt"))
        (metadata,) = (content.read(name).decode() for name in content.namelist() if name.endswith("METADATA"))
    assert "sandboxctl = agent_sandbox_client.cli:main" in entry_points
    assert "License-Expression: Apache-2.0" in metadata
