"""What `sandboxctl doctor` wants to know of an engine."""

from __future__ import annotations

from typing import Literal

from agent_sandbox_core.errors import SandboxError
from docker.errors import ImageNotFound

from ...settings import SettingsError, load_settings
from .client import EngineClient
from .shared import LIMITS

Finding = tuple[str, Literal["ok", "warning", "failed"], str, str]
"""Name, state, what was found, what to do."""


async def examine() -> list[Finding]:
    """The engine, its limits, its runtime and the default image."""
    try:
        settings = load_settings(insecure_no_auth=True)
    except SettingsError as error:
        return [("docker settings", "failed", str(error), "correct the environment")]
    client: EngineClient | None = None
    try:
        client = EngineClient()
        await client.open()
        info = await client.run("asking the Docker engine about itself", lambda api: api.info())
        found: list[Finding] = [
            (
                "docker",
                "ok",
                f"engine {info['ServerVersion']}, {info['Architecture']}, {info['NCPU']} CPUs, cgroup v{info.get('CgroupVersion', '1')}",
                "",
            )
        ]
        found += [
            ("docker limits", "warning", f"not enforced: {cost}", "change the machine's boot options, or accept it")
            for name, cost in LIMITS.items()
            if not info.get(name)
        ]
        runtime = settings.docker_runtime or info["DefaultRuntime"]
        if runtime not in info["Runtimes"]:
            found.append(
                (
                    "docker runtime",
                    "failed",
                    f"the engine has no runtime {runtime}",
                    f"install it, or set AGENT_SANDBOX_DOCKER_RUNTIME to one of {', '.join(sorted(info['Runtimes']))}",
                )
            )
        else:
            found.append(("docker runtime", "ok", str(runtime), ""))
        return [*found, await _image(client, settings.default_image)]
    except SandboxError as error:
        return [("docker", "failed", error.message, "start the engine, or set DOCKER_HOST")]
    finally:
        if client is not None:
            await client.close()


async def _image(client: EngineClient, name: str) -> Finding:
    def present(api: object) -> bool:
        try:
            api.inspect_image(name)  # type: ignore[attr-defined]
        except ImageNotFound:
            return False
        return True

    if await client.run(f"looking for image {name}", present):
        return ("docker image", "ok", f"{name} is there", "")
    return ("docker image", "warning", f"{name} is not there: the first sandbox pulls it", f"docker pull {name}, or set AGENT_SANDBOX_DEFAULT_IMAGE")
