"""The behaviour manifest and the suites agree: every behaviour has a test, every test covers a behaviour."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.behaviours import load

TESTS = Path(__file__).resolve().parents[1]
SUITES = ("contract", "e2e/faults")


def marks(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The ids in the behaviour marks of a test function; they are literals, so reading the source is enough."""
    return [
        argument.value
        for mark in node.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.behaviour"
        for argument in mark.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]


def written_tests() -> Iterator[tuple[str, list[str]]]:
    """(name, ids) of every test of the suites, whatever a run selects."""
    for suite in SUITES:
        for file in sorted((TESTS / suite).rglob("test_*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                    yield f"{file.relative_to(TESTS)}::{node.name}", marks(node)


@pytest.mark.behaviour("META-001")
def test_every_test_names_a_behaviour_and_every_behaviour_has_a_test() -> None:
    known = load()
    covered = dict(written_tests())
    assert [name for name, ids in covered.items() if not ids] == [], "tests that name no behaviour"
    named = {one for ids in covered.values() for one in ids}
    assert sorted(named - set(known)) == [], "ids that tests name and no manifest has"
    assert sorted(set(known) - named) == [], "behaviours that no test covers"


@pytest.mark.behaviour("META-002")
def test_a_behaviour_is_one_sentence_with_a_source() -> None:
    for behaviour in load().values():
        assert behaviour.source and len(behaviour.sentence) > 10 and behaviour.sentence.endswith("."), behaviour
