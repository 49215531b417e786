"""NetworkPolicies: three for each namespace with sandboxes, selected by labels of the pods; one more for each Sandbox of mode Allowlist."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Any, Final

from agent_sandbox_core import hardening
from agent_sandbox_core.v1alpha1 import LABEL_COMPONENT, LABEL_NETWORK, SandboxObject, child_name

from .canary import CANARY
from .identity import child_labels, owner_reference

API_VERSION: Final = "networking.k8s.io/v1"
DENY, DNS, OPEN = "agent-sandbox-deny-all", "agent-sandbox-dns", "agent-sandbox-open"
POLICY_NAMES: Final = (DENY, DNS, OPEN)
COMPONENT: Final = "network-policy"
DNS_PEER: Final = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
    "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
}
DNS_PORTS: Final = [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]
_MAPPED: Final = ipaddress.ip_network("::ffff:0:0/96")
"""Addresses of IPv4 written as IPv6 never appear on a wire, and the API server takes them for IPv4, which an IPv6 rule may not except."""


def policy(name: str, namespace: str, spec: dict[str, Any]) -> dict[str, Any]:
    """A static policy of a namespace."""
    metadata = {"name": name, "namespace": namespace, "labels": {LABEL_COMPONENT: COMPONENT}}
    return {"apiVersion": API_VERSION, "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}


def namespace_policies(namespace: str, blocked: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Nothing in or out for any sandbox; DNS for those with a network; the internet for mode Open. `blocked`: what it must not reach besides."""
    return [
        policy(
            DENY,
            namespace,
            {
                "podSelector": {"matchExpressions": [{"key": LABEL_COMPONENT, "operator": "In", "values": [CANARY, "sandbox"]}]},
                "policyTypes": ["Ingress", "Egress"],
            },
        ),
        policy(
            DNS,
            namespace,
            {
                "podSelector": {
                    "matchLabels": {LABEL_COMPONENT: "sandbox"},
                    "matchExpressions": [{"key": LABEL_NETWORK, "operator": "In", "values": ["allowlist", "open"]}],
                },
                "policyTypes": ["Egress"],
                "egress": [{"to": [DNS_PEER], "ports": DNS_PORTS}],
            },
        ),
        policy(
            OPEN,
            namespace,
            {
                "podSelector": {"matchLabels": {LABEL_COMPONENT: "sandbox", LABEL_NETWORK: "open"}},
                "policyTypes": ["Egress"],
                "egress": [{"to": open_peers(blocked)}],
            },
        ),
    ]


def open_peers(blocked: Iterable[str]) -> list[dict[str, Any]]:
    """Everything but what is inside: two blocks, one for each family."""
    inside = [ipaddress.ip_network(text) for text in (*hardening.BLOCKED_NETWORKS, *blocked)]
    return [
        {"ipBlock": {"cidr": cidr, "except": [str(net) for net in dict.fromkeys(inside) if net.version == version and net != _MAPPED]}}
        for cidr, version in (("0.0.0.0/0", 4), ("::/0", 6))
    ]


def allow_policy(sandbox: SandboxObject) -> dict[str, Any]:
    """What a Sandbox of mode Allowlist may reach besides DNS. Without any address it allows nothing more."""
    name = child_name(sandbox.metadata.name, sandbox.metadata.uid)
    return {
        "apiVersion": API_VERSION,
        "kind": "NetworkPolicy",
        "metadata": {
            "name": name,
            "namespace": sandbox.metadata.namespace,
            "labels": child_labels(sandbox, COMPONENT),
            "ownerReferences": [owner_reference(sandbox)],
        },
        "spec": {
            "podSelector": {"matchLabels": child_labels(sandbox, "sandbox")},
            "policyTypes": ["Egress"],
            **allow_rules(sandbox.spec.network.allow),
        },
    }


def allow_rules(networks: Sequence[str]) -> dict[str, Any]:
    """Egress to these networks; an address is a network of one. Without any there is no rule, which allows nothing: an empty peer list would allow all."""
    peers = [{"ipBlock": {"cidr": str(ipaddress.ip_network(text, strict=False))}} for text in networks]
    return {"egress": [{"to": peers}]} if peers else {}
