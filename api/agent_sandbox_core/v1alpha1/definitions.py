"""The CustomResourceDefinitions, made from the models."""

from __future__ import annotations

import re
from typing import Any, Final

from .common import GROUP, KIND_SANDBOX, KIND_SNAPSHOT, VERSION, Resource
from .rules import VALIDATIONS
from .sandbox import SandboxObject
from .snapshot import SnapshotObject

CATEGORY: Final = "agent-sandbox"
_INTEGER_FORMAT: Final = "int64"
_STANDARD: Final[dict[str, Any]] = {
    "apiVersion": {"description": f"{GROUP}/{VERSION}.", "type": "string"},
    "kind": {"description": "The kind of the object.", "type": "string"},
    "metadata": {"type": "object"},
}


def custom_resources() -> dict[str, dict[str, Any]]:
    """The definitions by name."""
    sandbox = _definition(
        SandboxObject,
        KIND_SANDBOX,
        plural="sandboxes",
        short="sbx",
        selectable=[".status.phase", ".status.nodeName"],
        columns=[
            _column("Phase", ".status.phase"),
            _column("Reason", ".status.reason"),
            _column("Image", ".spec.image", priority=1),
            # A `date` column shows a moment in the future as <invalid>.
            _column("Expires", ".status.expiresAt"),
            _column("Incarnation", ".status.incarnation", "integer", priority=1),
            _column("Node", ".status.nodeName", priority=1),
            _column("Age", ".metadata.creationTimestamp", "date"),
        ],
    )
    snapshot = _definition(
        SnapshotObject,
        KIND_SNAPSHOT,
        plural="snapshots",
        short="sbxsnap",
        selectable=[".status.phase", ".spec.source.sandboxName"],
        columns=[
            _column("Phase", ".status.phase"),
            _column("Sandbox", ".spec.source.sandboxName"),
            _column("Size", ".status.sizeBytes", "integer"),
            _column("Files", ".status.fileCount", "integer"),
            _column("Age", ".metadata.creationTimestamp", "date"),
            _column("Reason", ".status.reason", priority=1),
        ],
    )
    return {one["metadata"]["name"]: one for one in (sandbox, snapshot)}


def _column(name: str, path: str, kind: str = "string", *, priority: int = 0) -> dict[str, Any]:
    return {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})


def _definition(model: type[Resource], kind: str, *, plural: str, short: str, selectable: list[str], columns: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short],
                "categories": [CATEGORY],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "selectableFields": [{"jsonPath": path} for path in selectable],
                    "additionalPrinterColumns": columns,
                    "schema": {"openAPIV3Schema": object_schema(model)},
                }
            ],
        },
    }


def object_schema(model: type[Resource]) -> dict[str, Any]:
    """The structural schema of a whole object: defaults in spec, none in status, which is written and never completed."""
    made = structural_schema(model)
    properties = made["properties"]
    status = _without_defaults(properties["status"])
    return made | {"properties": _STANDARD | {"spec": properties["spec"], "status": status}, "required": ["spec"]}


def structural_schema(model: type[Resource]) -> dict[str, Any]:
    """A model's JSON schema as Kubernetes takes it: no references, no null, no titles, texts without mark-up."""
    whole = model.model_json_schema(by_alias=True)
    return _flatten(whole, whole.get("$defs", {}))


def _flatten(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    node = {key: value for key, value in node.items() if key not in {"$defs", "title"}}
    if (name := node.pop("$ref", None)) is not None:
        # What a field says about itself goes before what its type says.
        return _flatten(definitions[name.removeprefix("#/$defs/")] | node, definitions)
    if "anyOf" in node and "x-kubernetes-int-or-string" not in node:
        (kept,) = (one for one in node.pop("anyOf") if one != {"type": "null"})
        return _flatten(kept | node, definitions)
    if VALIDATIONS in node:
        # Its rules say the same in words, and are not asked when a pattern has refused already.
        node.pop("pattern", None)
    if "const" in node:
        node["enum"] = [node.pop("const")]
    for exclusive, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive in node:
            node |= {limit: node[exclusive], exclusive: True}
    if node.get("type") == "integer":
        node.setdefault("format", _INTEGER_FORMAT)
    if "description" in node:
        node["description"] = _plain(node["description"])
    if "properties" in node:
        node["properties"] = {name: _flatten(child, definitions) for name, child in node["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            node[key] = _flatten(node[key], definitions)
    return _ordered(_with_default(node))


def _with_default(node: dict[str, Any]) -> dict[str, Any]:
    """Keeps a default that says something. An object's is made of those of its fields, which alone need an object to work in."""
    default = node.pop("default", None)
    if node.get("type") == "object":
        inner = {name: child["default"] for name, child in node.get("properties", {}).items() if "default" in child}
        if default is not None and inner:
            node["default"] = inner
    elif default not in (None, "", []):
        node["default"] = default
    return node


_FIRST: Final = ("description", "type", "format", "default", "enum")
_LAST: Final = ("properties", "items", "additionalProperties")


def _ordered(node: dict[str, Any]) -> dict[str, Any]:
    """What a reader wants to know first comes first, and rules stand before the fields that they are about."""
    between = sorted(set(node) - {*_FIRST, *_LAST})
    return {key: node[key] for key in (*_FIRST, *between, *_LAST) if key in node}


def _without_defaults(node: dict[str, Any]) -> dict[str, Any]:
    node = {key: value for key, value in node.items() if key != "default"}
    if "properties" in node:
        node["properties"] = {name: _without_defaults(child) for name, child in node["properties"].items()}
    if "items" in node:
        node["items"] = _without_defaults(node["items"])
    return node


def _plain(text: str) -> str:
    """A docstring as kubectl explain shows it: paragraphs of one line each, no mark-up."""
    paragraphs = re.split(r"\n\s*\n", text.replace("`", ""))
    return "\n\n".join(" ".join(one.split()) for one in paragraphs)
