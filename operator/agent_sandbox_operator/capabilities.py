"""What this cluster can, as far as pods have shown it: user namespaces and image volumes.

Both are tried. A pod that does not start with one of them is made once more without, and so are the next ones of its runtime class; after a while
it is tried again, since clusters are upgraded. An operator that starts anew tries again too.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from .seen import Feature
from .settings import OperatorSettings
from .specs import PodOptions

logger = logging.getLogger(__name__)

FORGET_SECONDS: Final = 3600.0


class Capabilities:
    """Which features pods get, for each runtime class."""

    def __init__(self, settings: OperatorSettings) -> None:
        self._settings = settings
        self._given_up: dict[tuple[Feature, str], float] = {}

    def options(self, runtime_class: str | None) -> PodOptions:
        """How the next pod of this runtime class is made."""
        settings = self._settings
        volume = settings.init_delivery == "image-volume" or (settings.init_delivery == "auto" and not self._lacks("image-volume", runtime_class))
        user = settings.user_namespaces == "on" or (settings.user_namespaces == "auto" and not self._lacks("user-namespace", runtime_class))
        return PodOptions(
            init_image=settings.init_image,
            delivery="image-volume" if volume else "init-container",
            user_namespace=user,
            tmp_size_mb=settings.tmp_size_mb,
        )

    def optional(self) -> frozenset[Feature]:
        """What a pod may be made without when it does not start: what is chosen by itself. A pod of before may still have what was given up since."""
        found: set[Feature] = set()
        if self._settings.init_delivery == "auto":
            found.add("image-volume")
        if self._settings.user_namespaces == "auto":
            found.add("user-namespace")
        return frozenset(found)

    def give_up(self, feature: Feature, runtime_class: str | None, node: str) -> None:
        """A pod did not start with it."""
        logger.warning(
            "%s does not work for runtime class %s (seen on node %s): pods do without it for now",
            feature,
            runtime_class or "default",
            node or "unknown",
        )
        self._given_up[feature, runtime_class or ""] = time.monotonic()

    def _lacks(self, feature: Feature, runtime_class: str | None) -> bool:
        since = self._given_up.get((feature, runtime_class or ""))
        return since is not None and time.monotonic() - since < FORGET_SECONDS
