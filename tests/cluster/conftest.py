"""Fixtures of the tests on a real cluster, taken by name."""

from tests.cluster.fixtures import cluster, namespace, pytest_runtest_makereport

__all__ = ["cluster", "namespace", "pytest_runtest_makereport"]
