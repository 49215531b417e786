"""Names, addresses and folders of a cluster, all derived from its name and its slot: two clusters never meet. Pure."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path

NAME = re.compile(r"[a-z]([-a-z0-9]{0,14}[a-z0-9])?")
SLOTS = 32
MOST_NODES = 4
CGROUP_ROOT = "agent-sandbox-cluster"
# In the environment of every process of a cluster but those in pods; "<cluster>/<node>".
MARK = "AGENT_SANDBOX_TEST_CLUSTER"


def state_root() -> Path:
    """Below it everybody may traverse: pods with a user namespace reach their files by it. So never a home of mode 0700."""
    return Path(os.environ.get("AGENT_SANDBOX_CLUSTER_STATE", "/var/lib/agent-sandbox-cluster"))


@dataclass(frozen=True)
class Node:
    """One node: its own network, mount, process and host name namespaces, its own kubelet and containerd."""

    cluster: str
    slot: int
    index: int

    @property
    def name(self) -> str:
        """Also its host name and the name of its Node object."""
        return f"node{self.index}"

    @property
    def mark(self) -> str:
        """Value of MARK in its processes."""
        return f"{self.cluster}/{self.name}"

    @property
    def address(self) -> str:
        """What the kubelet reports as InternalIP."""
        return f"10.213.{self.slot}.{10 + self.index}"

    @property
    def pods(self) -> str:
        """Address range of the pods on it."""
        return f"10.214.{self.slot * 8 + self.index}.0/24"

    @property
    def link(self) -> str:
        """The machine's end of the link to it; the node's end is eth0."""
        return f"asb{self.slot}n{self.index}"

    @property
    def folder(self) -> Path:
        """Everything the node keeps."""
        return state_root() / self.cluster / self.name

    @property
    def containerd_socket(self) -> Path:
        """Reachable from the machine as from the node."""
        return self.folder / "containerd.sock"

    @property
    def control_socket(self) -> Path:
        """Where the node's supervisor takes orders."""
        return self.folder / "control.sock"

    @property
    def cgroup(self) -> str:
        """Parent of all its processes, pods included, in every hierarchy."""
        return f"{CGROUP_ROOT}/{self.cluster}/{self.name}"

    def log(self, component: str) -> Path:
        """Log of one of its components."""
        return self.folder / "logs" / f"{component}.log"


@dataclass(frozen=True)
class Layout:
    """One cluster."""

    name: str
    slot: int

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"a cluster's name is up to 16 lower-case letters, digits and dashes, starting with a letter: not {self.name!r}")
        if not 0 <= self.slot < SLOTS:
            raise ValueError(f"a slot is 0 to {SLOTS - 1}, not {self.slot}")

    @property
    def folder(self) -> Path:
        """Everything the cluster keeps; gone after `down`."""
        return state_root() / self.name

    @property
    def host(self) -> str:
        """The machine's address on the links to the nodes."""
        return f"10.213.{self.slot}.1"

    @property
    def nodes_range(self) -> str:
        """Addresses of machine and nodes."""
        return f"10.213.{self.slot}.0/24"

    @property
    def pods_range(self) -> str:
        """Addresses of all pods."""
        return f"10.214.{self.slot * 8}.0/21"

    @property
    def services_range(self) -> str:
        """Addresses of services."""
        return f"10.96.{self.slot * 8}.0/21"

    @property
    def api_service(self) -> str:
        """Address of the service `kubernetes`."""
        return f"10.96.{self.slot * 8}.1"

    @property
    def dns_service(self) -> str:
        """Address of the cluster's DNS."""
        return f"10.96.{self.slot * 8}.10"

    @property
    def api_server(self) -> str:
        """URL of the API server, from the machine and from every node."""
        return f"https://{self.node(1).address}:6443"

    @property
    def kubeconfig(self) -> Path:
        """For the cluster's administrator."""
        return self.folder / "admin.kubeconfig"

    @property
    def audit_log(self) -> Path:
        """What the API server was asked, one JSON event a line."""
        return self.node(1).folder / "audit" / "audit.log"

    @property
    def volumes(self) -> Path:
        """Data of persistent volumes, the same on every node."""
        return self.folder / "volumes"

    def node(self, index: int) -> Node:
        """The node of that number, from 1."""
        if not 1 <= index <= MOST_NODES:
            raise ValueError(f"a cluster has 1 to {MOST_NODES} nodes; there is no node {index}")
        return Node(self.name, self.slot, index)

    def nodes(self, count: int) -> list[Node]:
        """The first `count` nodes."""
        return [self.node(index) for index in range(1, count + 1)]

    def overlaps(self, network: ipaddress.IPv4Network) -> bool:
        """Whether any of the cluster's addresses lies in `network`."""
        return any(network.overlaps(ipaddress.IPv4Network(own)) for own in (self.nodes_range, self.pods_range, self.services_range))
