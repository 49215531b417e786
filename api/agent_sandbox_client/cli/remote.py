"""The HTTP API as the command line uses it: bounded calls, streams, and refusals as Failures."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self

import httpx

from .failures import Failure

CONNECT_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 660.0
"""A create may wait for an image or a volume; the server gives up long before this."""
SILENCE_SECONDS: Final = 180.0
"""Streams carry a sign of life at least once a minute."""
PAUSES: Final = (0.1, 0.5)
"""Before further tries of what may be repeated, when the connection failed."""
REPEATABLE: Final = frozenset({"GET", "DELETE"})
Json = dict[str, Any]


class Remote:
    """One server."""

    def __init__(self, url: str, key: str | None, *, patience: float = ANSWER_SECONDS) -> None:
        self.url = url
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            # A proxy of the environment must not be asked for a server on this machine.
            self.by_proxy = httpx.URL(url).host not in {"127.0.0.1", "::1", "localhost"}
            timeout = httpx.Timeout(patience, connect=CONNECT_SECONDS, pool=None)
            self._http = httpx.Client(base_url=url, headers=self.headers, timeout=timeout, trust_env=self.by_proxy)
        except (httpx.InvalidURL, ValueError) as error:
            raise Failure(f"{url!r} is no address of a server ({error}): give one like http://127.0.0.1:8080", 2) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def call(self, method: str, path: str, /, *, body: Any = None, once: bool = False, **query: Any) -> Json:
        """One call with JSON both ways. `once`: it has a key by which the server does it once, so it may be tried again like a read."""
        headers = {"Idempotency-Key": secrets.token_hex(16)} if once else {}
        with self._telling():
            for pause in (*PAUSES, None) if once or method in REPEATABLE else (None,):
                try:
                    answer = self._http.request(method, path, json=body, params=_given(query), headers=headers)
                    break
                except (httpx.NetworkError, httpx.RemoteProtocolError):
                    if pause is None:
                        raise
                    time.sleep(pause)
        self._check(answer)
        return answer.json() if answer.content else {}

    @contextmanager
    def receive(self, method: str, path: str, /, *, body: Any = None, **query: Any) -> Iterator[httpx.Response]:
        """A call whose answer is a stream: iterate it with `lines`."""
        timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS, pool=None)
        with self._telling(), self._http.stream(method, path, json=body, params=_given(query), timeout=timeout) as answer:
            if answer.is_error:
                answer.read()
                self._check(answer)
            yield answer

    def lines(self, answer: httpx.Response) -> Iterator[Json]:
        """The objects of an NDJSON stream."""
        with self._telling():
            for line in answer.iter_lines():
                if line.strip():
                    yield json.loads(line)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except httpx.UnsupportedProtocol as error:
            raise Failure(f"{self.url}: {error}: give an address like http://127.0.0.1:8080", 2) from None
        except httpx.ConnectError as error:
            raise Failure(
                f"nothing answers at {self.url} ({error}): start `sandboxctl serve`, give another --url, or work without a server (--backend docker)",
                code="unreachable",
            ) from None
        except httpx.TimeoutException:
            raise Failure(f"{self.url} did not answer in time: look at its log, then try again", code="timeout") from None
        except httpx.TransportError as error:
            raise Failure(
                f"the connection to {self.url} broke ({error or type(error).__name__}): the outcome is unknown, look before you repeat it",
                code="connection_lost",
            ) from None

    def _check(self, answer: httpx.Response) -> None:
        if answer.is_success:
            return
        try:
            found = answer.json()
        except ValueError:
            raise Failure(
                f"{self.url} answered {answer.status_code} and no JSON: is it an agent-sandbox server?", status=answer.status_code
            ) from None
        if isinstance(found, dict) and isinstance(error := found.get("error"), dict):
            raise Failure(_advise(answer.status_code, str(error.get("message"))), code=str(error.get("code")), status=answer.status_code)
        detail = found.get("detail") if isinstance(found, dict) else None
        raise Failure(
            _schema_error(detail) or f"{self.url} answered {answer.status_code}: is it an agent-sandbox server?",
            status=answer.status_code,
            code="invalid_request",
        )


def _advise(status: int, message: str) -> str:
    return f"{message}: give --api-key, or set AGENT_SANDBOX_API_KEY" if status == httpx.codes.UNAUTHORIZED else message


def _schema_error(detail: Any) -> str:
    if not isinstance(detail, list):
        return ""
    return "; ".join(f"{'.'.join(str(part) for part in one.get('loc', [])[1:])}: {one.get('msg')}" for one in detail if isinstance(one, dict))


def _given(query: Mapping[str, Any]) -> dict[str, Any]:
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in query.items() if value not in (None, [])}
