"""Between the HTTP API's models and the custom resources."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from agent_sandbox_api.backends.kubernetes import mapping
from agent_sandbox_core.errors import BackendError, Conflict, InvalidRequest, LimitExceeded, PayloadTooLarge, SandboxNotFound
from agent_sandbox_core.models import SandboxSpec
from agent_sandbox_core.v1alpha1 import SandboxObject, SnapshotObject
from hypothesis import given
from hypothesis import strategies as st

NOW = datetime(2026, 12, 1, 12, 0, 0, 123456, UTC)
SPEC = SandboxSpec(image="python:3.13-slim", cpus=0.25, memory_mb=128, pids_limit=64, env={"TOKEN": "s3cr3t"}, labels={"team": "a"})
NAME = "sb-0123456789abcdef"


def manifest(**changes: Any) -> dict[str, Any]:
    given_ = {
        "created_at": NOW,
        "expires_at": NOW + timedelta(hours=1),
        "source": None,
        "digest": None,
        "workspace": {},
        "runtime_class": "",
    } | changes
    made = mapping.sandbox_manifest(NAME, given_.pop("spec", SPEC), **given_)
    made["metadata"] |= {"namespace": "n", "uid": "u", "creationTimestamp": "2026-12-01T12:00:00Z"}
    return made


def with_status(phase: str, *, ready: bool = False, **status: Any) -> dict[str, Any]:
    condition = {
        "type": "Ready",
        "status": "True" if ready else "False",
        "reason": status.get("reason", "Ready"),
        "lastTransitionTime": "2026-12-01T12:00:00Z",
    }
    return manifest() | {"status": {"phase": phase, "conditions": [condition], **status}}


@given(st.from_regex(r"\A(sb|snap)_[0-9a-f]{16}\Z"))
def test_an_id_and_its_name_lead_to_each_other(api_id: str) -> None:
    name = mapping.name_of(api_id)
    assert mapping.is_name(name) and mapping.id_of(name) == api_id


@pytest.mark.parametrize("name", ["web", "sb-1", "sb-0123456789ABCDEF", "my-sandbox-2"])
def test_a_name_that_somebody_chose_is_the_id(name: str) -> None:
    assert mapping.id_of(name) == name == mapping.name_of(name)


@pytest.mark.parametrize("text", ["", "..", "a/b", "a b", "-a", "A", "a" * 51, "sb_x/../y", "a\n"])
def test_nothing_else_becomes_part_of_a_path(text: str) -> None:
    assert not mapping.is_name(mapping.name_of(text))


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1), ("250m", 0.25), ("1.5", 1.5), ("512Mi", 512 * 2**20), ("1Gi", 2**30), ("1G", 10**9), ("2e3", 2000), ("x", 0)]
)
def test_quantities(text: str, value: float) -> None:
    assert float(mapping.quantity(text)) == value


def test_values_of_env_are_in_the_secret_and_nowhere_else() -> None:
    made = manifest()
    assert "s3cr3t" not in json.dumps(made) and made["spec"]["envFrom"] == [{"secretName": f"{NAME}-env"}]
    secret = mapping.secret_manifest(f"{NAME}-env", made, SPEC.env)
    assert secret["stringData"] == {"TOKEN": "s3cr3t"} and secret["metadata"]["ownerReferences"][0]["uid"] == "u"


def test_what_the_api_was_asked_for_is_what_it_shows() -> None:
    for spec in (SPEC, SPEC.model_copy(update={"network": True, "cpus": 2.5, "read_only_rootfs": False, "env": {}})):
        made = manifest(spec=spec, source="snap_0123456789abcdef")
        SandboxObject.read(made)
        shown = mapping.sandbox_of(made)
        assert (shown.image, shown.cpus, shown.memory_mb, shown.pids_limit) == (spec.image, spec.cpus, spec.memory_mb, spec.pids_limit)
        assert (shown.network, shown.read_only_rootfs, shown.labels) == (spec.network, spec.read_only_rootfs, spec.labels)
        assert (shown.created_at, shown.expires_at) == (NOW, NOW + timedelta(hours=1))
        assert shown.id == "sb_0123456789abcdef" and shown.source_snapshot_id == "snap_0123456789abcdef"
        assert mapping.spec_of(made, spec.env) == spec


def test_running_means_that_a_command_can_run() -> None:
    assert mapping.sandbox_of(with_status("Running", ready=True)).status == "running"
    assert mapping.sandbox_of(with_status("Restoring", reason="Restoring")).status == "running"
    for phase, shown in (
        ("Pending", "Pending"),
        ("Running", "Pending"),
        ("Replacing", "Restarting"),
        ("Stopped", "Stopped"),
        ("Failed", "Failed"),
        ("Expired", "Stopped"),
    ):
        found = mapping.sandbox_of(with_status(phase, reason="OOMKilled", message="more memory"))
        assert (found.status, found.phase, found.reason, found.message) == ("stopped", shown, "OOMKilled", "more memory")
    assert mapping.sandbox_of(manifest()).status == "stopped"


def test_a_sandbox_without_an_end_has_a_time_all_the_same() -> None:
    made = manifest()
    del made["spec"]["expiresAt"]
    assert mapping.sandbox_of(made).expires_at == mapping.NO_END


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("QuotaExceeded", LimitExceeded),
        ("InvalidImage", InvalidRequest),
        ("SnapshotMissing", Conflict),
        ("ImagePullFailed", BackendError),
        ("", BackendError),
    ],
)
def test_why_a_sandbox_did_not_start_has_the_right_kind_and_the_reason(reason: str, kind: type[Exception]) -> None:
    error = mapping.create_error(with_status("Pending", reason=reason, message="do this next"))
    assert type(error) is kind and reason in str(error) and "do this next" in str(error)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("TooLarge", PayloadTooLarge), ("SandboxNotRunning", InvalidRequest), ("SandboxNotFound", SandboxNotFound), ("StoreFull", BackendError)],
)
def test_why_a_snapshot_failed_has_the_right_kind(reason: str, kind: type[Exception]) -> None:
    made = mapping.snapshot_manifest("snap-0123456789abcdef", NAME, "name", NOW) | {"status": {"phase": "Failed", "reason": reason, "message": "why"}}
    assert type(mapping.snapshot_error(made)) is kind


def test_a_fork_needs_every_value_of_the_environment() -> None:
    source = {
        "image": "i",
        "cpu": "500m",
        "memory": "64Mi",
        "pidsLimit": 32,
        "networkMode": "Open",
        "readOnlyRootFilesystem": False,
        "envNames": ["A", "B"],
    }
    made = mapping.snapshot_manifest("snap-0123456789abcdef", NAME, None, NOW) | {"status": {"phase": "Ready", "sourceSpec": source, "sizeBytes": 5}}
    made["metadata"] |= {"uid": "u", "creationTimestamp": "2026-12-01T12:00:00Z"}
    SnapshotObject.read(made)
    spec = mapping.snapshot_spec_of(made, {"A": "1", "B": "2", "C": "3"})
    assert (spec.image, spec.cpus, spec.memory_mb, spec.network, spec.read_only_rootfs, spec.env) == ("i", 0.5, 64, True, False, {"A": "1", "B": "2"})
    with pytest.raises(BackendError, match=r"values of B .* roll it back"):
        mapping.snapshot_spec_of(made, {"A": "1"})
    shown = mapping.snapshot_of(made)
    assert (shown.id, shown.sandbox_id, shown.size_bytes, shown.created_at) == ("snap_0123456789abcdef", "sb_0123456789abcdef", 5, NOW)
