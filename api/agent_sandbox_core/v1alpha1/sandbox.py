"""kind: Sandbox. A hardened pod with a workspace, for an agent's code."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from agent_sandbox_core.models import Timestamp

from .common import API_VERSION, KIND_SANDBOX, NAME_PATTERN, Condition, EnvVar, Meta, Resource

Quantity = Annotated[str, Field(max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?([EPTGMk]i?|m|e[0-9]+)?$")]
"""A Kubernetes quantity: 500m, 1.5, 512Mi, 1Gi."""
ObjectName = Annotated[str, Field(min_length=1, max_length=253)]
SnapshotName = Annotated[str, Field(min_length=1, max_length=50, pattern=NAME_PATTERN)]

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


class EnvFrom(Resource):
    """A Secret whose keys become environment variables."""

    secret_name: ObjectName
    """The Secret's name, in the Sandbox's namespace. The sandbox waits (EnvSecretMissing) until it is there."""
    optional: bool = False
    """Whether the sandbox may start without it."""


class ResourceRequests(Resource):
    """What the scheduler reserves. Unset: cpu 100m (or the limit when lower), memory the limit."""

    cpu: Quantity | None = None
    """CPU reserved, e.g. 100m."""
    memory: Quantity | None = None
    """Memory reserved, e.g. 256Mi."""


class Resources(Resource):
    """Limits of the sandbox; on top of memory and pids comes what sandbox-init itself needs."""

    cpu: Quantity = "1"
    """CPU limit, e.g. 500m or 2."""
    memory: Quantity = "512Mi"
    """Memory limit. What goes over it is killed: exit code 137, reason OOMKilled."""
    ephemeral_storage: Quantity = "2Gi"
    """Limit on the node's disk (logs, a writable root file system, an ephemeral workspace)."""
    requests: ResourceRequests = ResourceRequests()
    """What the scheduler reserves; set equal to the limits for Guaranteed."""


class Network(Resource):
    """What the sandbox may reach."""

    mode: Literal["None", "Open", "Allowlist"] = "None"
    """None: nothing. Open: the internet, never the cluster, the nodes, private ranges or metadata addresses. Allowlist: `allow` and DNS."""
    allow: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=64)] = Field(default_factory=list)
    """CIDRs that mode Allowlist may reach, e.g. 203.0.113.0/24."""


class Workspace(Resource):
    """Where /workspace lives."""

    size: Quantity = "1Gi"
    """Size of the PVC (of the emptyDir when ephemeral). It may grow where the class allows it, never shrink."""
    storage_class_name: Annotated[str, Field(max_length=253)] | None = None
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

    snapshot_name: SnapshotName
    """The Snapshot, in the same namespace, whose files replace the workspace."""
    request_id: Annotated[str, Field(alias="requestID", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]
    """Names this request. One that is there when the Sandbox is created counts as done."""


class Toleration(Resource):
    """As in a pod."""

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

    name: ObjectName
    """Its name, in the Sandbox's namespace."""


class SandboxSpec(Resource):
    """What the sandbox shall be.

    An edit of image, command, env, envFrom, resources, network.mode or the scheduling fields gives a new pod on the same workspace; timeoutSeconds,
    expiresAt, restore, network.allow, shutdownPolicy and labels do not. source, runtimeClassName, readOnlyRootFilesystem and workspace are immutable,
    except for a growing workspace.size.
    """

    image: Annotated[str, Field(min_length=1, max_length=512)]
    """The container image. It needs no shell, no Python and no agent in it."""
    command: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=64)] | None = None
    """A program that runs in the sandbox as long as it lives (argv). Unset: nothing runs until somebody calls."""
    env: Annotated[list[EnvVar], Field(max_length=256)] = Field(default_factory=list)
    """Environment of every command; see envFrom for secrets."""
    env_from: Annotated[list[EnvFrom], Field(max_length=16)] = Field(default_factory=list)
    """Secrets whose keys become environment variables of every command."""
    resources: Resources = Resources()
    """Limits and requests."""
    pids_limit: int = Field(default=256, ge=8, le=32768)
    """How many processes and threads the sandbox may have. status condition PidsLimitEnforced says how it is held."""
    runtime_class_name: Annotated[str, Field(max_length=253)] | None = None
    """RuntimeClass, e.g. gvisor or kata; unset: the cluster's default."""
    read_only_root_filesystem: bool = True
    """False makes everything outside /workspace and /tmp writable until the next pod."""
    network: Network = Network()
    """What the sandbox may reach; default nothing."""
    workspace: Workspace = Workspace()
    """Where /workspace lives."""
    timeout_seconds: int | None = Field(default=None, ge=1, le=31_536_000)
    """Seconds from the creation of the Sandbox to its end; unset: no end. expiresAt wins."""
    expires_at: Timestamp | None = None
    """When the sandbox ends (RFC 3339)."""
    shutdown_policy: Literal["Delete", "Retain"] = "Retain"
    """At its end: Delete the Sandbox with its workspace, or Retain it (pod gone, workspace kept, phase Expired)."""
    source: Source | None = None
    """What the workspace starts with; unset: empty."""
    restore: Restore | None = None
    """A rollback to a Snapshot."""
    node_selector: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)] = Field(default_factory=dict)
    """As in a pod."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = Field(default_factory=list)
    """As in a pod."""
    image_pull_secrets: Annotated[list[PullSecret], Field(max_length=8)] = Field(default_factory=list)
    """As in a pod."""


class LastTermination(Resource):
    """Why the sandbox last died."""

    reason: str
    """OOMKilled, Evicted, Error, NodeLost, Deleted …"""
    message: Annotated[str, Field(max_length=1024)] = ""
    """What happened, for people; names the limit that was passed."""
    exit_code: int | None = None
    """The container's exit code, where it had one."""
    time: Timestamp
    """When."""


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


class SandboxStatus(Resource):
    """What is. Written by the operator, lastRestore by the mover."""

    phase: SandboxPhase | None = None
    """The state in one word; conditions tell more."""
    reason: Annotated[str, Field(max_length=128)] | None = None
    """Reason of the condition Ready."""
    message: Annotated[str, Field(max_length=4096)] | None = None
    """Message of the condition Ready."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = Field(default_factory=list)
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
    recent_starts: Annotated[list[Timestamp], Field(max_length=16)] = Field(default_factory=list)
    """Times of returns in the last 10 minutes, for the crash-loop limit."""
    last_termination: LastTermination | None = None
    """Why it last died."""
    last_restore: LastRestore | None = None
    """The newest rollback or the first fill."""
    init_version: str | None = None
    """Version of sandbox-init in the pod."""


class SandboxObject(Resource):
    """A Sandbox as the API server gives it."""

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
