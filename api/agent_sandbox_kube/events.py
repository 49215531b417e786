"""Events on objects: what a person sees in `kubectl describe`. They repeat what the status tells, so none of them is worth a failure."""

from __future__ import annotations

import hashlib
import logging
from datetime import UTC, datetime
from typing import Final

from .client import Kube, Object
from .errors import AlreadyExists, KubeError
from .resources import EVENTS

logger = logging.getLogger(__name__)

MESSAGE_CHARACTERS: Final = 1024
"""As many as the API server takes."""
NAME_CHARACTERS: Final = 230


class EventPoster:
    """Posts Events in the name of one component; `instance` tells its replicas apart."""

    def __init__(self, kube: Kube, component: str, instance: str) -> None:
        self._kube = kube
        self._component = component
        self._instance = instance[:128]

    async def post(self, about: Object, reason: str, message: str, *, warning: bool = False) -> bool:
        """An Event on the object that `about` references (apiVersion, kind, namespace, name, uid). The same one again is counted, not repeated.

        False, and a line in the log, when it could not be written.
        """
        kind = "Warning" if warning else "Normal"
        name, namespace = event_name(about, kind, reason, message), about["namespace"]
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": about,
            "type": kind,
            "reason": reason,
            "message": message[:MESSAGE_CHARACTERS],
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "reportingInstance": self._instance,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            try:
                await self._kube.create(EVENTS, event, namespace)
            except AlreadyExists:
                # Two who count at once may count one less: no reason for a precondition.
                known = await self._kube.get(EVENTS, name, namespace)
                await self._kube.patch(EVENTS, name, namespace, {"count": int(known.get("count") or 1) + 1, "lastTimestamp": now})
        except KubeError as error:
            logger.info("an event about %s %s/%s is lost: %s", about["kind"], namespace, about["name"], error)
            return False
        return True


def event_name(about: Object, kind: str, reason: str, message: str) -> str:
    """The same for the same event on the same object: what makes it countable."""
    digest = hashlib.sha256("\0".join((about["uid"], kind, reason, message)).encode()).hexdigest()
    return f"{about['name'][:NAME_CHARACTERS]}.{digest[:16]}"
