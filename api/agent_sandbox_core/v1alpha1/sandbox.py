"""kind: Sandbox. A hardened pod with a workspace, for an agent's code."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from agent_sandbox_core.models import Timestamp

from .common import API_VERSION, KIND_SANDBOX, KIND_SNAPSHOT, Condition, EnvVar, Meta, Resource
from .rules import Deadline, Quantity, Rule, object_name, own_name, own_name_field, same, schema, shaped, unchanged

SecretName = Annotated[str, object_name("Secret")]
SnapshotName = Annotated[str, own_name_field(KIND_SNAPSHOT)]

SandboxPhase = Literal["Pending", "Running", "Replacing", "Restoring", "Stopped", "Failed", "Expired", "Deleting"]
SandboxReason = Literal[
    "Ready",
    "Creating",
    "Starting",
    "Replacing",
    "Restoring",
    "Filling",
    "Unschedulable",
    "ImagePullFailed",
    "InvalidImage",
    "QuotaExceeded",
    "PodSecurityRejected",
    "AdmissionRejected",
    "WorkspaceUnbound",
    "WorkspaceFull",
    "WorkspaceLost",
    "WaitingForDeletion",
    "NameConflict",
    "OOMKilled",
    "Evicted",
    "Crashed",
    "CrashLoop",
    "NodeLost",
    "EnvSecretMissing",
    "NamespaceNotEnabled",
    "NetworkNotEnforced",
    "SnapshotMissing",
    "SnapshotFailed",
    "Expired",
    "Deleting",
    "Unknown",
]
"""Reasons of the condition Ready, and of status.reason."""


_ATOMIC: Final = schema(list_type="atomic")
_BY_NAME: Final = schema(list_type="map", list_map_keys=["name"])
_BY_TYPE: Final = schema(list_type="map", list_map_keys=["type"])
_LABELS: Final = Rule(
    "self.all(key, size(key) <= 317 && key.matches(r'^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$') && "
    "self[key].matches(r'^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$'))",
    "these are no labels that a node can have: keys like kubernetes.io/arch, values of letters, digits, '-', '_' and '.'",
)


class EnvFrom(Resource):
    """A Secret whose keys become environment variables."""

    secret_name: SecretName
    """The Secret's name, in the Sandbox's namespace. The sandbox waits (EnvSecretMissing) until it is there."""
    optional: bool = False
    """Whether the sandbox may start without it."""


def _least(what: str, quantity: str, message: str, path: str) -> Rule:
    return Rule(f"!isQuantity(string({what})) || !quantity(string({what})).isLessThan(quantity('{quantity}'))", message, path)


def _request_below_limit(resource: str) -> Rule:
    request, limit = f"string(self.requests.{resource})", f"string(self.{resource})"
    return Rule(
        f"!has(self.requests) || !has(self.requests.{resource}) || !isQuantity({request}) || !isQuantity({limit}) || "
        f"!quantity({request}).isGreaterThan(quantity({limit}))",
        f"requests.{resource} must not be above the limit, resources.{resource}",
        path=".requests",
    )


class ResourceRequests(Resource):
    """What the scheduler reserves. Unset: cpu 100m (or the limit when lower), memory the limit."""

    cpu: Quantity | None = None
    """CPU reserved, e.g. 100m."""
    memory: Quantity | None = None
    """Memory reserved, e.g. 256Mi."""


class Resources(Resource):
    """Limits of the sandbox; on top of memory and pids comes what sandbox-init itself needs."""

    model_config = ConfigDict(
        json_schema_extra=schema(
            _least("self.cpu", "1m", "a CPU limit is at least 1m, a thousandth of a core", ".cpu"),
            _least("self.memory", "16Mi", "a memory limit is at least 16Mi", ".memory"),
            _request_below_limit("cpu"),
            _request_below_limit("memory"),
        )
    )

    cpu: Quantity = "1"
    """CPU limit, e.g. 500m or 2."""
    memory: Quantity = "512Mi"
    """Memory limit. What goes over it is killed: exit code 137, reason OOMKilled."""
    ephemeral_storage: Quantity = "2Gi"
    """Limit on the node's disk (logs, a writable root file system, an ephemeral workspace)."""
    requests: ResourceRequests = ResourceRequests()
    """What the scheduler reserves; set equal to the limits for Guaranteed."""


Cidr = Annotated[
    str,
    Field(max_length=64, json_schema_extra=schema(Rule("isCIDR(self)", "must be a CIDR, e.g. 203.0.113.0/24, or 203.0.113.7/32 for one address"))),
]


class Network(Resource):
    """What the sandbox may reach."""

    model_config = ConfigDict(
        json_schema_extra=schema(
            Rule(
                "self.mode == 'Allowlist' || !has(self.allow) || size(self.allow) == 0",
                "network.allow goes with network.mode Allowlist only: set the mode, or remove the list",
                path=".allow",
            )
        )
    )

    mode: Literal["None", "Open", "Allowlist"] = "None"
    """None: nothing. Open: the internet, never the cluster, the nodes, private ranges or metadata addresses. Allowlist: `allow` and DNS."""
    allow: Annotated[list[Cidr], Field(max_length=64, json_schema_extra=schema(list_type="set"))] = Field(default_factory=list)
    """CIDRs that mode Allowlist may reach, e.g. 203.0.113.0/24."""


class Workspace(Resource):
    """Where /workspace lives."""

    model_config = ConfigDict(json_schema_extra=schema(_least("self.size", "1Mi", "a workspace has at least 1Mi", ".size")))

    size: Quantity = "1Gi"
    """Size of the PVC (of the emptyDir when ephemeral). It may grow where the class allows it, never shrink."""
    storage_class_name: Annotated[str, object_name("StorageClass")] | None = None
    """StorageClass; unset: the cluster's default."""
    access_mode: Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"] = "ReadWriteOnce"
    """Access mode of the PVC."""
    ephemeral: bool = False
    """An emptyDir in place of a PVC: faster to create, gone with its pod (then phase Failed, reason WorkspaceLost)."""


class Source(Resource):
    """What the workspace starts with."""

    snapshot_name: SnapshotName
    """A Snapshot in the same namespace. The Sandbox is not Ready before its files are there."""


class Restore(Resource):
    """A rollback. A new requestID asks for one; the same one is never done twice."""

    model_config = ConfigDict(
        json_schema_extra=schema(Rule("self.requestID != 'none'", "requestID none is reserved: choose another one", path=".requestID"))
    )

    snapshot_name: SnapshotName
    """The Snapshot, in the same namespace, whose files replace the workspace."""
    request_id: Annotated[
        str,
        shaped(
            r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$",
            "a requestID has at most 64 letters, digits, '.', '_' and '-', and begins and ends with a letter or a digit",
            64,
        ),
        Field(alias="requestID"),
    ]
    """Names this request. One that is there when the Sandbox is created counts as done."""


class Toleration(Resource):
    """One taint that is borne, as in a pod."""

    model_config = ConfigDict(
        json_schema_extra=schema(
            Rule(
                "(has(self.operator) && self.operator == 'Exists') || (has(self.key) && self.key != '')",
                "a toleration without a key needs operator Exists",
                path=".key",
            ),
            Rule(
                "!has(self.operator) || self.operator != 'Exists' || !has(self.value) || self.value == ''",
                "operator Exists takes no value",
                path=".value",
            ),
            Rule(
                "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
                "tolerationSeconds goes with effect NoExecute only",
                path=".tolerationSeconds",
            ),
        )
    )

    key: Annotated[str, Field(max_length=316)] | None = None
    """The taint's key; unset with operator Exists: all."""
    operator: Literal["Exists", "Equal"] | None = None
    """Exists or Equal (the default)."""
    value: Annotated[str, Field(max_length=63)] | None = None
    """The taint's value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; unset: all."""
    toleration_seconds: int | None = None
    """How long a NoExecute taint is borne, in seconds; unset: for ever."""


class PullSecret(Resource):
    """A Secret of type kubernetes.io/dockerconfigjson."""

    name: SecretName
    """Its name, in the Sandbox's namespace."""


class SandboxSpec(Resource):
    """What the sandbox shall be.

    An edit of image, command, env, envFrom, resources, network.mode or the scheduling fields gives a new pod on the same workspace; timeoutSeconds,
    expiresAt, restore, network.allow, shutdownPolicy and labels do not. source, runtimeClassName, readOnlyRootFilesystem and workspace are immutable,
    except for a growing workspace.size. Where the workspace is ephemeral it would go with the pod, so what gives a new pod is immutable there too once
    the sandbox has started.
    """

    model_config = ConfigDict(
        json_schema_extra=schema(
            unchanged(
                "source",
                "source is immutable, the workspace was filled from it: use spec.restore to put other files there, or create another Sandbox",
            ),
            unchanged("runtimeClassName", "runtimeClassName is immutable: create another Sandbox, with spec.source to take the files along"),
            Rule(
                "self.readOnlyRootFilesystem == oldSelf.readOnlyRootFilesystem",
                "readOnlyRootFilesystem is immutable: create another Sandbox, with spec.source to take the files along",
                path=".readOnlyRootFilesystem",
            ),
            Rule(
                "self.workspace.ephemeral == oldSelf.workspace.ephemeral && self.workspace.accessMode == oldSelf.workspace.accessMode && "
                + same("workspace.storageClassName"),
                "workspace is immutable but for a growing size: create another Sandbox, with spec.source to take the files along",
                path=".workspace",
            ),
            Rule(
                "!isQuantity(string(self.workspace.size)) || !quantity(string(self.workspace.size)).isLessThan(quantity(string(oldSelf.workspace.size)))",
                "workspace.size may grow but never shrink: create a smaller Sandbox, with spec.source to take the files along",
                path=".workspace.size",
            ),
            Rule(
                "!has(self.restore) || !has(oldSelf.restore) || self.restore.requestID != oldSelf.restore.requestID || self.restore == oldSelf.restore",
                "a requestID stands for one Snapshot for ever: give a new requestID to restore another one",
                path=".restore.requestID",
            ),
        )
    )

    image: Annotated[str, shaped(r"^[^\s]+$", "an image is named without spaces, e.g. python:3.12-slim", 512)]
    """The container image. It needs no shell, no Python and no agent in it."""
    command: (
        Annotated[
            list[Annotated[str, Field(max_length=4096)]],
            Field(
                max_length=64,
                json_schema_extra=schema(
                    Rule("size(self) == 0 || self[0] != ''", "the first word of command is the program and must not be empty"), list_type="atomic"
                ),
            ),
        ]
        | None
    ) = None
    """A program that runs in the sandbox as long as it lives (argv). Unset: nothing runs until somebody calls."""
    env: Annotated[list[EnvVar], Field(max_length=256, json_schema_extra=_BY_NAME)] = Field(default_factory=list)
    """Environment of every command; see envFrom for secrets."""
    env_from: Annotated[list[EnvFrom], Field(max_length=16, json_schema_extra=_ATOMIC)] = Field(default_factory=list)
    """Secrets whose keys become environment variables of every command."""
    resources: Resources = Resources()
    """Limits and requests."""
    pids_limit: int = Field(default=256, ge=8, le=32768)
    """How many processes and threads the sandbox may have. status condition PidsLimitEnforced says how it is held."""
    runtime_class_name: Annotated[str, object_name("RuntimeClass")] | None = None
    """RuntimeClass, e.g. gvisor or kata; unset: the cluster's default."""
    read_only_root_filesystem: bool = True
    """False makes everything outside /workspace and /tmp writable until the next pod."""
    network: Network = Network()
    """What the sandbox may reach; default nothing."""
    workspace: Workspace = Workspace()
    """Where /workspace lives."""
    timeout_seconds: int | None = Field(default=None, ge=1, le=31_536_000)
    """Seconds from the creation of the Sandbox to its end; unset: no end. expiresAt wins."""
    expires_at: Deadline | None = None
    """When the sandbox ends (RFC 3339)."""
    shutdown_policy: Literal["Delete", "Retain"] = "Retain"
    """At its end: Delete the Sandbox with its workspace, or Retain it (pod gone, workspace kept, phase Expired)."""
    source: Source | None = None
    """What the workspace starts with; unset: empty."""
    restore: Restore | None = None
    """A rollback to a Snapshot."""
    node_selector: Annotated[
        dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32, json_schema_extra=schema(_LABELS, map_type="atomic"))
    ] = Field(default_factory=dict)
    """Labels that the node must have, as in a pod."""
    tolerations: Annotated[list[Toleration], Field(max_length=32, json_schema_extra=_ATOMIC)] = Field(default_factory=list)
    """Taints of nodes that are borne, as in a pod."""
    image_pull_secrets: Annotated[list[PullSecret], Field(max_length=8, json_schema_extra=_BY_NAME)] = Field(default_factory=list)
    """Secrets that the image is pulled with, as in a pod."""


class LastTermination(Resource):
    """Why the sandbox last died."""

    reason: str
    """OOMKilled, Evicted, Error, NodeLost, Deleted …"""
    message: Annotated[str, Field(max_length=1024)] = ""
    """What happened, for people; names the limit that was passed."""
    exit_code: int | None = None
    """The container's exit code, where it had one."""
    time: Timestamp
    """When it died."""


ENDED_RESTORES: Final = frozenset({"Succeeded", "Failed", "Superseded"})
"""Phases of a restore that does not go on."""


class LastRestore(Resource):
    """The newest rollback, or the first fill from source; written by the mover alone."""

    request_id: Annotated[str, Field(alias="requestID")]
    """Of spec.restore; `source:<uid>` for the first fill."""
    snapshot_name: str
    """The Snapshot."""
    phase: Literal["Pending", "Running", "Succeeded", "Failed", "Superseded"]
    """How it went."""
    message: Annotated[str, Field(max_length=1024)] = ""
    """What happened, and what to do next when it failed."""
    started_at: Timestamp | None = None
    """When the mover claimed it."""
    finished_at: Timestamp | None = None
    """When it ended."""
    claimed_by: Annotated[str, Field(max_length=253)] | None = None
    """The mover that works on it."""
    claimed_at: Timestamp | None = None
    """When it last said so; renewed while it works."""


class SandboxStatus(Resource):
    """What is. Written by the operator, lastRestore by the mover."""

    phase: SandboxPhase | None = None
    """The state in one word; conditions tell more."""
    reason: Annotated[str, Field(max_length=128)] | None = None
    """Reason of the condition Ready."""
    message: Annotated[str, Field(max_length=4096)] | None = None
    """Message of the condition Ready."""
    conditions: Annotated[list[Condition], Field(max_length=16, json_schema_extra=_BY_TYPE)] = Field(default_factory=list)
    """Ready, WorkspaceReady, NetworkEnforced, Isolation, PidsLimitEnforced."""
    observed_generation: int | None = Field(default=None, ge=0)
    """The metadata.generation that this status is about."""
    pod_name: str | None = None
    """The pod, when there is one."""
    pvc_name: str | None = None
    """The workspace's PVC, unless ephemeral."""
    node_name: str | None = None
    """Where the pod runs."""
    image: str | None = None
    """The image of the running pod."""
    pod_template_hash: str | None = None
    """Hash of the part of spec that makes the pod; a changed one means a new pod. Never depends on the operator's version."""
    expires_at: Timestamp | None = None
    """The effective end of life."""
    incarnation: int | None = Field(default=None, ge=0)
    """How often it was started; a higher one tells an agent that its processes are gone."""
    recent_starts: Annotated[list[Timestamp], Field(max_length=16, json_schema_extra=_ATOMIC)] = Field(default_factory=list)
    """Times of returns in the last 10 minutes, for the crash-loop limit."""
    last_termination: LastTermination | None = None
    """Why it last died."""
    last_restore: LastRestore | None = None
    """The newest rollback or the first fill."""
    init_version: str | None = None
    """Version of sandbox-init in the pod."""


_NEW_POD: Final = ("image", "resources", "network.mode", "workspace.size")
_NEW_POD_OPTIONAL: Final = ("command", "env", "envFrom", "nodeSelector", "tolerations", "imagePullSecrets")
"""Fields whose edit takes a new pod."""


class SandboxObject(Resource):
    """A sandbox for an agent's code: a hardened pod with a workspace whose files can be kept, rolled back and forked."""

    model_config = ConfigDict(
        json_schema_extra=schema(
            own_name(KIND_SANDBOX),
            Rule(
                "!self.spec.workspace.ephemeral || !has(oldSelf.status) || !has(oldSelf.status.incarnation) || oldSelf.status.incarnation == 0 || ("
                + " && ".join(
                    [f"self.spec.{field} == oldSelf.spec.{field}" for field in _NEW_POD] + [same(f"spec.{field}") for field in _NEW_POD_OPTIONAL]
                )
                + ")",
                f"the workspace is ephemeral and would go with the pod, so {', '.join(_NEW_POD + _NEW_POD_OPTIONAL)} are immutable now that the "
                "sandbox has started: create another Sandbox, with spec.source to take the files along",
                path=".spec",
            ),
        )
    )

    api_version: str = API_VERSION
    kind: str = KIND_SANDBOX
    metadata: Meta
    spec: SandboxSpec
    status: SandboxStatus = SandboxStatus()

    @classmethod
    def read(cls, raw: dict[str, Any]) -> SandboxObject:
        """From the API server's JSON."""
        return cls.model_validate(raw)

    def condition(self, name: str) -> Condition | None:
        """The condition of that type, if it is there."""
        return next((one for one in self.status.conditions if one.type == name), None)
