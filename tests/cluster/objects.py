"""Small objects for tests: pure builders."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
FOREVER = ("sleep", "1000000")
HARDENED = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def pod(
    name: str,
    image: str,
    *command: str,
    labels: dict[str, str] | None = None,
    claim: str | None = None,
    security: Object | None = None,
    **spec: Any,
) -> Object:
    """A pod of one container; its claim, if any, is at /data. More fields of the spec by keyword."""
    container: Object = {"name": "main", "image": image, "imagePullPolicy": "IfNotPresent"}
    if command:
        container["command"] = list(command)
    if security is not None:
        container["securityContext"] = security
    mounts = list(spec.pop("mounts", []))
    volumes = list(spec.pop("volumes", []))
    if claim is not None:
        mounts.append({"name": "data", "mountPath": "/data"})
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
    container["volumeMounts"] = mounts
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 1, "automountServiceAccountToken": False, **spec},
    }


def claim(name: str, storage_class: str | None = None, size: str = "32Mi") -> Object:
    """A claim for a volume of one node."""
    spec: Object = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def service(name: str, port: int, selector: dict[str, str]) -> Object:
    """A service of one TCP port."""
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {"selector": selector, "ports": [{"port": port}]}}


def policy(name: str, selector: dict[str, str], *types: str, **rules: Any) -> Object:
    """A NetworkPolicy for pods with these labels; without rules it denies."""
    spec = {"podSelector": {"matchLabels": selector}, "policyTypes": list(types), **rules}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": name}, "spec": spec}


def deployment(name: str, image: str, replicas: int, *command: str, claim: str | None = None, **spec: Any) -> Object:
    """A deployment of such pods; one at a time, since their volume is."""
    template = pod(name, image, *command, labels={"app": name}, claim=claim, **spec)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": template["spec"]},
        },
    }


def fake_node(name: str) -> Object:
    """A node that kwok plays; nothing lands on it that does not tolerate that."""
    room = {"cpu": "1000", "memory": "1Ti", "pods": "2000"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": {"kwok.x-k8s.io/node": "fake"}, "labels": {"type": "kwok", "kubernetes.io/hostname": name}},
        "spec": {"taints": [{"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": room, "capacity": room},
    }


ON_FAKE_NODES: Object = {
    "nodeSelector": {"type": "kwok"},
    "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists", "effect": "NoSchedule"}],
}
