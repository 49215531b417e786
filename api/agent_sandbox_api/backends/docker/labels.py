"""Labels: how the next process finds what this one made. A sandbox's record travels in one label, env values never do.

All keys are always set, also when empty: the labels of an image are inherited by its containers, and must not speak for us.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from agent_sandbox_core.models import SandboxSpec, Termination, rfc3339

from agent_sandbox_api.backends.engine import InstanceRecord

from .options import DockerOptions

PREFIX: Final = "agentsandbox.dev"
PRODUCT: Final = f"{PREFIX}/product"
PRODUCT_NAME: Final = "agent-sandbox"
ROLE: Final = f"{PREFIX}/role"
INSTANCE: Final = f"{PREFIX}/instance"
PROCESS: Final = f"{PREFIX}/process"
SANDBOX: Final = f"{PREFIX}/sandbox"
RECORD: Final = f"{PREFIX}/record"
INCARNATION: Final = f"{PREFIX}/incarnation"
TERMINATION: Final = f"{PREFIX}/last-termination"
ENV_NAMES: Final = "env_names"

# Roles. A sandbox has a container and a workspace, and a tombstone while it is being removed. A helper is a container that lives for one
# step. What all instances on an engine share carries no instance: guest volume, image, network.
CONTAINER: Final = "sandbox"
WORKSPACE: Final = "workspace"
TOMBSTONE: Final = "tombstone"
HELPER: Final = "helper"
GUEST: Final = "guest"
IMAGE: Final = "image"
NETWORK: Final = "network"


class LabelError(Exception):
    """Labels that we cannot have written: an object made by hand, or by a newer version."""


def shared_labels(role: str) -> dict[str, str]:
    """Labels of what all instances share. An instance of "" says that it is nobody's."""
    return dict.fromkeys((INSTANCE, PROCESS, SANDBOX, RECORD, INCARNATION, TERMINATION), "") | {PRODUCT: PRODUCT_NAME, ROLE: role}


def own_labels(role: str, options: DockerOptions, sandbox_id: str = "") -> dict[str, str]:
    """Labels of what belongs to one instance, made by this process."""
    return shared_labels(role) | {INSTANCE: options.instance_id, PROCESS: options.process_id, SANDBOX: sandbox_id}


def record_labels(role: str, options: DockerOptions, record: InstanceRecord) -> dict[str, str]:
    """Labels of a sandbox's workspace."""
    return own_labels(role, options, record.sandbox_id) | {RECORD: write_record(record)}


def container_labels(options: DockerOptions, record: InstanceRecord, incarnation: int, termination: Termination | None) -> dict[str, str]:
    """Labels of a sandbox's container: it is one incarnation, and knows how the one before ended."""
    return record_labels(CONTAINER, options, record) | {
        INCARNATION: str(incarnation),
        TERMINATION: termination.model_dump_json() if termination else "",
    }


def write_record(record: InstanceRecord) -> str:
    """A record as JSON, names of the environment only."""
    return json.dumps(
        {
            "spec": record.spec.without_env_values(),
            "created_at": rfc3339(record.created_at),
            "expires_at": rfc3339(record.expires_at),
            "source": record.source_snapshot_id,
            "idempotency_key": record.idempotency_key,
            "request_digest": record.request_digest,
        },
        separators=(",", ":"),
        sort_keys=True,
    )


def read_record(labels: Mapping[str, str], env: Mapping[str, str]) -> InstanceRecord:
    """The record of a container or workspace; `env` has the values (those that it lacks stay unknown). LabelError when there is none."""
    try:
        data: dict[str, Any] = json.loads(labels[RECORD])
        spec = dict(data["spec"])
        names = spec.pop(ENV_NAMES)
        spec["env"] = {name: env[name] for name in names if name in env}
        return InstanceRecord(
            sandbox_id=labels[SANDBOX],
            spec=SandboxSpec.model_validate(spec),
            created_at=datetime.fromisoformat(data["created_at"]),
            expires_at=datetime.fromisoformat(data["expires_at"]),
            source_snapshot_id=data["source"],
            idempotency_key=data["idempotency_key"],
            request_digest=data["request_digest"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise LabelError(f"the label {RECORD} cannot be read ({error})") from error


def env_names(labels: Mapping[str, str]) -> list[str]:
    """Names of a sandbox's environment, as its record has them."""
    try:
        return [str(name) for name in json.loads(labels[RECORD])["spec"][ENV_NAMES]]
    except (KeyError, TypeError, ValueError) as error:
        raise LabelError(f"the label {RECORD} cannot be read ({error})") from error


def read_incarnation(labels: Mapping[str, str]) -> int:
    """How often the sandbox was started, this container included."""
    text = labels.get(INCARNATION, "")
    return int(text) if text.isascii() and text.isdecimal() else 1


def read_termination(labels: Mapping[str, str]) -> Termination | None:
    """How the incarnation before this one ended."""
    text = labels.get(TERMINATION, "")
    if not text:
        return None
    try:
        return Termination.model_validate_json(text)
    except ValueError as error:
        raise LabelError(f"the label {TERMINATION} cannot be read") from error


def label_filter(**wanted: str) -> dict[str, list[str]]:
    """The engine's filter for labels of this product: role, instance, sandbox."""
    keys = {"role": ROLE, "instance": INSTANCE, "sandbox": SANDBOX}
    return {"label": [f"{PRODUCT}={PRODUCT_NAME}", *(f"{keys[name]}={value}" for name, value in wanted.items())]}
