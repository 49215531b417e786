"""What happens around every request, as plain ASGI (Starlette's BaseHTTPMiddleware hides disconnects): identity, log, metrics, faults, keys, sizes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Sequence
from typing import Final

from fastapi import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .answers import error_answer
from .clients import ClientGone
from .logs import request_id
from .metrics import Metrics
from .streams import BodyAborted

logger = logging.getLogger(__name__)

MAX_JSON_BYTES: Final = 16 << 20
"""A JSON body: room for what a command may take (arguments and env, a few MiB) even when every character is escaped."""
GONE: Final = 499
OPEN_PATHS: Final = frozenset({"/healthz", "/docs", "/docs/oauth2-redirect", "/openapi.json"})
"""What needs no key: health, and the documentation, which holds nothing of this installation (a browser could not send a key for it)."""
_QUIET_PATHS: Final = frozenset({"/healthz", "/metrics"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}\Z")


class Lifecycle:
    """Whether the server takes new work."""

    def __init__(self) -> None:
        self.draining = False


def _header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


class Envelope:
    """The outermost layer: gives each request an id, logs and counts it, and turns faults into `internal_error`."""

    def __init__(self, app: ASGIApp, metrics: Metrics, lifecycle: Lifecycle) -> None:
        self._app = app
        self._metrics = metrics
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = (_header(scope, b"x-request-id") or b"").decode("latin-1")
        identity = given if _REQUEST_ID.match(given) else secrets.token_hex(8)
        token = request_id.set(identity)
        status, noted = 0, False
        id_header = (b"x-request-id", identity.encode())
        begun = time.perf_counter()

        async def send_on(message: Message) -> None:
            nonlocal status, noted
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), id_header]
            elif not message.get("more_body", False):
                # Before the last byte goes out: whoever has the answer finds it in the log and the metrics.
                noted = True
                self._note(scope, status, time.perf_counter() - begun)
            await send(message)

        try:
            if self._lifecycle.draining and scope["path"] not in OPEN_PATHS:
                answer = error_answer(
                    503, "unavailable", "the server is stopping: try again in a moment", {"Connection": "close", "Retry-After": "5"}
                )
                await answer(scope, receive, send_on)
            else:
                await self._app(scope, receive, send_on)
        except (ClientGone, ClientDisconnect):
            status = status or GONE
        except BodyAborted as abort:
            told = {"code": abort.cause.code, "reason": type(abort.cause).__name__} if abort.cause else {}
            logger.warning("an answer was broken off: %s", abort, extra={"fields": told})
            raise
        except asyncio.CancelledError:
            if status or not self._lifecycle.draining:
                raise
            message = "the server stopped before the request was done: what it was doing may have happened; look, then try again"
            await error_answer(503, "unavailable", message, {"Connection": "close"})(scope, receive, send_on)
        except Exception as fault:
            logger.exception("a request met an unexpected fault")
            if status:
                raise BodyAborted(None) from fault
            await error_answer(500, "internal_error", f"an unexpected fault; the server's log has it under request id {identity}")(
                scope, receive, send_on
            )
        finally:
            if not noted:
                self._note(scope, status, time.perf_counter() - begun)
            request_id.reset(token)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        self._metrics.requests.labels(scope["method"] if route != "none" else "any", route, status).inc()
        self._metrics.request_seconds.labels(route).observe(seconds)
        level = logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO
        if logger.isEnabledFor(level):
            fields = {"method": scope["method"], "path": scope["path"][:200], "status": status, "ms": round(seconds * 1000, 2)}
            logger.log(level, "request", extra={"fields": fields})


class KeyCheck:
    """Lets nothing be said about a request before its key is right. An `Authorization: Bearer` beats `X-API-Key`; other schemes are ignored."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        # Digests have one length, so the comparison tells nothing about a key's.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or not self._digests or self._is_right(scope):
            await self._app(scope, receive, send)
            return
        message = "no valid API key: send the header 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
        await error_answer(401, "unauthorized", message, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_right(self, scope: Scope) -> bool:
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, credentials = value.strip().partition(b" ")
                if scheme.lower() == b"bearer" and (credentials := credentials.strip()):
                    given = credentials
                    break
            elif name == b"x-api-key" and not given:
                given = value.strip()
        digest = hashlib.sha256(given).digest()
        right = 0
        for known in self._digests:
            right |= hmac.compare_digest(known, digest)
        return bool(right)


class BodyLimit:
    """Bounds JSON bodies while they come in. Uploads are bounded where they are written."""

    def __init__(self, app: ASGIApp, limit: int = MAX_JSON_BYTES) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["method"] not in ("POST", "PATCH", "DELETE"):
            await self._app(scope, receive, send)
            return
        length = _header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > self._limit:
            answer = error_answer(413, "payload_too_large", self._message())
            await answer(scope, receive, send)
            return
        seen = 0

        async def receive_some() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self._limit:
                    # The one kind of exception that FastAPI lets through while it reads a body.
                    raise HTTPException(413, self._message())
            return message

        await self._app(scope, receive_some, send)

    def _message(self) -> str:
        return f"the request body is over {self._limit} bytes: send large data as files"
