"""The calls of docker-py that its types leave open, with types."""

from __future__ import annotations

from typing import Any

import docker


def inspect_image(api: docker.APIClient, image: str) -> dict[str, Any]:
    """`GET /images/{name}/json`."""
    found: dict[str, Any] = api.inspect_image(image)  # type: ignore[no-untyped-call]  # types-docker has no types for it
    return found


def create_container(api: docker.APIClient, config: dict[str, Any], name: str) -> str:
    """`POST /containers/create`, the body as it is; the id of the container."""
    made: dict[str, Any] = api.create_container_from_config(config, name)  # type: ignore[no-untyped-call]  # the same
    return str(made["Id"])


def list_containers(api: docker.APIClient, filters: dict[str, list[str]] | None = None) -> list[dict[str, Any]]:
    """`GET /containers/json`, stopped ones too."""
    return list(api.containers(all=True, filters=filters))


def list_volumes(api: docker.APIClient, filters: dict[str, list[str]]) -> list[dict[str, Any]]:
    """`GET /volumes`; the engine says null for none."""
    return list(api.volumes(filters=filters)["Volumes"] or [])
