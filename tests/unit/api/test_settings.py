"""Settings as a class; that they stop a real server with one line is in tests/contract."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_sandbox_api.settings import Settings, SettingsError, load_settings

from .worlds import KEY, make_settings


def test_the_environment_is_read_with_the_prefix_and_lists_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "API_KEYS": f" {KEY} ,second-key-012345678",
        "ALLOWED_IMAGES": "python:*, ghcr.io/me/*",
        "MAX_CPUS": "2.5",
        "PORT": "9",
    }.items():
        monkeypatch.setenv(f"AGENT_SANDBOX_{name}", value)
    settings = load_settings()
    assert [key.get_secret_value() for key in settings.api_keys] == [KEY, "second-key-012345678"]
    assert settings.allowed_images == ("python:*", "ghcr.io/me/*") and settings.max_cpus == 2.5 and settings.port == 9


def test_the_defaults_are_those_of_the_contract() -> None:
    settings = make_settings()
    found = {name: getattr(settings, name) for name in Settings.model_fields}
    assert found | {"api_keys": (), "data_dir": str(settings.data_dir)} == {
        "api_keys": (), "insecure_no_auth": False, "host": "127.0.0.1", "port": 8080, "data_dir": "data", "store_url": "", "backend": "auto",
        "default_image": "python:3.12-slim", "allowed_images": ("*",), "allow_network": True, "max_sandboxes": 20,
        "default_timeout_seconds": 900, "max_timeout_seconds": 86400, "default_cpus": 1, "max_cpus": 4, "default_memory_mb": 512,
        "max_memory_mb": 4096, "default_pids_limit": 256, "max_pids_limit": 4096, "default_exec_timeout_seconds": 60,
        "max_exec_timeout_seconds": 3600, "max_exec_output_bytes": 10 * 2**20, "max_file_bytes": 50 * 2**20, "max_snapshot_bytes": 2**30,
        "reap_interval_seconds": 10, "shutdown_seconds": 10, "sandbox_user": "1000:1000", "tmp_size_mb": 256, "docker_runtime": "",
        "network_name": "agent-sandbox-net", "namespace": "", "workspace_size": "1Gi", "storage_class": "", "workspace_ephemeral": False,
        "runtime_class": "", "create_seconds": 180, "log_level": "info", "log_format": "json",
    }  # fmt: skip


def test_keys_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KEY not in repr(make_settings()) and KEY not in str(make_settings().model_dump())
    with pytest.raises(SettingsError) as caught:
        make_settings(api_keys=f"{KEY},tiny-secret")
    assert "API_KEYS" in str(caught.value) and "tiny-secret" not in str(caught.value) and KEY not in str(caught.value)


def test_a_lowered_maximum_takes_a_default_along_that_was_not_given() -> None:
    assert make_settings(max_memory_mb=256).default_memory_mb == 256
    with pytest.raises(SettingsError, match="DEFAULT_MEMORY_MB"):
        make_settings(max_memory_mb=256, default_memory_mb=512)


@pytest.mark.parametrize("word", ["", "0", "no", "OFF", "False"])
def test_words_that_say_no(word: str) -> None:
    assert make_settings(allow_network=word).allow_network is False


@pytest.mark.parametrize("word", ["y", "t", "2", "nope", "enabled"])
def test_words_that_say_nothing_are_refused(word: str) -> None:
    with pytest.raises(SettingsError, match="ALLOW_NETWORK"):
        make_settings(allow_network=word)


def test_several_faults_make_one_line_that_names_them_all() -> None:
    with pytest.raises(SettingsError) as caught:
        make_settings(port=0, sandbox_user="root", tmp_size_mb=-1)
    line = str(caught.value)
    assert "\n" not in line and all(name in line for name in ("PORT", "SANDBOX_USER", "TMP_SIZE_MB"))


def test_the_documentation_lists_exactly_the_settings_that_there_are() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "settings.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    told = [name.strip().strip("`").lower() for row in rows for name in row.split(",")]
    assert sorted(told) == sorted(Settings.model_fields)
