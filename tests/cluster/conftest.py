"""Fixtures of the tests on a real cluster, taken by name."""

from tests.cluster.fixtures import cluster, departures, namespace, pytest_runtest_makereport

__all__ = ["cluster", "departures", "namespace", "pytest_runtest_makereport"]
