"""`sandboxctl`: what it prints and how it ends. Its settings are tested in tests/contract."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from agent_sandbox_api.backends.choose import choose_backend
from agent_sandbox_api.backends.folder import DataFolder
from agent_sandbox_api.settings import SettingsError
from agent_sandbox_core.version import __version__

from .worlds import KEY, make_settings

ROOT = Path(__file__).resolve().parents[3]


def sandboxctl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AGENT_SANDBOX_")}
    return subprocess.run(
        [sys.executable, "-m", "agent_sandbox_client", *arguments],
        env=clean | {"PYTHONPATH": str(ROOT / "api")} | environment,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_version_is_that_of_the_distribution() -> None:
    assert sandboxctl("version").stdout == f"{__version__}\n"


def test_the_schema_is_printed_without_a_server_or_keys() -> None:
    done = sandboxctl("openapi")
    schema = json.loads(done.stdout)
    assert schema["info"]["version"] == __version__ and set(schema["components"]["securitySchemes"]) == {"HTTPBearer", "APIKeyHeader"}
    assert {"OutputEvent", "ExitEvent", "ErrorBody"} <= set(schema["components"]["schemas"]) and done.stderr == ""


def test_a_folder_in_use_is_one_line_that_names_the_holder(tmp_path: Path) -> None:
    folder = DataFolder.open(tmp_path)
    done = sandboxctl("serve", "--backend", "memory", AGENT_SANDBOX_API_KEYS=KEY, AGENT_SANDBOX_DATA_DIR=str(tmp_path), AGENT_SANDBOX_PORT="18237")
    folder.close()
    assert done.returncode == 1 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert f"already in use by pid {os.getpid()}" in done.stderr and "AGENT_SANDBOX_DATA_DIR" in done.stderr


def test_the_backend_that_is_not_there_says_so_and_memory_is_never_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend(make_settings(backend="kubernetes")) == "kubernetes"
    for package in ("docker", "kubernetes"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, package, None)
            with pytest.raises(SettingsError, match=rf"pip install 'agent-sandbox-operator\[{package}\]'"):
                choose_backend(make_settings(backend=package))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert choose_backend(make_settings()) == "docker" and choose_backend(make_settings(backend="memory")) == "memory"
