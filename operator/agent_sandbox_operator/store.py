"""What the watches have told: the newest version of every Sandbox, pod and PVC, without what nobody reads.

A reconcile reads from here, so it costs the API server nothing. What is absent here is not yet proven absent: before something is taken for lost, it
is asked for (see sandbox.py). Creations and deletions are safe anyway, by their names and uids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal

from agent_sandbox_core.v1alpha1 import LABEL_SANDBOX

Object = dict[str, Any]
Key = tuple[str, str]
"""Namespace and name."""
Kind = Literal["sandboxes", "pods", "persistentvolumeclaims"]
KINDS: Final[tuple[Kind, ...]] = ("sandboxes", "pods", "persistentvolumeclaims")
_METADATA: Final = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "labels",
    "annotations",
    "ownerReferences",
)
_POD_SPEC: Final = ("nodeName", "hostUsers")
_POD_STATUS: Final = ("phase", "reason", "message", "conditions", "containerStatuses", "initContainerStatuses")
MAX_GONE: Final = 4096
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"


def key_of(raw: Object) -> Key:
    """Namespace and name of an object."""
    return raw["metadata"].get("namespace", ""), raw["metadata"]["name"]


def owner_key(raw: Object) -> Key | None:
    """The Sandbox that a child's labels name."""
    name = (raw["metadata"].get("labels") or {}).get(LABEL_SANDBOX)
    return (raw["metadata"].get("namespace", ""), name) if name else None


def version_of(raw: Object) -> int:
    """The resourceVersion as a number; 0 when it is none. The API server promises that they compare within a kind."""
    text = raw["metadata"].get("resourceVersion", "")
    return int(text) if text.isdigit() else 0


def slim(kind: Kind, raw: Object) -> Object:
    """The object without what nobody reads: a tenth of a pod."""
    metadata = {key: raw["metadata"][key] for key in _METADATA if key in raw["metadata"]}
    if _LAST_APPLIED in (metadata.get("annotations") or {}):
        metadata["annotations"] = {key: value for key, value in metadata["annotations"].items() if key != _LAST_APPLIED}
    if kind != "pods":
        return {"metadata": metadata, "spec": raw.get("spec") or {}, "status": raw.get("status") or {}}
    spec, status = raw.get("spec") or {}, raw.get("status") or {}
    kept: Object = {key: spec[key] for key in _POD_SPEC if key in spec}
    kept["containers"] = [{"name": one["name"], "image": one.get("image", "")} for one in spec.get("containers") or ()]
    return {"metadata": metadata, "spec": kept, "status": {key: status[key] for key in _POD_STATUS if key in status}}


class Store:
    """The newest version of each object. All methods belong to one event loop."""

    def __init__(self) -> None:
        self._objects: dict[Kind, dict[Key, Object]] = {kind: {} for kind in KINDS}
        self._gone: OrderedDict[str, None] = OrderedDict()
        """uids of what a watch has told to be gone. The answer to a call of ours may come after that."""

    def get(self, kind: Kind, key: Key) -> Object | None:
        """One object, None when none is known."""
        return self._objects[kind].get(key)

    def keys(self, kind: Kind) -> Iterator[Key]:
        """Of all objects of a kind."""
        return iter(list(self._objects[kind]))

    def count(self, kind: Kind) -> int:
        """How many are known."""
        return len(self._objects[kind])

    def put(self, kind: Kind, raw: Object) -> bool:
        """Takes in a version, unless a newer one is there under its name. Whether it was news."""
        objects, key = self._objects[kind], key_of(raw)
        known = objects.get(key)
        if raw["metadata"]["uid"] in self._gone:
            return False
        if known is not None and version_of(known) >= version_of(raw):
            return False
        objects[key] = slim(kind, raw)
        return True

    def drop(self, kind: Kind, raw: Object) -> bool:
        """This object is gone. One that came after it under its name stays."""
        objects, key = self._objects[kind], key_of(raw)
        self._gone[raw["metadata"]["uid"]] = None
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
        known = objects.get(key)
        if known is None or known["metadata"]["uid"] != raw["metadata"]["uid"]:
            return False
        del objects[key]
        return True

    def forget(self, kind: Kind, key: Key) -> None:
        """A GET found nothing under this name."""
        self._objects[kind].pop(key, None)

    def replace(self, kind: Kind, listed: Iterable[Object], version: int, within: str | None = None) -> set[Key]:
        """Takes in a whole LIST of that resourceVersion (of one namespace, or all), and drops what it does not hold and is not newer. The keys that changed."""
        objects = self._objects[kind]
        there = set()
        changed = set()
        for raw in listed:
            there.add(key_of(raw))
            if self.put(kind, raw):
                changed.add(key_of(raw))
        for key, raw in list(objects.items()):
            if key not in there and (within is None or key[0] == within) and version_of(raw) <= version:
                del objects[key]
                changed.add(key)
        return changed
