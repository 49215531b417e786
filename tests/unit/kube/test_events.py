from __future__ import annotations

import json
import logging

import pytest
from agent_sandbox_kube.client import Kube
from agent_sandbox_kube.events import EventPoster, event_name
from aiohttp import web

from tests.unit.kube.apiserver import ApiServer, refusal

ABOUT = {"apiVersion": "agentsandbox.dev/v1alpha1", "kind": "Sandbox", "namespace": "one", "name": "web", "uid": "u1"}


def test_the_same_event_has_the_same_name_and_another_one_another() -> None:
    name = event_name(ABOUT, "Normal", "Ready", "it is")
    assert name == event_name(ABOUT, "Normal", "Ready", "it is")
    others = [("Warning", "Ready", "it is"), ("Normal", "Gone", "it is"), ("Normal", "Ready", "it was")]
    assert name not in {event_name(ABOUT, *other) for other in others}
    assert name != event_name({**ABOUT, "uid": "u2"}, "Normal", "Ready", "it is")
    assert len(event_name({**ABOUT, "name": "x" * 253}, "Normal", "Ready", "it is")) <= 253


async def test_an_event_that_was_there_is_counted(server: ApiServer, kube: Kube) -> None:
    changes: list[object] = []

    async def known(_: web.Request) -> web.StreamResponse:
        return web.json_response({"count": 4})

    async def changed(request: web.Request) -> web.StreamResponse:
        changes.append(json.loads(await request.read()))
        return web.json_response({})

    server.plays.extend([refusal(409, "AlreadyExists", "there"), known, changed])
    assert await EventPoster(kube, "operator", "me").post(ABOUT, "Ready", "it is")
    assert [change["count"] for change in changes if isinstance(change, dict)] == [5]


@pytest.mark.parametrize("code", [403, 404, 422, 500])
async def test_an_event_that_cannot_be_written_is_only_a_line_in_the_log(
    server: ApiServer, kube: Kube, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    caplog.set_level(logging.INFO, "agent_sandbox_kube.events")
    server.plays.append(refusal(code, "No", "these words"))
    assert not await EventPoster(kube, "operator", "me").post(ABOUT, "Ready", "it is", warning=True)
    assert "an event about Sandbox one/web is lost: creating events" in caplog.text and "these words" in caplog.text
