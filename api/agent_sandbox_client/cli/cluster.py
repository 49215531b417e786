"""What the doctor looks at in a cluster: version, definitions, operator, rights, storage, runtime classes, network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any, Final

from agent_sandbox_core.v1alpha1.definitions import custom_resources
from agent_sandbox_kube import resources
from agent_sandbox_kube.client import Kube, connect
from agent_sandbox_kube.config import ConfigError
from agent_sandbox_kube.errors import KubeError, NotFound
from agent_sandbox_kube.resources import Resource

from .checks import Check

OLDEST: Final = (1, 31)
"""The first version whose API server knows every rule of the definitions."""
LEASE_SECONDS: Final = 60
REVIEWS: Final = Resource("authorization.k8s.io", "v1", "selfsubjectaccessreviews", namespaced=False)
GROUP: Final = resources.SANDBOXES.group
RIGHTS: Final = (
    (GROUP, "sandboxes", "", ("get", "list", "watch", "create", "patch", "delete")),
    (GROUP, "snapshots", "", ("get", "list", "watch", "create", "delete")),
    ("", "secrets", "", ("get", "create")),
    ("", "pods", "", ("get", "list", "watch")),
    ("", "pods", "exec", ("get", "create")),
)
"""What a caller with --backend kubernetes does, and the facade."""
INSTALL: Final = "install the chart (helm/agent-sandbox), or apply crds/"


async def examine(namespace: str | None) -> list[Check]:
    """All checks of the cluster that the kubeconfig, or this pod, names."""
    try:
        async with connect() as kube:
            where = namespace or kube.connection.namespace
            found: list[Check] = []
            for name, look in CHECKS:
                try:
                    found += [one async for one in look(kube, where)]
                except KubeError as error:
                    found.append(Check(name, "failed" if name == "cluster" else "warning", str(error), ""))
                    if name == "cluster":
                        break
            return found
    except ConfigError as error:
        return [Check("cluster", "failed", str(error))]


async def _version(kube: Kube, namespace: str) -> AsyncIterator[Check]:
    version = await kube.version()
    numbers = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.removeprefix("v").split(".")[:2])
    if numbers < OLDEST:
        yield Check("cluster", "failed", f"Kubernetes {version}", f"upgrade it: the definitions need {'.'.join(map(str, OLDEST))}")
    else:
        yield Check("cluster", "ok", f"Kubernetes {version}, namespace {namespace}")


async def _definitions(kube: Kube, _: str) -> AsyncIterator[Check]:
    for name, wanted in custom_resources().items():
        try:
            found = await kube.get(resources.CUSTOM_RESOURCE_DEFINITIONS, name)
        except NotFound:
            yield Check(f"CRD {name}", "failed", "missing", INSTALL)
            continue
        version = next((one for one in found["spec"]["versions"] if one["name"] == wanted["spec"]["versions"][0]["name"]), None)
        established = any(one["type"] == "Established" and one["status"] == "True" for one in found.get("status", {}).get("conditions", []))
        if version is None or not established:
            yield Check(f"CRD {name}", "failed", "it has no established version v1alpha1", INSTALL)
        elif version["schema"] != wanted["spec"]["versions"][0]["schema"]:
            yield Check(f"CRD {name}", "warning", "another version of it than this program's", f"{INSTALL} of the same version as sandboxctl")
        else:
            yield Check(f"CRD {name}", "ok", "established, of this version")


async def _operator(kube: Kube, _: str) -> AsyncIterator[Check]:
    leases = (await kube.list(resources.LEASES, field_selector="metadata.name=agent-sandbox-operator"))[0]
    live = [one for one in leases if _age(one["spec"].get("renewTime")) < LEASE_SECONDS and one["spec"].get("holderIdentity")]
    if live:
        yield Check("operator", "ok", f"at work in {live[0]['metadata']['namespace']} ({live[0]['spec']['holderIdentity']})")
    else:
        found = "no operator has renewed its Lease within the last minute" if leases else "no operator has a Lease"
        yield Check("operator", "failed", found, "install the chart, or look at the log of its Deployment agent-sandbox-operator")


def _age(moment: str | None) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds() if moment else float("inf")


async def _rights(kube: Kube, namespace: str) -> AsyncIterator[Check]:
    missing = []
    for group, resource, subresource, verbs in RIGHTS:
        for verb in verbs:
            attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": resource, "subresource": subresource}
            review = {
                "kind": "SelfSubjectAccessReview",
                "apiVersion": "authorization.k8s.io/v1",
                "metadata": {},
                "spec": {"resourceAttributes": attributes},
            }
            if not (await kube.create(REVIEWS, review))["status"]["allowed"]:
                missing.append(f"{verb} {resource}{f'/{subresource}' if subresource else ''}")
    if missing:
        yield Check("rights", "failed", f"not allowed in {namespace}: {', '.join(missing)}", "grant them by a Role and a RoleBinding there")
    else:
        yield Check("rights", "ok", f"everything that is needed in {namespace}")


async def _storage(kube: Kube, _: str) -> AsyncIterator[Check]:
    classes = (await kube.list(resources.STORAGE_CLASSES))[0]
    default = [
        one["metadata"]["name"]
        for one in classes
        if one["metadata"].get("annotations", {}).get("storageclass.kubernetes.io/is-default-class") == "true"
    ]
    names = ", ".join(one["metadata"]["name"] for one in classes)
    if default:
        yield Check("storage", "ok", f"default {default[0]}; {names}")
    elif classes:
        fix = "make one the default (annotation storageclass.kubernetes.io/is-default-class), or set spec.workspace.storageClassName"
        yield Check("storage", "warning", f"no default StorageClass; {names}", fix)
    else:
        yield Check("storage", "failed", "no StorageClass", "install a provisioner, or use ephemeral workspaces (spec.workspace.ephemeral)")


async def _runtimes(kube: Kube, _: str) -> AsyncIterator[Check]:
    names = [one["metadata"]["name"] for one in (await kube.list(resources.RUNTIME_CLASSES))[0]]
    if names:
        yield Check("isolation", "ok", f"RuntimeClasses {', '.join(names)}")
    else:
        yield Check(
            "isolation", "warning", "no RuntimeClass: sandboxes share the nodes' kernel", "install gVisor or Kata for code that nobody trusts"
        )


async def _network(kube: Kube, namespace: str) -> AsyncIterator[Check]:
    policies = (await kube.list(resources.NETWORK_POLICIES, namespace))[0]
    ours = [one["metadata"]["name"] for one in policies if any(key.startswith(f"{GROUP}/") for key in _selected(one))]
    sandboxes = (await kube.list(resources.SANDBOXES, namespace))[0]
    told = [one for sandbox in sandboxes for one in sandbox.get("status", {}).get("conditions", []) if one["type"] == "NetworkEnforced"]
    last = max(told, key=lambda one: str(one["lastTransitionTime"]), default=None)
    if last is not None and last["status"] == "True":
        yield Check("network", "ok", "the policies bite: the operator's canaries say so")
    elif last is not None:
        fix = (
            "use a network plugin that enforces NetworkPolicies (Calico, Cilium, kube-router)"
            if last["status"] == "False"
            else "wait for the operator's next check"
        )
        yield Check("network", "failed" if last["status"] == "False" else "warning", last["message"], fix)
    elif ours:
        yield Check("network", "warning", f"policies {', '.join(ours)} are there; whether they bite is told with the first Sandbox")
    else:
        yield Check("network", "skipped", f"no Sandbox in {namespace} yet: the operator writes the policies with the first one")


def _selected(policy: dict[str, Any]) -> list[str]:
    selector = policy["spec"].get("podSelector", {})
    return [*selector.get("matchLabels", {}), *(one["key"] for one in selector.get("matchExpressions", []))]


Look = Callable[[Kube, str], AsyncIterator[Check]]
CHECKS: Final[tuple[tuple[str, Look], ...]] = (
    ("cluster", _version),
    ("definitions", _definitions),
    ("operator", _operator),
    ("rights", _rights),
    ("storage", _storage),
    ("isolation", _runtimes),
    ("network", _network),
)
