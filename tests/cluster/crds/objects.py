"""Small objects, and what the API server says to them."""

from __future__ import annotations

import json
import re
from typing import Any

from agent_sandbox_core.v1alpha1 import GROUP, KIND_SANDBOX, KIND_SNAPSHOT, VERSION

from tests.cluster.kubectl import Kubectl, Object


def sandbox(name: str = "s", **spec: Any) -> Object:
    """A Sandbox; fields of its spec by their names on the wire."""
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND_SANDBOX, "metadata": {"name": name}, "spec": {"image": "x", **spec}}


def snapshot(name: str = "s", **spec: Any) -> Object:
    """A Snapshot of Sandbox s."""
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND_SNAPSHOT, "metadata": {"name": name}, "spec": {"source": {"sandboxName": "s"}, **spec}}


def accepted(api: Kubectl, wanted: Object) -> Object:
    """An object as the API server would keep it."""
    found: Object = json.loads(api.run("create", "-f", "-", "--dry-run=server", "--output", "json", stdin=json.dumps(wanted)).stdout)
    return found


def refusal(api: Kubectl, wanted: Object, *, really: bool = False) -> str | None:
    """What the API server says against an object; None when it takes it. `really`: it stays."""
    done = api.run("create", "-f", "-", *([] if really else ["--dry-run=server"]), stdin=json.dumps(wanted), check=False)
    return None if done.returncode == 0 else flat(done.stderr)


def edit(api: Kubectl, kind: str, name: str, change: Object, *, status: bool = False, really: bool = False) -> str | None:
    """What the API server says against an edit (a merge patch)."""
    words = ["--subresource=status"] if status else []
    done = api.run("patch", kind, name, "--type=merge", "-p", json.dumps(change), *words, *([] if really else ["--dry-run=server"]), check=False)
    return None if done.returncode == 0 else flat(done.stderr)


def flat(text: str) -> str:
    """A message on one line."""
    return re.sub(r"\s+", " ", text).strip()
