"""Image references, and what the policy makes of requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from agent_sandbox_api.images import is_allowed, is_reference
from agent_sandbox_api.policy import Policy, parse_mode
from agent_sandbox_api.schemas import CreateSandbox, ForkSnapshot, RunCommand
from agent_sandbox_core.errors import Forbidden, InvalidRequest, SandboxError

from .worlds import make_settings, make_spec


def policy(cpus: float | None = None, **settings: object) -> Policy:
    return Policy(make_settings(**settings), lambda: cpus)


@pytest.mark.parametrize(
    "image",
    [
        "python",
        "python:3.12-slim",
        "localhost/a",
        "localhost:5000/a/b_c:V1.0_x",
        "ghcr.io/me/app@sha256:" + "0" * 64,
        "a--b__c.d",
        "[::1]:5000/x",
        "UPPER.host/x",
    ],
)
def test_references_that_engines_take(image: str) -> None:
    assert is_reference(image)


@pytest.mark.parametrize(
    "image",
    ["", "Python", "a:", ":a", "a b", "-a", "a-", "a..b", "a//b", "/a", "a/", "a:b:c", "a@sha256:12", "a\n", "a:" + "t" * 129, "a" * 256, "é"],
)
def test_references_that_are_none(image: str) -> None:
    assert not is_reference(image)


def test_globs_match_the_reference_as_written() -> None:
    assert is_allowed("python:3.12", ["node:*", "python:3.*"]) and is_allowed("ghcr.io/me/a/b:1", ["ghcr.io/me/*"])
    assert not is_allowed("python", ["python:*"]) and not is_allowed("xpython:3.1", ["python:3.*"]) and not is_allowed("PYTHON:3.1", ["python:*"])


def test_a_fork_keeps_what_is_not_changed_and_obeys_todays_rules() -> None:
    source = make_spec(network=True, cpus=2, env={"A": "b"})
    forked = policy().fork(source, ForkSnapshot(memory_mb=64, network=None))
    assert forked == source.model_copy(update={"memory_mb": 64})
    with pytest.raises(Forbidden, match="network"):
        policy(allow_network="no").fork(source, ForkSnapshot())
    assert policy(allow_network="no").fork(source, ForkSnapshot(network=False)).network is False
    with pytest.raises(InvalidRequest, match="maximum of 1"):
        policy(max_cpus=1).fork(source, ForkSnapshot())


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (lambda: policy(2).spec(CreateSandbox(cpus=3, env={})), "the engine has"),
        (lambda: policy().spec(CreateSandbox(cpus=0.001, env={})), "0.01"),
        (lambda: policy().spec(CreateSandbox(env={"A": "s3cr3t" * 50_000})), "A has 300002 bytes"),
        (lambda: policy().spec(CreateSandbox(env={f"A{n}": "s3cr3t" * 20_000 for n in range(10)})), "env has"),
        (lambda: policy().command(RunCommand(command="x" * 131_072, env={})), "131072"),
        (lambda: policy().command(RunCommand(command=["true", *["y" * 100_000] * 40], env={})), "2 MiB"),
        (lambda: policy().command(RunCommand(command=" \n", env={})), "empty"),
        (lambda: policy().command(RunCommand(command="true", env={}, workdir="")), "workdir"),
        (lambda: parse_mode("1000"), "0777"),
    ],
)
def test_what_cannot_be_is_refused_without_values(refused: Callable[[], object], says: str) -> None:
    with pytest.raises(SandboxError) as caught:
        refused()
    assert says in caught.value.message and "s3cr3t" not in caught.value.message
