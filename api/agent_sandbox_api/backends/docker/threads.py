"""A few threads for blocking calls. They are daemons: an engine that hangs must not keep a server from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class ThreadPool:
    """At most `limit` threads, made as they are needed; work beyond that waits in line."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Has the function called in a thread. A future that is cancelled before its turn is never called."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise OSError("the backend is closed")
            if self._idle:
                self._idle -= 1
            elif len(self._threads) < self._limit:
                thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._work.put((future, function))
        return future

    def close(self, seconds: float) -> None:
        """Lets what runs end, `seconds` at most; what waits in line is cancelled."""
        with self._lock:
            self._closed = True
            while not self._work.empty():
                item = self._work.get()
                if item is not None:
                    item[0].cancel()
            for _ in self._threads:
                self._work.put(None)
        for thread in self._threads:
            thread.join(seconds / len(self._threads))

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            future, function = item
            if future.set_running_or_notify_cancel():
                try:
                    result = function()
                except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it
                    future.set_exception(error)
                else:
                    future.set_result(result)
            del item, future, function
            with self._lock:
                self._idle += 1
