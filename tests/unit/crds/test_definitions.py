"""The CRDs of this checkout: fresh, complete, and of the same opinion as the models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import build_crds
import pytest
import yaml
from agent_sandbox_core.v1alpha1 import GROUP, VERSION, SandboxObject, SandboxSpec, SnapshotObject
from agent_sandbox_core.v1alpha1.definitions import custom_resources, structural_schema
from agent_sandbox_core.v1alpha1.rules import VALIDATIONS
from pydantic import BaseModel, Field, ValidationError

DEFINITIONS = custom_resources()
NAMES = [f"sandboxes.{GROUP}", f"snapshots.{GROUP}"]


def version(name: str) -> dict[str, Any]:
    found: dict[str, Any] = DEFINITIONS[name]["spec"]["versions"][0]
    return found


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in a schema, with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], path + mark)


def everything(name: str) -> list[tuple[str, dict[str, Any]]]:
    return list(nodes(version(name)["schema"]["openAPIV3Schema"]))


def test_the_folder_holds_what_the_models_say_and_nothing_else() -> None:
    for target in build_crds.TARGETS:
        assert {path.name: path.read_text(encoding="utf-8") for path in target.iterdir()} == build_crds.files(), "run `make crds`"


@pytest.mark.parametrize("name", NAMES)
def test_the_files_read_back_as_what_was_made(name: str) -> None:
    assert DEFINITIONS[name] in [yaml.safe_load(text) for text in build_crds.files().values()]


@pytest.mark.parametrize("name", NAMES)
def test_every_field_says_what_it_is(name: str) -> None:
    silent = [path for path, node in everything(name) if not node.get("description") and path != ".metadata" and not path.endswith(("[]", "{}"))]
    assert silent == []


@pytest.mark.parametrize("name", NAMES)
def test_descriptions_are_plain_sentences(name: str) -> None:
    for path, node in everything(name):
        text = node.get("description", "").rstrip("\n")
        assert not {"`", "*", "_"} & set(text), f"{path}: {text}"
        assert not text or text[-1] in ".…", f"{path}: {text}"


@pytest.mark.parametrize("name", NAMES)
def test_schemas_are_structural(name: str) -> None:
    for path, node in everything(name):
        assert not {"$ref", "$defs", "title", "const", "oneOf", "allOf", "nullable"} & set(node), path
        assert ("anyOf" in node) == ("x-kubernetes-int-or-string" in node), path
        assert "type" in node or "x-kubernetes-int-or-string" in node, path
        assert node.get("type") != "array" or "x-kubernetes-list-type" in node, path


@pytest.mark.parametrize("name", NAMES)
def test_what_people_write_is_bounded_so_that_rules_have_a_cost(name: str) -> None:
    for path, node in everything(name):
        if path.startswith(".spec"):
            assert node.get("type") != "array" or "maxItems" in node, path
            assert node.get("type") != "string" or {"maxLength", "enum"} & set(node), path


@pytest.mark.parametrize("name", NAMES)
def test_a_status_has_no_defaults(name: str) -> None:
    assert [path for path, node in everything(name) if path.startswith(".status") and "default" in node] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_has_a_message_for_people(name: str) -> None:
    for path, node in everything(name):
        for rule in node.get(VALIDATIONS, []):
            assert len(rule["message"]) >= 20, f"{path}: {rule}"
            assert "self" not in rule["message"], f"{path}: {rule}"
            assert "pattern" not in node, f"{path}: a pattern would refuse first, in the words of a regular expression"


def test_defaults_are_those_of_the_models() -> None:
    model = SandboxSpec(image="x").to_wire()
    spec = version(NAMES[0])["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for field, node in spec["properties"].items():
        if "default" not in node:
            assert field == "image" or model.get(field) in (None, [], {}), field
        elif node["type"] == "object":
            assert node["default"] == {inner: value for inner, value in model[field].items() if value not in ({}, [])}, field
        else:
            assert node["default"] == model[field], field


FULL_SANDBOX: dict[str, Any] = {
    "apiVersion": f"{GROUP}/{VERSION}",
    "kind": "Sandbox",
    "metadata": {"name": "full", "namespace": "n", "uid": "u", "generation": 3, "labels": {"a": "b"}},
    "spec": {
        "image": "python:3.12-slim",
        "command": ["python3", "-m", "http.server"],
        "env": [{"name": "A", "value": "1"}],
        "envFrom": [{"secretName": "keys", "optional": True}],
        "resources": {"cpu": "2", "memory": "1Gi", "ephemeralStorage": "4Gi", "requests": {"cpu": "100m", "memory": "256Mi"}},
        "pidsLimit": 64,
        "runtimeClassName": "gvisor",
        "readOnlyRootFilesystem": False,
        "network": {"mode": "Allowlist", "allow": ["203.0.113.0/24"]},
        "workspace": {"size": "2Gi", "storageClassName": "fast", "accessMode": "ReadWriteOnce", "ephemeral": False},
        "timeoutSeconds": 60,
        "expiresAt": "2030-01-01T00:00:00Z",
        "shutdownPolicy": "Delete",
        "source": {"snapshotName": "base"},
        "restore": {"snapshotName": "base", "requestID": "r1"},
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "k", "operator": "Equal", "value": "v", "effect": "NoExecute", "tolerationSeconds": 5}],
        "imagePullSecrets": [{"name": "pull"}],
    },
    "status": {
        "phase": "Running",
        "reason": "Ready",
        "message": "it is",
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "Ready",
                "message": "",
                "lastTransitionTime": "2030-01-01T00:00:00Z",
                "observedGeneration": 3,
            }
        ],
        "observedGeneration": 3,
        "podName": "full-u",
        "pvcName": "full-u",
        "nodeName": "n1",
        "image": "python:3.12-slim",
        "podTemplateHash": "0" * 16,
        "expiresAt": "2030-01-01T00:00:00Z",
        "incarnation": 2,
        "recentStarts": ["2029-12-31T23:59:00Z"],
        "lastTermination": {"reason": "OOMKilled", "message": "512Mi", "exitCode": 137, "time": "2029-12-31T23:59:00Z"},
        "lastRestore": {
            "requestID": "r0",
            "snapshotName": "base",
            "phase": "Succeeded",
            "message": "",
            "startedAt": "2029-12-31T23:59:00Z",
            "finishedAt": "2029-12-31T23:59:01Z",
            "claimedBy": "mover",
            "claimedAt": "2029-12-31T23:59:00Z",
        },
        "initVersion": "1",
    },
}
FULL_SNAPSHOT: dict[str, Any] = {
    "apiVersion": f"{GROUP}/{VERSION}",
    "kind": "Snapshot",
    "metadata": {"name": "full", "namespace": "n", "uid": "u", "generation": 1},
    "spec": {"source": {"sandboxName": "s"}, "displayName": "émoji 🙂\n../x", "deletionPolicy": "Retain"},
    "status": {
        "phase": "Ready",
        "reason": "Ready",
        "message": "it is",
        "conditions": [{"type": "Ready", "status": "True", "reason": "Ready", "message": "", "lastTransitionTime": "2030-01-01T00:00:00Z"}],
        "observedGeneration": 1,
        "location": "i/n/full.u/archive.tar.zst",
        "digest": "sha256:" + "0" * 64,
        "sizeBytes": 10,
        "fileCount": 1,
        "takenAt": "2030-01-01T00:00:00Z",
        "sandboxUid": "u2",
        "parent": "base",
        "sourceSpec": {
            "image": "x",
            "cpu": "1",
            "memory": "512Mi",
            "pidsLimit": 256,
            "networkMode": "None",
            "readOnlyRootFilesystem": True,
            "runtimeClassName": "gvisor",
            "workspaceSize": "1Gi",
            "storageClassName": "fast",
            "ephemeral": False,
            "envNames": ["A"],
            "envSecretName": "full-env",
            "labels": {"a": "b"},
        },
        "claimedBy": "mover",
        "claimedAt": "2030-01-01T00:00:00Z",
    },
}


@pytest.mark.parametrize(("model", "wire"), [(SandboxObject, FULL_SANDBOX), (SnapshotObject, FULL_SNAPSHOT)])
def test_objects_go_through_the_models_unchanged(model: type[SandboxObject | SnapshotObject], wire: dict[str, Any]) -> None:
    written = model.read(wire).to_wire()
    assert {part: written[part] for part in ("apiVersion", "kind", "spec", "status")} == {
        part: wire[part] for part in ("apiVersion", "kind", "spec", "status")
    }
    assert written["metadata"].items() >= wire["metadata"].items()


@pytest.mark.parametrize(("name", "wire"), [(NAMES[0], FULL_SANDBOX), (NAMES[1], FULL_SNAPSHOT)])
def test_the_round_trip_knows_every_field(name: str, wire: dict[str, Any]) -> None:
    def absent(schema: dict[str, Any], value: Any, path: str) -> Iterator[str]:
        for field, child in schema.get("properties", {}).items():
            if field not in value:
                yield f"{path}.{field}"
            elif isinstance(value[field], dict):
                yield from absent(child, value[field], f"{path}.{field}")

    root = version(name)["schema"]["openAPIV3Schema"]["properties"]
    alone = {".spec.source.archive"}
    assert {*absent(root["spec"], wire["spec"], ".spec"), *absent(root["status"], wire["status"], ".status")} <= alone


@pytest.mark.parametrize(
    ("given", "read"), [(2, "2"), ("500m", "500m"), ("1.5", "1.5"), ("64Ki", "64Ki"), ("2k", "2k"), ("1e9", "1e9"), ("0.5Gi", "0.5Gi")]
)
def test_quantities_are_read_as_kubernetes_writes_them(given: object, read: str) -> None:
    assert SandboxSpec.model_validate({"image": "x", "resources": {"memory": given}}).resources.memory == read


@pytest.mark.parametrize("given", ["", "0", "0.0Gi", "0e5", "-1", "1ki", "1K", "1 Gi", "1e999", "lots", True, 1.5, "1" * 33])
def test_what_is_no_quantity_is_refused(given: object) -> None:
    with pytest.raises(ValidationError):
        SandboxSpec.model_validate({"image": "x", "resources": {"memory": given}})


def test_keywords_of_json_schema_become_those_of_kubernetes() -> None:
    class Inner(BaseModel):
        """An `inner` one,
        on two lines.

        And a second paragraph."""

        ratio: float = Field(gt=0, lt=1)

    class Outer(BaseModel):
        kind: str = Field(default="x", json_schema_extra={"const": "x"})
        inner: Inner | None = None
        table: dict[str, Inner] = Field(default_factory=dict)

    properties = structural_schema(Outer)["properties"]
    assert properties["kind"] == {"type": "string", "default": "x", "enum": ["x"]}
    assert properties["inner"]["description"] == "An inner one, on two lines.\n\nAnd a second paragraph."
    assert properties["inner"]["properties"]["ratio"] == {
        "type": "number",
        "minimum": 0,
        "exclusiveMinimum": True,
        "maximum": 1,
        "exclusiveMaximum": True,
    }
    assert properties["table"]["additionalProperties"] == properties["inner"]
