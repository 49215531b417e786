"""The single checks of the doctor. Each tells what it found and, when that is not good, what to do."""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from .failures import Failure
from .target import Target

State = Literal["ok", "warning", "failed", "skipped"]
SECONDS: Final = 30.0
SILENT, LOOK = f"no answer within {SECONDS:.0f} s", "look at the network, and at the log of what should answer"
T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    state: State
    found: str
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def check_server(target: Target, *, asked: bool) -> list[Check]:
    """Whether a server answers, is one of ours, has our version and takes our key."""
    from agent_sandbox_core.version import __version__  # noqa: PLC0415

    from .remote import Remote  # noqa: PLC0415 - loads an HTTP client

    url, key = target.server()
    wanted = asked or target.url is not None or "AGENT_SANDBOX_URL" in os.environ
    name = "server"
    try:
        with Remote(url, key, patience=SECONDS) as remote:
            health = remote.call("GET", "/healthz")
            found = [Check(name, "ok", f"{url}: version {health['version']}, backend {health['backend']}")]
            if health["version"] != __version__:
                found.append(
                    Check(
                        "server version", "warning", f"{health['version']}, this program is {__version__}", "install the same version on both sides"
                    )
                )
            name = "server key"
            count = len(remote.call("GET", "/v1/sandboxes")["sandboxes"])
            return [*found, Check(name, "ok", f"accepted; {count} sandboxes")]
    except Failure as failure:
        if failure.code == "unreachable" and not wanted:
            return [Check(name, "skipped", f"none at {url}", "")]
        fix = (
            "start `sandboxctl serve`, or set AGENT_SANDBOX_URL"
            if failure.code == "unreachable"
            else "set AGENT_SANDBOX_API_KEY to one of the server's AGENT_SANDBOX_API_KEYS"
        )
        return [Check(name, "failed", failure.message, fix if failure.status in (None, 401) else "")]
    except (KeyError, TypeError):
        return [Check(name, "failed", f"{url} answers, but not as an agent-sandbox server", "set AGENT_SANDBOX_URL to the server's address")]


def check_docker(target: Target, *, asked: bool) -> list[Check]:
    """Whether a Docker engine answers and can hold sandboxes."""
    if not asked and target.backend != "docker" and "DOCKER_HOST" not in os.environ and not Path("/var/run/docker.sock").exists():
        return [Check("docker", "skipped", "no engine is set up here")]
    try:
        examine: Callable[[], Awaitable[list[tuple[str, State, str, str]]]] = importlib.import_module(
            "agent_sandbox_api.backends.docker.examination"
        ).examine
    except ModuleNotFoundError as error:
        return [Check("docker", "failed", f"its client cannot be loaded ({error})", "pip install 'agent-sandbox-operator[docker]'")]
    return [Check(*found) for found in asyncio.run(_bounded(examine(), ("docker", "failed", SILENT, LOOK)))]


def check_cluster(target: Target, *, asked: bool) -> list[Check]:
    """Whether a cluster answers and has what the operator needs."""
    configured = "KUBECONFIG" in os.environ or "KUBERNETES_SERVICE_HOST" in os.environ or Path.home().joinpath(".kube/config").exists()
    if not asked and target.backend != "kubernetes" and not configured:
        return [Check("cluster", "skipped", "no kubeconfig")]
    if not asked and target.backend == "docker":
        return [Check("cluster", "skipped", "not with --backend docker")]
    try:
        from .cluster import examine  # noqa: PLC0415 - loads a Kubernetes client
    except ModuleNotFoundError as error:
        return [Check("cluster", "failed", f"its client cannot be loaded ({error})", "pip install 'agent-sandbox-operator[kubernetes]'")]
    found = asyncio.run(_bounded(examine(target.namespace), Check("cluster", "failed", SILENT, LOOK)))
    plugin = shutil.which("kubectl-sandbox")
    return [
        *found,
        Check("kubectl plugin", "ok", "`kubectl sandbox` works")
        if plugin
        else Check("kubectl plugin", "warning", "kubectl-sandbox is not on PATH", "put the folder of sandboxctl on PATH"),
    ]


async def _bounded(work: Awaitable[list[T]], late: T) -> list[T]:
    try:
        async with asyncio.timeout(SECONDS):
            return await work
    except TimeoutError:
        return [late]
