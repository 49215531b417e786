"""What the product promises, one sentence each: id, source, sentence. A test names the ids it covers with `@pytest.mark.behaviour(…)`.

One TOML file an area; `source` is the page or the issue that the sentence comes from. An id without a test and a test
without an id both fail (tests/contract/test_manifest.py). The `B` ids are bug reports of other systems; see scenarios.toml.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Behaviour:
    """One promise."""

    id: str
    area: str
    source: str
    sentence: str


def load() -> dict[str, Behaviour]:
    """All behaviours by id; an id that is there twice is an error."""
    found: dict[str, Behaviour] = {}
    for file in sorted(Path(__file__).parent.glob("*.toml")):
        for name, entry in tomllib.loads(file.read_text()).items():
            if name in found:
                raise ValueError(f"{name} is both in {found[name].area}.toml and in {file.name}")
            if set(entry) != {"source", "sentence"}:
                raise ValueError(f"{file.name}: {name} must have a source and a sentence, nothing else")
            found[name] = Behaviour(name, file.stem, entry["source"], entry["sentence"])
    return found
