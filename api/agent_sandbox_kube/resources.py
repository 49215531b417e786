"""Where each kind of object lies in the API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from agent_sandbox_core.v1alpha1 import GROUP, VERSION


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource: API group (empty for the core group), version and plural name."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """The path of its collection (over all namespaces without `namespace`), of one object, or of a subresource of that."""
        parts = ["/api" if not self.group else f"/apis/{self.group}", self.version]
        if namespace and self.namespaced:
            parts += ["namespaces", namespace]
        parts += [self.plural, *([name] if name else []), *([subresource] if subresource else [])]
        return "/".join(parts)

    def describe(self, namespace: str | None = None, name: str | None = None) -> str:
        """As people write it: `pods team-a/web`."""
        if not name:
            return f"{self.plural} in {namespace}" if namespace else self.plural
        return f"{self.plural} {namespace}/{name}" if namespace else f"{self.plural} {name}"


SANDBOXES: Final = Resource(GROUP, VERSION, "sandboxes")
SNAPSHOTS: Final = Resource(GROUP, VERSION, "snapshots")
PODS: Final = Resource("", "v1", "pods")
CLAIMS: Final = Resource("", "v1", "persistentvolumeclaims")
SECRETS: Final = Resource("", "v1", "secrets")
EVENTS: Final = Resource("", "v1", "events")
NODES: Final = Resource("", "v1", "nodes", namespaced=False)
NAMESPACES: Final = Resource("", "v1", "namespaces", namespaced=False)
QUOTAS: Final = Resource("", "v1", "resourcequotas")
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases")
NETWORK_POLICIES: Final = Resource("networking.k8s.io", "v1", "networkpolicies")
CUSTOM_RESOURCE_DEFINITIONS: Final = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False)
STORAGE_CLASSES: Final = Resource("storage.k8s.io", "v1", "storageclasses", namespaced=False)
RUNTIME_CLASSES: Final = Resource("node.k8s.io", "v1", "runtimeclasses", namespaced=False)
