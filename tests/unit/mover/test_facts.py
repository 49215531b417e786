"""What a Snapshot keeps of its Sandbox, what its status says, and the settings of the mover."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from agent_sandbox_core.errors import BackendError, PayloadTooLarge
from agent_sandbox_core.snapshots import Damaged, InvalidArchive, Manifest, ObjectMissing, StoredSpec, StoreFull, StoreUnreachable
from agent_sandbox_operator.mover.facts import build_manifest, recall_source, source_spec
from agent_sandbox_operator.mover.settings import load_mover_settings
from agent_sandbox_operator.mover.status import reason_of, snapshot_state
from agent_sandbox_operator.settings import SettingsError

from .objects import NOW, UID, sandbox, snapshot

BOX = sandbox(
    spec={
        "env": [{"name": "A", "value": "secret-value"}],
        "resources": {"cpu": "1500m", "memory": "1Gi"},
        "network": {"mode": "Open"},
        "workspace": {"size": "2Gi", "storageClassName": "fast"},
    },
    annotations={"agentsandbox.dev/api-labels": '{"team":"x"}'},
)


def test_a_manifest_is_that_of_docker_mode_and_more_and_holds_no_value() -> None:
    source = source_spec(BOX, {"A", "B"}, "nightly-aaaabbbb")
    made = build_manifest(snapshot(), BOX, source, parent_id="snap_1", installation="cluster-a", now=NOW)
    assert made.id == "snap_aaaabbbb11114222"
    assert made.sandbox_id == f"sb_{UID.replace('-', '')[:16]}"
    assert made.spec == StoredSpec(
        image="python:3.12-slim",
        cpus=1.5,
        memory_mb=1024,
        pids_limit=256,
        network=True,
        read_only_rootfs=True,
        labels={"team": "x"},
        env_names=["A", "B"],
    )
    assert b"secret-value" not in made.to_bytes()
    assert b"nightly-aaaabbbb" not in made.to_bytes()
    again = Manifest.model_validate_json(made.to_bytes())
    assert recall_source(again, "copy") == source.model_copy(update={"env_secret_name": "copy"})


def test_an_api_id_is_kept_and_a_name_is_enough_without_one() -> None:
    source = source_spec(BOX, (), None)
    labelled = snapshot(labels={"agentsandbox.dev/api-id": "snap_0123456789abcdef"})
    made = build_manifest(labelled, BOX, source, parent_id=None, installation="cluster-a", now=NOW)
    assert made.id == "snap_0123456789abcdef"


@pytest.mark.parametrize("labels", ["", "[]", "{", '{"a":1}'])
def test_labels_that_cannot_be_read_are_none(labels: str) -> None:
    found = source_spec(sandbox(annotations={"agentsandbox.dev/api-labels": labels}), (), None).labels
    assert found in ({}, {"a": "1"})


def test_a_manifest_of_docker_mode_tells_a_spec_for_a_fork() -> None:
    spec = StoredSpec(image="busybox", cpus=0.5, memory_mb=256, pids_limit=64, network=False, read_only_rootfs=False, env_names=["TOKEN"])
    found = recall_source(Manifest(id="snap_1", sandbox_id="sb_1", spec=spec, created_at=NOW))
    assert (found.cpu, found.memory, found.network_mode, found.read_only_root_filesystem) == ("0.5", "256Mi", "None", False)
    assert (found.env_names, found.env_secret_name) == (["TOKEN"], None)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PayloadTooLarge("x"), "TooLarge"),
        (StoreUnreachable("x"), "StoreUnreachable"),
        (StoreFull("x"), "StoreFull"),
        (Damaged("x"), "DigestMismatch"),
        (InvalidArchive("x"), "HostileArchive"),
        (ObjectMissing("x"), "BlobMissing"),
        (BackendError("x"), "Failed"),
    ],
)
def test_an_error_has_a_reason(error: BackendError, reason: str) -> None:
    assert reason_of(error) == reason


def test_a_conditions_time_is_that_of_its_last_change() -> None:
    first = snapshot_state(snapshot(), "Pending", "Waiting", "x", NOW)
    again = snapshot_state(snapshot(status=first), "Running", "Taking", "y", NOW + timedelta(minutes=1))
    ready = snapshot_state(snapshot(status=again), "Ready", "Ready", "z", NOW + timedelta(minutes=2))
    assert first["conditions"][0]["lastTransitionTime"] == again["conditions"][0]["lastTransitionTime"] == "2026-12-01T12:00:00Z"
    assert ready["conditions"][0]["lastTransitionTime"] == "2026-12-01T12:02:00Z"
    assert ready["conditions"][0]["observedGeneration"] == 3


def test_settings_come_from_shared_and_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AGENT_SANDBOX_STORE_URL": "file:///srv/snapshots",
        "AGENT_SANDBOX_NAMESPACES": "a, b",
        "AGENT_SANDBOX_MAX_SNAPSHOT_BYTES": "2000000",
        "AGENT_SANDBOX_MOVER_TRANSFERS": "2",
    }.items():
        monkeypatch.setenv(name, value)
    found = load_mover_settings()
    assert (found.namespaces, found.max_snapshot_bytes, found.transfers) == (("a", "b"), 2_000_000, 2)
    assert found.spool_directory == Path("/srv/snapshots/.spool")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AGENT_SANDBOX_STORE_URL", ""),
        ("AGENT_SANDBOX_STORE_URL", "file:///"),
        ("AGENT_SANDBOX_STORE_URL", "/srv"),
        ("AGENT_SANDBOX_MOVER_TRANSFERS", "0"),
    ],
)
def test_a_bad_setting_is_told_by_its_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("AGENT_SANDBOX_STORE_URL", "file:///srv/snapshots")
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=name):
        load_mover_settings()
