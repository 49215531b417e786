"""What to do about a Sandbox: an ordered list of pure checks. The first that has something to say decides.

Each check takes what was seen and returns a Decision (the verdict for the status, and at most one action) or None. An action is carried out and
everything is looked at again, so no check needs to know what comes after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from agent_sandbox_core import hardening
from agent_sandbox_core.v1alpha1 import SandboxReason, source_marker
from agent_sandbox_core.v1alpha1.quantities import parse_quantity

from .life import MAX_RETURNS, stop_reason
from .seen import (
    CreatePod,
    CreateWorkspace,
    Decision,
    DeletePod,
    DeleteSandbox,
    Feature,
    GrowWorkspace,
    Seen,
    StartProbe,
    Verdict,
    wants_fill,
    wants_restore,
)
from .specs import Cause
from .views import PodView, PvcView, Waiting

QUIET_SECONDS: Final = 3.0
"""How long a pod may be on its way before its events are read."""
LOOK_SECONDS: Final = 5.0
"""How often they are read then, and a node that may be lost is looked at."""
PATIENCE_SECONDS: Final = 20.0
"""After this a pod that was to be gone makes its node suspect."""
PROBES_IN_SILENCE: Final = 3
"""A first channel may come too early; only what fails more often is told."""

PULL_REASONS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "RegistryUnavailable", "ImageInspectError", "SignatureValidationFailed"}
)
START_REASONS: Final = frozenset({"CreateContainerError", "RunContainerError", "StartError", "ContainerCannotRun", "CreateContainerConfigError"})
_MISSING_SECRET = re.compile(r'secret "?([^"\s]+)"? not found|references non-existent secret key|couldn\'t find key', re.IGNORECASE)
_BACK_OFF = re.compile(r'\ABack-off pulling image "[^"]*": (?:ErrImagePull: )?')
"""The kubelet tells the cause twice, in two forms; one is enough for a status that changes only when something does."""
_VOLUME = re.compile(r"persistentvolume|volume node affinity|volume\(s\)|storageclass", re.IGNORECASE)
_USER_NAMESPACE = re.compile(
    r"user ?namespace|namespace of type user|namespaces/user|userns|idmap|id-map|hostUsers|UserNamespacesSupport", re.IGNORECASE
)
_IMAGE_VOLUME = re.compile(r"image ?volume|image mount|volume type.*image|unsupported.*image", re.IGNORECASE)


def decide(seen: Seen) -> Decision:
    """The decision of the first check that makes one; the last always does."""
    return next(found for check in CHECKS if (found := check(seen)) is not None)


def check_deletion(seen: Seen) -> Decision | None:
    """A Sandbox that is being deleted is left to the garbage collector."""
    if seen.sandbox.metadata.deletion_timestamp is None:
        return None
    return Decision(Verdict("Deleting", "Deleting", "it is being deleted with its pod and its workspace"))


def check_expiry(seen: Seen) -> Decision | None:
    """The end of its time: everything goes, or the pod alone."""
    if not seen.expired:
        return None
    if seen.sandbox.spec.shutdown_policy == "Delete":
        return Decision(Verdict("Expired", "Expired", "its time is over; it is being deleted"), DeleteSandbox())
    kept = "its workspace was ephemeral and is gone" if seen.ephemeral else "its workspace is kept"
    verdict = Verdict("Expired", "Expired", f"its time is over: the pod is gone, {kept}. Set spec.expiresAt to a later time to go on, or delete it")
    leaving = seen.pod is not None and seen.pod.deleted is None and _ours(seen, seen.pod)
    return Decision(verdict, DeletePod(seen.pod.uid, "its time is over") if leaving and seen.pod is not None else None)


def check_name(seen: Seen) -> Decision | None:
    """What bears a child's name and is somebody else's is never touched."""
    for kind, child in (("PVC", seen.pvc), ("pod", seen.pod)):
        if child is not None and not _ours(seen, child):
            message = f"{kind} {child.name} exists and does not belong to this Sandbox: delete or rename it, or create the Sandbox under another name"
            return Decision(Verdict("Failed", "NameConflict", message, wake=LOOK_SECONDS))
    return None


def check_workspace(seen: Seen) -> Decision | None:
    """The PVC: made once, never made again in silence."""
    if seen.ephemeral:
        return None
    pvc = seen.pvc
    if pvc is None:
        return _missing_workspace(seen)
    if pvc.deleted is not None and seen.pod is None:
        message = f"PVC {pvc.name} is being deleted; somebody else still uses it. Its files go with it: delete this Sandbox, or make a new one from a Snapshot"
        return Decision(Verdict("Stopped", "WaitingForDeletion", message, wake=LOOK_SECONDS))
    if pvc.phase == "Lost":
        return _lost(seen, f"the volume behind PVC {pvc.name} is gone, and its files with it")
    wanted = seen.sandbox.spec.workspace.size
    if seen.grow_refusal is None and pvc.deleted is None and parse_quantity(wanted) > parse_quantity(pvc.size):
        return Decision(_on_its_way(seen, "the workspace is being made larger"), GrowWorkspace(wanted))
    return None


def check_crash_loop(seen: Seen) -> Decision | None:
    """Down more often than it may return by itself. An ephemeral workspace is left to the kubelet, which waits longer each time: deleting its pod would delete it."""
    if seen.ephemeral:
        return None
    stopped = seen.sandbox.status.reason == "CrashLoop" and not seen.released
    if not stopped and not (seen.life.worn_out and _down(seen)):
        return None
    last = seen.life.last_termination
    cause = f"; last: {last.message}" if last is not None else ""
    message = (
        f"it died {MAX_RETURNS + 1} times within 10 minutes and stays stopped{cause}. Its workspace is kept: roll it back (spec.restore), "
        "edit the spec, make a new one from a Snapshot, or delete it"
    )
    there = seen.pod is not None and seen.pod.deleted is None
    return Decision(
        Verdict("Stopped", "CrashLoop", message), DeletePod(seen.pod.uid, "it died too often") if there and seen.pod is not None else None
    )


def check_ephemeral(seen: Seen) -> Decision | None:
    """A workspace that lived in its pod does not outlive it."""
    pod = seen.pod
    if not seen.ephemeral or not seen.life.incarnation or (pod is not None and not pod.finished and pod.deleted is None):
        return None
    last = seen.life.last_termination
    found = _lost(seen, f"its workspace was ephemeral and went with its pod{f' ({last.reason}: {last.message})' if last else ''}")
    return replace(found, action=DeletePod(pod.uid, "its workspace is lost")) if pod is not None and pod.deleted is None else found


def check_missing_pod(seen: Seen) -> Decision | None:
    """No pod: make one, at once."""
    if seen.pod is not None:
        return None
    if seen.refusal is not None:
        return Decision(seen.refusal)
    return Decision(_on_its_way(seen, "its pod is being made"), CreatePod(_cause(seen)))


def check_leaving_pod(seen: Seen) -> Decision | None:
    """A pod that goes: the next one has its name, so it waits."""
    pod = seen.pod
    if pod is None or pod.deleted is None:
        return None
    if seen.node_lost:
        return Decision(_node_lost(pod))
    late = (seen.now - pod.deleted).total_seconds() > PATIENCE_SECONDS
    if seen.edited:
        verdict = Verdict("Replacing", "Replacing", f"pod {pod.name} ends; a new one follows on the same workspace", wake=LOOK_SECONDS)
    elif pod.disruption is not None:
        verdict = Verdict("Stopped", "Evicted", f"its pod is taken from node {pod.node} ({pod.disruption}); it returns by itself", wake=LOOK_SECONDS)
    else:
        verdict = Verdict(
            "Stopped", "WaitingForDeletion", f"pod {pod.name} is being deleted; a new one follows on the same workspace", wake=LOOK_SECONDS
        )
    if late:
        where = f"node {pod.node} and " if pod.node else ""
        message = f"pod {pod.name} should be gone and is not: look at {where}the pod's finalizers. A new one follows when it is gone"
        verdict = Verdict(verdict.phase, "WaitingForDeletion", message, wake=LOOK_SECONDS)
    return Decision(verdict)


def check_finished_pod(seen: Seen) -> Decision | None:
    """A pod that ended for good (evicted, its node shut down) makes room for the next."""
    if seen.pod is None or not seen.pod.finished:
        return None
    return Decision(_on_its_way(seen, "its pod ended"), DeletePod(seen.pod.uid, "it ended"))


def check_edit(seen: Seen) -> Decision | None:
    """The spec asks for another pod. An ephemeral workspace that is in use would go with its pod, so then the pod stays as it is."""
    pod = seen.pod
    if pod is None or (seen.ephemeral and seen.life.incarnation):
        return None
    if seen.edited:
        return Decision(
            Verdict("Replacing", "Replacing", f"the spec was edited: pod {pod.name} ends, a new one follows on the same workspace"),
            DeletePod(pod.uid, "the spec was edited"),
        )
    return None


def check_node(seen: Seen) -> Decision | None:
    """A node that does not answer: nothing is forced, since the pod may still run and write there."""
    return Decision(_node_lost(seen.pod)) if seen.pod is not None and seen.node_lost else None


def check_scheduling(seen: Seen) -> Decision | None:
    """The scheduler found no place."""
    pod = seen.pod
    if pod is None or pod.unschedulable is None or pod.node or not _patient(seen, pod):
        return None
    if _VOLUME.search(pod.unschedulable):
        cause = seen.trouble.message if seen.trouble is not None and seen.trouble.kind == "PersistentVolumeClaim" else pod.unschedulable
        return Decision(
            _told(
                seen, "WorkspaceUnbound", f"its workspace has no volume: {cause}. Check spec.workspace.storageClassName and the class's provisioner"
            )
        )
    return Decision(
        _told(
            seen,
            "Unschedulable",
            f"no node can take it: {pod.unschedulable} Lower spec.resources, free or add a node, or edit nodeSelector and tolerations",
        )
    )


def check_waiting(seen: Seen) -> Decision | None:
    """The kubelet does not get its container started."""
    pod = seen.pod
    if pod is None:
        return None
    for part in (pod.installer, pod.container):
        if part is None:
            continue
        if part.waiting is not None and (found := _read_waiting(seen, pod, part.waiting)) is not None:
            return found
        ended = part.ended
        if (
            part.state == "ended"
            and ended is not None
            and ended.reason in START_REASONS
            and (found := _give_up(seen, pod, ended.message)) is not None
        ):
            return found
    return None


def check_trouble(seen: Seen) -> Decision | None:
    """Nothing in its status, but its events tell what holds it up."""
    pod, trouble = seen.pod, seen.trouble
    if pod is None or trouble is None or pod.container.starts:
        return None
    if (found := _give_up(seen, pod, trouble.message)) is not None:
        return found
    if trouble.kind == "PersistentVolumeClaim" or trouble.reason in {"FailedMount", "FailedAttachVolume", "FailedMapVolume"}:
        return Decision(_told(seen, "WorkspaceUnbound", f"its workspace cannot be had: {trouble.message}. Check the class and its provisioner"))
    return Decision(_told(seen, "Starting", f"its pod does not start ({trouble.reason}): {trouble.message}"))


def check_death(seen: Seen) -> Decision | None:
    """Its container ended; the kubelet starts it again in the same pod."""
    if seen.pod is None or not seen.pod.container.ended or seen.pod.container.state == "running":
        return None
    if seen.pod.container.ended.orderly:
        return Decision(Verdict("Replacing", "Replacing", "it was shut down in order, and starts anew on the same workspace"))
    return Decision(_on_its_way(seen, "its container ended"))


def check_start(seen: Seen) -> Decision | None:
    """On its way, and nothing is wrong."""
    pod = seen.pod
    if pod is None or pod.running:
        return None
    age = (seen.now - pod.created).total_seconds() if pod.created is not None else 0.0
    return Decision(replace(_on_its_way(seen, "its pod starts"), wake=LOOK_SECONDS if age >= QUIET_SECONDS else QUIET_SECONDS - age))


def check_restore(seen: Seen) -> Decision | None:
    """Files that are not there yet: the first fill, or a rollback. The mover does both."""
    source, last = seen.sandbox.spec.source, seen.sandbox.status.last_restore
    if source is not None and wants_fill(seen):
        about = last if last is not None and last.request_id == source_marker(seen.sandbox.metadata.uid) else None
        if about is not None and about.phase == "Failed":
            message = f"its files could not be taken from Snapshot {source.snapshot_name}: {about.message}"
            return Decision(Verdict("Failed", "SnapshotFailed", message))
        if about is not None and about.phase == "Pending" and about.message:
            return Decision(Verdict("Restoring", "SnapshotMissing", about.message))
        return Decision(Verdict("Restoring", "Filling", f"its files come from Snapshot {source.snapshot_name}"))
    asked = seen.sandbox.spec.restore
    if asked is not None and wants_restore(seen):
        about = last if last is not None and last.request_id == asked.request_id else None
        if about is not None and about.phase == "Pending" and about.message:
            return Decision(Verdict("Restoring", "Restoring", about.message))
        return Decision(Verdict("Restoring", "Restoring", f"it is rolled back to Snapshot {asked.snapshot_name} (request {asked.request_id})"))
    return None


def check_answer(seen: Seen) -> Decision | None:
    """Ready is what answers over a channel, not what runs."""
    probe = seen.probe
    if probe is None:
        return Decision(_on_its_way(seen, "its pod runs; a first channel is being opened"), StartProbe())
    if probe.state == "answered":
        return None
    if probe.state == "asking" or probe.failures <= PROBES_IN_SILENCE:
        return Decision(_on_its_way(seen, "its pod runs; a first channel is being opened"))
    return Decision(_told(seen, "Starting", f"its pod runs, but sandbox-init does not answer: {probe.message}"))


def check_network(seen: Seen) -> Decision | None:
    """Where the installation asks for it, nothing is Ready before its network was seen to be closed."""
    if not seen.network.required or seen.network.status == "True":
        return None
    return Decision(Verdict("Pending", "NetworkNotEnforced", seen.network.message, wake=LOOK_SECONDS))


def give_ready(seen: Seen) -> Decision:
    """Nothing is in the way."""
    ignored = ""
    if seen.edited:
        ignored = (
            ". An edit of its spec is not carried out: it takes a new pod, with which the ephemeral workspace would go. Make a new Sandbox for it"
        )
    message = f"it takes commands{ignored}"
    if seen.life.incarnation > 1 and (last := seen.life.last_termination) is not None and not ignored:
        message = f"it takes commands, after {seen.life.incarnation} starts; last death: {last.reason}, {last.message}"
    return Decision(Verdict("Running", "Ready", message, ready="True"))


CHECKS: Final[tuple[Callable[[Seen], Decision | None], ...]] = (
    check_deletion,
    check_expiry,
    check_name,
    check_workspace,
    check_crash_loop,
    check_ephemeral,
    check_missing_pod,
    check_leaving_pod,
    check_finished_pod,
    check_edit,
    check_node,
    check_scheduling,
    check_waiting,
    check_trouble,
    check_death,
    check_start,
    check_restore,
    check_answer,
    check_network,
    give_ready,
)


def _ours(seen: Seen, child: PodView | PvcView) -> bool:
    return child.owner_uid == seen.sandbox.metadata.uid


def _cause(seen: Seen) -> Cause:
    if not seen.life.incarnation:
        return "create"
    wanted = seen.edited or seen.sandbox.status.phase in {"Expired", "Replacing"} or seen.sandbox.status.reason == "CrashLoop"
    return "replace" if wanted else "return"


def _down(seen: Seen) -> bool:
    pod = seen.pod
    if pod is None:
        return seen.life.incarnation > 0
    return pod.finished or (pod.container.ended is not None and pod.container.state != "running")


def _patient(seen: Seen, pod: PodView) -> bool:
    """A pod that was just made may be refused for what is being made beside it."""
    return pod.created is None or (seen.now - pod.created).total_seconds() >= QUIET_SECONDS


def _on_its_way(seen: Seen, what: str) -> Verdict:
    """Not ready, and nothing is wrong but what was told before."""
    pod, life = seen.pod, seen.life
    cause = pod.cause if pod is not None else _cause(seen)
    fresh = pod is None or pod.container.starts <= 1
    down = pod is not None and (pod.finished or (pod.container.ended is not None and pod.container.state != "running"))
    if (cause == "replace" and fresh and not down) or (pod is not None and pod.deleted is None and seen.edited and not seen.ephemeral):
        return Verdict("Replacing", "Replacing", "a new pod starts on the same workspace")
    if life.incarnation and (cause == "return" or not fresh or down):
        last = life.last_termination
        told = f"{last.message}. It returns by itself on its workspace" if last is not None else f"{what}; it returns by itself on its workspace"
        return Verdict("Stopped", stop_reason(last), told)
    return Verdict("Pending", "Creating", "its workspace and its pod are being made")


def _told(seen: Seen, reason: SandboxReason, message: str) -> Verdict:
    """Not ready because of something that somebody can do something about."""
    been = seen.life.incarnation > 1 or seen.life.last_termination is not None or (seen.pod is not None and seen.pod.cause != "create")
    return Verdict("Stopped" if been else "Pending", reason, message, wake=LOOK_SECONDS)


def _missing_workspace(seen: Seen) -> Decision:
    known = seen.sandbox.status.pvc_name
    if known is not None:
        return _lost(seen, f"PVC {known} is gone, and its files with it")
    if seen.refusal is not None:
        return Decision(seen.refusal)
    return Decision(_on_its_way(seen, "the workspace is being made"), CreateWorkspace())


def _lost(seen: Seen, what: str) -> Decision:
    return Decision(Verdict("Failed", "WorkspaceLost", f"{what}. Delete this Sandbox, or make a new one with spec.source of its newest Snapshot"))


def _node_lost(pod: PodView) -> Verdict:
    message = (
        f"node {pod.node} does not answer. Nothing is forced, since the sandbox may still run there. It goes on when the node is back; if it never comes "
        f"back, delete the Node or taint it (kubectl taint node {pod.node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute), or make a new "
        "Sandbox from its newest Snapshot"
    )
    return Verdict("Stopped", "NodeLost", message, wake=LOOK_SECONDS)


def _read_waiting(seen: Seen, pod: PodView, waiting: Waiting) -> Decision | None:
    image = seen.sandbox.spec.image
    text = _BACK_OFF.sub("", waiting.message.strip())
    pulling = waiting.reason in PULL_REASONS
    if waiting.reason == "InvalidImageName":
        return Decision(_told(seen, "InvalidImage", f"{image!r} is no image reference: {text or 'correct spec.image'}"))
    if not pulling and waiting.reason not in START_REASONS:
        return None
    if not pulling and _MISSING_SECRET.search(text):
        return Decision(_told(seen, "EnvSecretMissing", f"a Secret of spec.envFrom is not there: {text}. Create it; the sandbox starts then"))
    if (found := _give_up(seen, pod, text)) is not None:
        return found
    if pulling:
        message = f"image {image} cannot be pulled: {text or waiting.reason}. Check spec.image, spec.imagePullSecrets and the registry"
        return Decision(_told(seen, "ImagePullFailed", message))
    return Decision(_told(seen, "Crashed", f"its container does not start ({waiting.reason}): {text}"))


def _give_up(seen: Seen, pod: PodView, text: str) -> Decision | None:
    """A feature that this cluster or this runtime class lacks: one more pod, without it. Never for a workspace that would go with the pod."""
    if seen.ephemeral and pod.container.starts > 1:
        return None
    feature: Feature | None = None
    if not pod.host_users and _USER_NAMESPACE.search(text):
        feature = "user-namespace"
    elif pod.delivery == "image-volume" and (_IMAGE_VOLUME.search(text) or (hardening.GUEST_PATH in text and "permission denied" in text)):
        feature = "image-volume"
    if feature is None or feature not in seen.features:
        return None
    return Decision(
        Verdict("Pending", "Creating", f"its pod does not start with {feature}; it is made once more without: {text}"),
        DeletePod(pod.uid, f"it does not start with {feature}", without=feature),
    )
