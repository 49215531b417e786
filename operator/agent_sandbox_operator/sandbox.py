"""Reconciling one Sandbox: observe, decide, act, and write the status where it differs.

Safe to repeat and to be killed anywhere: everything that must be remembered is in the objects themselves. What is remembered here (the answer of a
probe, a refusal that is not yet worth another try) is only a shortcut. It knows no kopf.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from agent_sandbox_core.v1alpha1 import SandboxObject, child_name

from .capabilities import Capabilities
from .cluster import Cluster, Refused
from .decide import LOOK_SECONDS, PATIENCE_SECONDS, QUIET_SECONDS, decide
from .enforcement import Enforcement
from .metrics import Metrics
from .notices import Notices
from .policies import Policies
from .probe import Prober, Question
from .refusals import Refusal
from .seen import (
    Action,
    CreatePod,
    CreateWorkspace,
    DeletePod,
    DeleteSandbox,
    GrowWorkspace,
    Probe,
    Seen,
    StartProbe,
    Trouble,
    Verdict,
    effective_expiry,
)
from .specs import Birth, build_pod, build_pvc
from .status import build_status, is_news, status_patch
from .store import Key, Kind, Object, Store
from .views import PodView, PvcView, controller_uid, read_pod, read_pvc

logger = logging.getLogger(__name__)

MAX_STEPS: Final = 8
"""Actions of one reconcile; a life has fewer (PVC, pod, probe)."""
TROUBLE_SECONDS: Final = LOOK_SECONDS - 1.0
"""How old the newest look at the events of a pod may be."""
YOUNG_SECONDS: Final = 10.0
SECRET_SOON, SECRET_LATER = 0.25, 3.0
"""How often a missing Secret is looked for: the facade makes it just after its Sandbox."""
HORIZON_SECONDS: Final = 3600.0
"""A deadline that is further away is looked at again by then."""


class StepsExhausted(Exception):
    """A reconcile wanted more than MAX_STEPS actions: a fault of ours, tried again later."""


@dataclass(slots=True)
class _Memory:
    """What is known of one Sandbox besides its objects."""

    generation: int
    refusal: Refusal | None = None
    until: datetime | None = None
    grow: tuple[str, str] | None = None
    trouble: Trouble | None = None
    looked: datetime | None = None


@dataclass(slots=True)
class Reconciler:
    """All that a reconcile works with."""

    store: Store
    cluster: Cluster
    prober: Prober
    policies: Policies
    enforcement: Enforcement
    capabilities: Capabilities
    notices: Notices
    metrics: Metrics
    _memory: dict[Key, _Memory] = field(default_factory=dict)

    async def reconcile(self, key: Key) -> float | None:
        """Makes the cluster look as the Sandbox says, as far as that can be done now. Returns after how many seconds to look again, None for when something happens."""
        for _ in range(MAX_STEPS):
            seen = await self._observe(key)
            if seen is None:
                self._forget(key)
                return None
            decision = decide(seen)
            if decision.action is None:
                break
            if seen.released:
                # Before anything is made: from here on it is an ordinary sandbox again, whoever is killed when.
                await self._write(key, seen, decision.verdict)
            try:
                if not await self._act(key, seen, decision.action):
                    break
            except Refused as error:
                self._remember(key, seen, decision.action, error)
        else:
            raise StepsExhausted(f"sandbox {key[0]}/{key[1]}: {MAX_STEPS} actions in one reconcile, and still {decision.action}")
        if not isinstance(decision.action, DeleteSandbox):
            await self._write(key, seen, decision.verdict)
        return self._next_look(key, seen, decision.verdict)

    # -- observe

    async def _observe(self, key: Key) -> Seen | None:
        raw = self.store.get("sandboxes", key)
        if raw is None:
            return None
        sandbox = SandboxObject.read(raw)
        now = datetime.now(UTC)
        memory = self._memory.setdefault(key, _Memory(sandbox.metadata.generation))
        if memory.generation != sandbox.metadata.generation:
            memory = self._memory[key] = _Memory(sandbox.metadata.generation)
        child = (key[0], child_name(sandbox.metadata.name, sandbox.metadata.uid))
        # What the status knew and the watches do not show may only be late: asked for before it is taken for lost.
        uid = sandbox.metadata.uid
        pod_raw = await self._child("pods", child, uid, known=sandbox.status.pod_name is not None)
        pvc_raw = None
        if not sandbox.spec.workspace.ephemeral:
            pvc_raw = await self._child("persistentvolumeclaims", child, uid, known=sandbox.status.pvc_name is not None)
        pod, pvc = read_pod(pod_raw) if pod_raw is not None else None, read_pvc(pvc_raw) if pvc_raw is not None else None
        waiting = memory.refusal is not None and memory.until is not None and now < memory.until
        return Seen(
            sandbox=sandbox,
            now=now,
            pod=pod,
            pvc=pvc,
            network=self.enforcement.view(sandbox),
            probe=self._probe(key, sandbox, pod, pvc) if pod is not None else None,
            refusal=_verdict_of(sandbox, memory.refusal) if waiting and memory.refusal is not None else None,
            grow_refusal=memory.grow[1] if memory.grow is not None and memory.grow[0] == sandbox.spec.workspace.size else None,
            trouble=await self._trouble(memory, pod, child, now),
            node_lost=await self._node_lost(pod, now),
            features=self.capabilities.optional(),
        )

    async def _child(self, kind: Kind, key: Key, uid: str, *, known: bool) -> Object | None:
        """A child; asked for when it should be there, or when somebody else has its name: no watch tells of strangers."""
        raw = self.store.get(kind, key)
        stranger = raw is not None and controller_uid(raw) != uid
        if stranger or (raw is None and known):
            raw = await self.cluster.get(kind, key)
            self.store.forget(kind, key)
            if raw is not None:
                self.store.put(kind, raw)
        return raw

    def _probe(self, key: Key, sandbox: SandboxObject, pod: PodView, pvc: PvcView | None) -> Probe | None:
        """What is known of this start. An operator that starts anew believes the status about a start that was Ready: a thousand channels would tell it no more."""
        question = ask(sandbox, pod, pvc.marker if pvc is not None else pod.marker)
        found = self.prober.find(key, question)
        ready = sandbox.condition("Ready")
        if ready is None or ready.status != "True" or not pod.running or sandbox.status.incarnation != pod.incarnation:
            return found
        if found is None and sandbox.spec.command:
            # A rollback meanwhile has ended its command.
            self.prober.start(key, question)
        if found is None or found.state == "asking":
            return Probe("answered", version=sandbox.status.init_version, measured=False)
        return found

    async def _trouble(self, memory: _Memory, pod: PodView | None, child: Key, now: datetime) -> Trouble | None:
        """The newest warning about a pod that has been on its way for a while, and about its PVC."""
        if pod is None or pod.created is None or pod.container.starts or (now - pod.created).total_seconds() < QUIET_SECONDS:
            memory.trouble, memory.looked = None, None
            return None
        if memory.looked is None or (now - memory.looked).total_seconds() >= TROUBLE_SECONDS:
            memory.looked = now
            memory.trouble = await self.cluster.newest_warning(child, now)
        return memory.trouble

    async def _node_lost(self, pod: PodView | None, now: datetime) -> bool:
        """Whether the pod's node is silent; asked only when the pod looks like it."""
        if pod is None or not pod.node:
            return False
        silent = pod.container.state == "running" and pod.ready is False and not pod.finished
        stuck = pod.deleted is not None and (now - pod.deleted).total_seconds() > PATIENCE_SECONDS / 2
        return (silent or stuck) and await self.cluster.node_is_silent(pod.node)

    # -- act

    async def _act(self, key: Key, seen: Seen, action: Action) -> bool:
        """Carries it out. Whether to look at everything again now."""
        sandbox = seen.sandbox
        match action:
            case CreateWorkspace():
                await self._create("persistentvolumeclaims", build_pvc(sandbox))
            case GrowWorkspace(size):
                self.store.put("persistentvolumeclaims", await self.cluster.grow_pvc((key[0], child_name(key[1], sandbox.metadata.uid)), size))
            case CreatePod():
                await self._create_pod(key, seen, action)
            case DeletePod():
                await self._delete_pod(key, seen, action)
            case DeleteSandbox():
                return await self._delete_sandbox(key, sandbox)
            case StartProbe():
                assert seen.pod is not None
                self.prober.start(key, ask(sandbox, seen.pod, seen.marker))
                return False
        return True

    async def _create(self, kind: Kind, manifest: Object) -> None:
        """Creates a child, or takes what has its name already into account: ours, one that goes, or a stranger. Deciding about it is not done here."""
        self.store.put(kind, await self.cluster.create(kind, manifest))

    async def _create_pod(self, key: Key, seen: Seen, action: CreatePod) -> None:
        """The Secrets must be there, and the network closed, before anything can run."""
        sandbox = seen.sandbox
        home_given = await self._secrets(sandbox, seen.now)
        await self.policies.ensure(key[0])
        await self.policies.ensure_allowed(sandbox)
        birth = Birth(cause=action.cause, starts_before=seen.life.incarnation, home_given=home_given)
        await self._create("pods", build_pod(sandbox, self.capabilities.options(sandbox.spec.runtime_class_name), birth))

    async def _secrets(self, sandbox: SandboxObject, now: datetime) -> bool:
        """Waits for the Secrets of envFrom by refusing to go on. Whether one of them has HOME; their values are not looked at."""
        home = False
        for source in sandbox.spec.env_from:
            names = await self.cluster.secret_keys((sandbox.metadata.namespace, source.secret_name))
            if names is None and not source.optional:
                created = sandbox.metadata.creation_timestamp
                young = created is not None and (now - created).total_seconds() < YOUNG_SECONDS
                message = f"Secret {source.secret_name} of spec.envFrom is not there. Create it; the sandbox starts then"
                raise Refused(Refusal("EnvSecretMissing", message, SECRET_SOON if young else SECRET_LATER))
            home = home or "HOME" in (names or ())
        return home

    async def _delete_pod(self, key: Key, seen: Seen, action: DeletePod) -> None:
        if action.without is not None:
            self.capabilities.give_up(action.without, seen.sandbox.spec.runtime_class_name, seen.pod.node if seen.pod is not None else "")
        child = (key[0], child_name(key[1], seen.sandbox.metadata.uid))
        logger.info("pod %s/%s is deleted: %s", *child, action.why)
        left = await self.cluster.delete("pods", child, action.uid)
        if left is None:
            self.store.forget("pods", child)
        else:
            self.store.put("pods", left)

    async def _delete_sandbox(self, key: Key, sandbox: SandboxObject) -> bool:
        """Deletes it as it was seen: a deadline that was moved meanwhile wins."""
        logger.info("sandbox %s/%s is deleted: its time is over", *key)
        if await self.cluster.delete_sandbox(key, sandbox.metadata.uid, sandbox.metadata.resource_version):
            return False
        fresh = await self.cluster.get("sandboxes", key)
        if fresh is None:
            self.store.forget("sandboxes", key)
        else:
            self.store.put("sandboxes", fresh)
        return True

    def _remember(self, key: Key, seen: Seen, action: Action, error: Refused) -> None:
        memory = self._memory[key]
        if isinstance(action, GrowWorkspace):
            memory.grow = (action.size, error.refusal.message)
            return
        memory.refusal = error.refusal
        memory.until = datetime.fromtimestamp(datetime.now(UTC).timestamp() + error.refusal.seconds, UTC)
        logger.debug("sandbox %s/%s: %s", *key, error.refusal.message)

    # -- status

    async def _write(self, key: Key, seen: Seen, verdict: Verdict) -> None:
        raw = self.store.get("sandboxes", key)
        if raw is None or raw["metadata"]["uid"] != seen.sandbox.metadata.uid:
            return
        await self.policies.ensure_allowed(seen.sandbox)
        patch = status_patch(raw.get("status") or {}, build_status(seen, verdict))
        if not patch or not is_news(patch, raw.get("status") or {}, verdict):
            return
        written = await self.cluster.patch_status(key, patch)
        if written is None:
            return
        self.store.put("sandboxes", written)
        await self.notices.tell(seen, verdict)

    def _next_look(self, key: Key, seen: Seen, verdict: Verdict) -> float | None:
        memory = self._memory[key]
        times = [HORIZON_SECONDS] if (end := effective_expiry(seen.sandbox)) is not None and not seen.expired else []
        if end is not None and not seen.expired:
            times.append(max(0.0, (end - seen.now).total_seconds()) + 0.01)
        if verdict.wake is not None:
            times.append(verdict.wake)
        if seen.refusal is not None and memory.until is not None:
            times.append(max(0.0, (memory.until - seen.now).total_seconds()) + 0.01)
        return min(times, default=None)

    def _forget(self, key: Key) -> None:
        self._memory.pop(key, None)
        self.prober.forget(key)
        self.policies.forget(key)


def ask(sandbox: SandboxObject, pod: PodView, marker: str) -> Question:
    """What is to be known before this pod counts as Ready."""
    return Question(pod.name, pod.uid, pod.incarnation, marker, tuple(sandbox.spec.command or ()))


def _verdict_of(sandbox: SandboxObject, refusal: Refusal) -> Verdict:
    if refusal.reason == "Deleting":
        return Verdict("Deleting", "Deleting", refusal.message)
    return Verdict("Stopped" if sandbox.status.incarnation else "Pending", refusal.reason, refusal.message)
