"""What both kinds share: names, labels, conditions, metadata, and the base of all models.

Fields are snake_case in Python and camelCase on the wire. Reading is lenient (an older or newer writer may know other fields; the API server has
pruned and validated already), writing leaves out what is unset.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from agent_sandbox_core.models import Timestamp

from .rules import shaped

GROUP: Final = "agentsandbox.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND_SANDBOX: Final = "Sandbox"
KIND_SNAPSHOT: Final = "Snapshot"

UID_CHARACTERS: Final = 8
"""Of the uid, in a child's name: a CR of the same name that comes later never meets what an earlier one left."""


def child_name(name: str, uid: str) -> str:
    """What the children of a CR are called: pod and PVC alike."""
    return f"{name}-{uid[:UID_CHARACTERS]}"


CONTAINER: Final = "sandbox"
"""The container of a sandbox's pod."""
LABEL_SANDBOX: Final = f"{GROUP}/sandbox"
"""On every child: the name of its Sandbox."""
LABEL_SANDBOX_UID: Final = f"{GROUP}/sandbox-uid"
"""On every child: the uid of its Sandbox; the truth about ownership beside ownerReferences."""
LABEL_COMPONENT: Final = f"{GROUP}/component"
"""What a child is: sandbox, workspace, env, mover, canary."""
LABEL_NETWORK: Final = f"{GROUP}/network"
"""On a sandbox pod: none, open or allowlist; the static NetworkPolicies select by it."""
LABEL_API_ID: Final = f"{GROUP}/api-id"
"""On a CR that the HTTP API made: its id there, `sb_…` or `snap_…`."""
ANNOTATION_RESTORED: Final = f"{GROUP}/restored"
"""On the workspace's PVC (on the pod when ephemeral): the last requestID that was carried out on these files, `source:<uid>` for the first fill."""

ANNOTATION_RESTORE_AT_CREATION: Final = f"{GROUP}/restore-at-creation"
"""Beside it, when the Sandbox had both a source and a spec.restore at its creation: that requestID, which counts as done."""
ANNOTATION_RESTORE_HISTORY: Final = f"{GROUP}/restore-history"
"""Beside it, JSON: `done`, requestIDs that were carried out on these files (newest last, at most 64), and `from`, the Snapshot they came from."""
ANNOTATION_API_LABELS: Final = f"{GROUP}/api-labels"
"""On a Sandbox that the HTTP API made: the labels its caller gave it, a JSON object."""


def source_marker(uid: str) -> str:
    """The value of ANNOTATION_RESTORED once the workspace was filled from spec.source."""
    return f"source:{uid}"


class Resource(BaseModel):
    """Base of everything in a CR."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True, use_attribute_docstrings=True)

    def to_wire(self) -> dict[str, Any]:
        """As JSON for the API server: camelCase, what is None left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Meta(Resource):
    """The part of metadata that we read."""

    model_config = ConfigDict(extra="allow")

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: Timestamp | None = None
    deletion_timestamp: Timestamp | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    owner_references: list[dict[str, Any]] = Field(default_factory=list)


class Condition(Resource):
    """A condition as Kubernetes defines it (metav1.Condition). `reason` names the cause, `message` says what to do next."""

    type: Annotated[str, Field(min_length=1, max_length=64)]
    """What the condition is about, e.g. Ready."""
    status: Literal["True", "False", "Unknown"]
    """True, False or Unknown."""
    reason: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """The cause in one CamelCase word."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """What happened and what to do next, for people."""
    last_transition_time: Timestamp
    """When the status last changed."""
    observed_generation: int | None = Field(default=None, ge=0)
    """The metadata.generation this was computed from."""


class EnvVar(Resource):
    """One environment variable with a plain value; secret values belong into a Secret, see envFrom."""

    name: Annotated[str, shaped(r"^[A-Za-z_][A-Za-z0-9_]*$", "the name of a variable has letters, digits and '_', and begins with no digit", 256)]
    """The variable's name."""
    value: Annotated[str, Field(max_length=32768)] = ""
    """Its value; visible to everybody who may read the Sandbox."""


def sandbox_api_id(metadata: Meta) -> str:
    """A Sandbox's id in archives, which Docker mode reads too: that of the HTTP API, or for one that was made with kubectl one from its uid."""
    return metadata.labels.get(LABEL_API_ID) or f"sb_{metadata.uid.replace('-', '')[:16]}"


def snapshot_api_id(metadata: Meta) -> str:
    """A Snapshot's id in archives, which Docker mode reads too: that of the HTTP API, or for one that was made with kubectl one from its uid."""
    return metadata.labels.get(LABEL_API_ID) or f"snap_{metadata.uid.replace('-', '')[:16]}"


def api_labels(annotations: Mapping[str, str]) -> dict[str, str]:
    """The labels that the API's caller gave a Sandbox."""
    try:
        found = json.loads(annotations.get(ANNOTATION_API_LABELS, "{}"))
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}
