"""How a sandbox is locked down, as data: the one source for Docker, Kubernetes and the documentation. No engine's names here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HOSTNAME: Final = "sandbox"
WORKSPACE: Final = "/workspace"
HOME: Final = WORKSPACE
GUEST_FOLDER: Final = "/opt/agent-sandbox"
"""Where sandbox-init is in every sandbox, read-only."""
GUEST_PATH: Final = f"{GUEST_FOLDER}/sandbox-init"
GUEST_SERVE: Final = (GUEST_PATH, "serve")
GUEST_CONNECT: Final = (GUEST_PATH, "connect")
UID: Final = 1000
GID: Final = 1000

CAPABILITIES_DROPPED: Final = ("ALL",)
NO_NEW_PRIVILEGES: Final = True
PRIVATE_IPC: Final = True
SHM_MB: Final = 64

TMP_PATH: Final = "/tmp"  # noqa: S108 - the mount point itself
TMP_OPTIONS: Final = ("rw", "nosuid", "nodev", "mode=1777")
"""exec is allowed: builds and package managers run what they unpack in /tmp."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What sandbox-init and the kept bridges need themselves, on top of what the user asked for."""

    pids: int
    memory_mb: int


GUEST_ALLOWANCE: Final = Allowance(pids=35, memory_mb=16)
"""Measured: pids counts threads, of which init makes 20 at start and each of at most three bridges holds 5 at worst; all of them use 13 MB together."""

BLOCKED_NETWORKS_V4: Final = (
    "0.0.0.0/8",  # this network
    "10.0.0.0/8",  # private
    "100.64.0.0/10",  # carrier NAT; holds 100.100.100.200, Alibaba's metadata
    "169.254.0.0/16",  # link-local; holds 169.254.169.254, the metadata address of AWS, GCP, Azure and others
    "172.16.0.0/12",  # private, Docker's own
    "192.0.0.0/24",  # protocol assignments; holds 192.0.0.192, Oracle's metadata
    "192.168.0.0/16",  # private
    "198.18.0.0/15",  # benchmarking, used inside providers
    "224.0.0.0/4",  # multicast
    "240.0.0.0/4",  # reserved, broadcast
    "168.63.129.16/32",  # Azure's wire server: a public address that is inside
)
BLOCKED_NETWORKS_V6: Final = (
    "::/128",  # unspecified
    "::ffff:0:0/96",  # IPv4 in IPv6: must not be a way round
    "64:ff9b::/96",  # NAT64 to any IPv4
    "64:ff9b:1::/48",  # NAT64, local use
    "2002::/16",  # 6to4: holds IPv4 addresses
    "fc00::/7",  # unique local; holds fd00:ec2::254, AWS' metadata
    "fe80::/10",  # link-local
    "fec0::/10",  # site-local, deprecated and still routed in places
    "ff00::/8",  # multicast
)
BLOCKED_NETWORKS: Final = BLOCKED_NETWORKS_V4 + BLOCKED_NETWORKS_V6
"""What `network=true` does not reach. The engine adds its own addresses: gateway, API endpoints, nodes."""

METADATA_ADDRESSES: Final = ("169.254.169.254", "100.100.100.200", "192.0.0.192", "168.63.129.16", "fd00:ec2::254", "fe80::a9fe:a9fe")
"""Metadata services known by address; each lies in a blocked network (a test holds that)."""
