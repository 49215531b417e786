"""Names and addresses of clusters: what keeps two of them apart. Pure."""

from __future__ import annotations

import ipaddress
import itertools

import pytest

from tests.cluster.layout import MOST_NODES, SLOTS, Layout

LONGEST = "a" * 16


def ranges(layout: Layout) -> list[ipaddress.IPv4Network]:
    return [ipaddress.IPv4Network(text) for text in (layout.nodes_range, layout.pods_range, layout.services_range)]


def test_no_two_slots_share_an_address() -> None:
    everything = [network for slot in range(SLOTS) for network in ranges(Layout("x", slot))]
    assert not [(a, b) for a, b in itertools.combinations(everything, 2) if a.overlaps(b)]


def test_every_address_lies_in_its_clusters_ranges() -> None:
    layout = Layout("x", SLOTS - 1)
    nodes, pods, services = ranges(layout)
    for node in layout.nodes(MOST_NODES):
        assert ipaddress.IPv4Address(node.address) in nodes
        assert ipaddress.IPv4Network(node.pods).subnet_of(pods)
    assert ipaddress.IPv4Address(layout.host) in nodes
    assert ipaddress.IPv4Address(layout.api_service) in services
    assert ipaddress.IPv4Address(layout.dns_service) in services


def test_links_of_all_clusters_have_different_names_that_linux_takes() -> None:
    links = [node.link for slot in range(SLOTS) for node in Layout("x", slot).nodes(MOST_NODES)]
    assert len(links) == len(set(links))
    assert max(map(len, links)) <= 15


def test_the_longest_name_leaves_sockets_short_enough_for_linux() -> None:
    node = Layout(LONGEST, SLOTS - 1).node(MOST_NODES)
    longest = node.folder / "kubelet" / "plugins_registry" / "disk.volumes.test-reg.sock"
    assert len(str(longest)) < 108


@pytest.mark.parametrize("name", ["", "A", "1a", "a_b", "a-", "../x", "a/b", LONGEST + "a"])
def test_a_name_that_could_be_a_path_or_no_host_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cluster's name"):
        Layout(name, 0)
