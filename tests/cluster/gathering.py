"""Everything about a namespace, into files, for the day after a test failed. Secrets' contents are left out."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cluster.kubectl import Kubectl

SECONDS = 20.0
# Of no use here, or not to be written down.
SKIPPED = {"secrets", "events", "events.events.k8s.io", "bindings", "localsubjectaccessreviews.authorization.k8s.io"}


def gather(kubectl: Kubectl, folder: Path) -> None:
    """Writes objects, events, descriptions and logs of kubectl's namespace into `folder`, replacing what an earlier failure left there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kinds = kubectl.run("api-resources", "--namespaced", "--verbs=list", "--output=name", check=False, seconds=SECONDS).stdout.split()
    with ThreadPoolExecutor(4) as pool:
        for kind in kinds:
            if kind not in SKIPPED:
                pool.submit(write, kubectl, folder / "objects" / f"{kind}.yaml", "get", kind, "--output=yaml", "--ignore-not-found")
        pool.submit(write, kubectl, folder / "secrets.txt", "get", "secrets")
        pool.submit(write, kubectl, folder / "events.txt", "get", "events", "--sort-by=.lastTimestamp", "--output=wide")
        pool.submit(write, kubectl, folder / "pods.txt", "describe", "pods")
        pool.submit(write, kubectl, folder / "cluster.txt", "get", "namespaces,nodes,persistentvolumes,volumeattachments", "--output=wide")
        for pod in pods(kubectl):
            pool.submit(write, kubectl, folder / "logs" / f"{pod}.log", "logs", pod, "--all-containers", "--prefix", "--timestamps")
            pool.submit(write, kubectl, folder / "logs" / f"{pod}.previous.log", "logs", pod, "--all-containers", "--prefix", "--previous")


def pods(kubectl: Kubectl) -> list[str]:
    """Names of the pods."""
    listed = kubectl.run("get", "pods", "--output=json", check=False, seconds=SECONDS)
    return [item["metadata"]["name"] for item in json.loads(listed.stdout)["items"]] if listed.returncode == 0 else []


def write(kubectl: Kubectl, path: Path, *words: str) -> None:
    """Writes what kubectl prints, or why it prints nothing; a file with nothing in it is not made."""
    done = kubectl.run(*words, check=False, seconds=SECONDS)
    text = done.stdout + (f"\n# kubectl {' '.join(words)}: {done.stderr}" if done.returncode != 0 else "")
    if text.strip():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
