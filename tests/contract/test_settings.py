"""Settings: what stops the start with one clear line, and what works."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_sandbox_api.settings import SettingsError, load_settings

from tests.support.server import Facade

GOOD = "good-key-0123456789"


def one_clear_line(output: str, *words: str) -> None:
    """The refusal is a single line that names the setting; no traceback."""
    assert "Traceback" not in output, output
    lines = [line for line in output.splitlines() if line.strip()]
    told = [line for line in lines if all(word.lower() in line.lower() for word in words)]
    assert len(lines) == 1 and told, f"one line with {words} was expected:\n{output}"


REAL = (0, 1, 4, 5, 9, 10, 19)
"""The refusals that are tried with a real start: one of each kind. The others are read the same way, in this process."""
REFUSED = [
    ({"API_KEYS": ""}, "API_KEYS"),
    ({"API_KEYS": "short"}, "API_KEYS"),
    ({"API_KEYS": f"{GOOD},short"}, "API_KEYS"),
    ({"API_KEYS": "", "INSECURE_NO_AUTH": "no"}, "API_KEYS"),
    ({"INSECURE_NO_AUTH": "maybe"}, "INSECURE_NO_AUTH"),
    ({"PORT": "99999"}, "PORT"),
    ({"PORT": "http"}, "PORT"),
    ({"MAX_SANDBOXES": "-1"}, "MAX_SANDBOXES"),
    ({"MAX_SANDBOXES": "many"}, "MAX_SANDBOXES"),
    ({"REAP_INTERVAL_SECONDS": "0"}, "REAP_INTERVAL_SECONDS"),
    ({"SANDBOX_USER": "nobody"}, "SANDBOX_USER"),
    ({"SANDBOX_USER": "1000"}, "SANDBOX_USER"),
    ({"SANDBOX_USER": "-1:0"}, "SANDBOX_USER"),
    ({"DEFAULT_TIMEOUT_SECONDS": "0"}, "DEFAULT_TIMEOUT_SECONDS"),
    ({"DEFAULT_TIMEOUT_SECONDS": "90000"}, "DEFAULT_TIMEOUT_SECONDS"),
    ({"MAX_TIMEOUT_SECONDS": "-5"}, "MAX_TIMEOUT_SECONDS"),
    ({"DEFAULT_CPUS": "0"}, "DEFAULT_CPUS"),
    ({"DEFAULT_CPUS": "8"}, "DEFAULT_CPUS"),
    ({"MAX_CPUS": "nan"}, "MAX_CPUS"),
    ({"DEFAULT_MEMORY_MB": "15"}, "DEFAULT_MEMORY_MB"),
    ({"DEFAULT_MEMORY_MB": "5000"}, "DEFAULT_MEMORY_MB"),
    ({"DEFAULT_PIDS_LIMIT": "7"}, "DEFAULT_PIDS_LIMIT"),
    ({"TMP_SIZE_MB": "0"}, "TMP_SIZE_MB"),
    ({"DEFAULT_EXEC_TIMEOUT_SECONDS": "0"}, "DEFAULT_EXEC_TIMEOUT_SECONDS"),
    ({"DEFAULT_EXEC_TIMEOUT_SECONDS": "4000"}, "DEFAULT_EXEC_TIMEOUT_SECONDS"),
    ({"MAX_EXEC_OUTPUT_BYTES": "-1"}, "MAX_EXEC_OUTPUT_BYTES"),
    ({"MAX_FILE_BYTES": "0"}, "MAX_FILE_BYTES"),
    ({"MAX_SNAPSHOT_BYTES": "1e99"}, "MAX_SNAPSHOT_BYTES"),
    ({"ALLOW_NETWORK": "perhaps"}, "ALLOW_NETWORK"),
    ({"DEFAULT_IMAGE": "UPPER case"}, "DEFAULT_IMAGE"),
    ({"ALLOWED_IMAGES": "nothing-matches:*"}, "DEFAULT_IMAGE"),
]


def shown(value: object) -> str:
    """A readable test id."""
    return ",".join(f"{name}={text}" for name, text in value.items()) if isinstance(value, dict) else ""


@pytest.mark.behaviour("SET-001")
@pytest.mark.parametrize(("settings", "names"), [REFUSED[number] for number in REAL], ids=shown)
def test_a_setting_that_cannot_work_stops_the_start_with_one_line(tmp_path: Path, settings: dict[str, str], names: str) -> None:
    facade = Facade("memory", tmp_path / "data", settings)
    # launch() puts its own port last; a PORT under test goes through the same door.
    facade.port = settings.get("PORT", facade.port)  # type: ignore[assignment]  # a port that is none is what is tested
    output = facade.refuse()
    one_clear_line(output, names)
    assert GOOD not in output


@pytest.mark.behaviour("SET-001")
@pytest.mark.parametrize(("settings", "names"), REFUSED, ids=shown)
def test_a_setting_that_cannot_work_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], names: str) -> None:
    for name, value in ({"API_KEYS": GOOD} | settings).items():
        monkeypatch.setenv(f"AGENT_SANDBOX_{name}", value)
    with pytest.raises(SettingsError) as refusal:
        load_settings()
    one_clear_line(str(refusal.value), f"AGENT_SANDBOX_{names}")
    assert GOOD not in str(refusal.value)


@pytest.mark.behaviour("SET-002")
@pytest.mark.parametrize(("words", "meant"), [(("1", "true", "YES", "on", "True"), True), (("0", "false", "No", "OFF", ""), False)])
def test_booleans_take_every_documented_word(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], meant: bool) -> None:
    monkeypatch.setenv("AGENT_SANDBOX_API_KEYS", GOOD)
    for word in words:
        monkeypatch.setenv("AGENT_SANDBOX_ALLOW_NETWORK", word)
        assert load_settings().allow_network is meant


@pytest.mark.behaviour("SET-003")
def test_a_data_folder_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    facade = Facade("memory", blocked / "data")
    facade.log = tmp_path / "log"
    one_clear_line(facade.refuse(), "DATA_DIR")


@pytest.mark.behaviour("SET-004")
def test_an_unknown_backend_stops_the_start(tmp_path: Path) -> None:
    output = Facade("no-such-backend", tmp_path / "data").refuse()
    assert "Traceback" not in output and "no-such-backend" in output


@pytest.mark.behaviour("SET-005")
def test_a_port_in_use_stops_the_start(tmp_path: Path, facade: Facade) -> None:
    other = Facade("memory", tmp_path / "data")
    other.port = facade.port
    output = other.refuse()
    assert "Traceback" not in output and str(facade.port) in output
