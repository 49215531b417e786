"""A process that makes sandboxes until somebody kills it: `python -m tests.backends.docker.dying INSTANCE_ID network|none`."""

from __future__ import annotations

import asyncio
import sys

from agent_sandbox_api.backends.docker import DockerEngine, DockerOptions

from .conftest import make


async def work(instance_id: str, network: str) -> None:
    engine = DockerEngine(DockerOptions(instance_id))
    await engine.open()
    print("open", flush=True)
    while True:
        record = await make(engine, network=network == "network")
        print(record.sandbox_id, flush=True)


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))
