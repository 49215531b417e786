"""The hardening defaults hold what they promise."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from agent_sandbox_core import hardening

NETWORKS = [ip_network(network) for network in hardening.BLOCKED_NETWORKS]


@pytest.mark.parametrize("address", hardening.METADATA_ADDRESSES)
def test_every_known_metadata_address_is_blocked(address: str) -> None:
    assert any(ip_address(address) in network for network in NETWORKS)


@pytest.mark.parametrize(
    "address", ["10.1.2.3", "172.17.0.1", "192.168.1.1", "100.64.0.1", "fd00::1", "fe80::1", "::ffff:10.0.0.1", "64:ff9b::a00:1"]
)
def test_private_addresses_are_blocked_also_in_ipv6_clothes(address: str) -> None:
    assert any(ip_address(address) in network for network in NETWORKS)


@pytest.mark.parametrize("address", ["1.1.1.1", "8.8.8.8", "93.184.215.14", "2606:4700::1111", "172.32.0.1", "100.128.0.1"])
def test_public_addresses_are_not(address: str) -> None:
    assert not any(ip_address(address) in network for network in NETWORKS)


def test_networks_are_written_as_the_packet_filter_takes_them() -> None:
    assert [str(network) for network in NETWORKS] == list(hardening.BLOCKED_NETWORKS)
