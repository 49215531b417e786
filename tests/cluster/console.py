"""What the commands share: progress on stderr, bounded subprocesses, errors that end with the log's last lines, locks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
TAIL_LINES = 25
TICK_SECONDS = 15.0
STARTED = time.monotonic()


class ClusterError(Exception):
    """Something about the test cluster cannot be done; the message says what happened and what to do next."""


def say(text: str) -> None:
    """Progress goes to stderr, with the seconds since the start; results own stdout."""
    print(f"[cluster {time.monotonic() - STARTED:5.1f} s] {text}", file=sys.stderr, flush=True)


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, or a word about why there are none."""
    try:
        with path.open(errors="replace") as log:
            last = deque(log, lines)
    except FileNotFoundError:
        return f"(no log: {path})"
    return "".join(line if len(line) < 1000 else line[:1000] + " …\n" for line in last).rstrip() or "(the log is empty)"


def run(
    *argv: str | Path,
    seconds: float = 60,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    check: bool = True,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a short command and returns its outcome; its failure or lateness is a ClusterError with what it said."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=env,
            cwd=cwd,
            check=False,
            errors="replace",
            **({"input": stdin} if stdin is not None else {"stdin": subprocess.DEVNULL}),
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(words)[:300]} did not end within {seconds:.0f} s") from error
    except FileNotFoundError as error:
        raise ClusterError(f"{words[0]} is not installed: `python3 -m tests.cluster check` says what is missing") from error
    if check and done.returncode != 0:
        raise ClusterError(f"{' '.join(words)[:300]} failed with {done.returncode}:\n{(done.stderr or done.stdout).strip()[-3000:]}")
    return done


def run_logged(what: str, argv: Sequence[str], log: Path, *, seconds: float, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
    """Runs a long command into a log, says every few seconds that it still runs, and ends a failure with the log's last lines."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("ab") as sink:
        # A session of its own: Ctrl-C is ours to handle, and a compiler's children go with it.
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env=env, cwd=cwd, start_new_session=True)
    try:
        while True:
            try:
                code = child.wait(TICK_SECONDS)
                break
            except subprocess.TimeoutExpired:
                passed = time.monotonic() - began
                if passed > seconds:
                    raise ClusterError(f"{what}: not done after {seconds:.0f} s; the end of {log}:\n{tail(log)}") from None
                say(f"{what}: {passed:.0f} s so far")
    finally:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, 9)
            child.wait()
    if code != 0:
        raise ClusterError(f"{what} failed with {code}; the end of {log}:\n{tail(log)}")
    say(f"{what}: done in {time.monotonic() - began:.0f} s")


def wait_for(what: str, condition: Callable[[], T], *, seconds: float, every: float = 0.1, explain: Callable[[], str] = lambda: "") -> T:
    """Calls `condition` until it gives something true, and returns that; a ClusterError after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not within {seconds:.0f} s {explain()}".rstrip())
        time.sleep(every)


@contextlib.contextmanager
def locked(path: Path, *, seconds: float, what: str) -> Iterator[None]:
    """Holds a file lock. The kernel gives it back when its holder dies in any way, so a lock never outlives its work."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as handle:
        deadline = time.monotonic() + seconds
        told = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                handle.seek(0)
                holder = handle.read().strip() or "unknown"
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"{what} is being worked on by process {holder}, for more than {seconds:.0f} s: wait for it or end it"
                    ) from None
                if not told:
                    say(f"{what} is being worked on by process {holder}: waiting for it")
                    told = True
                time.sleep(0.2)
        handle.seek(0)
        handle.truncate()
        handle.write(str(os.getpid()))
        handle.flush()
        yield


def write_if_changed(path: Path, text: str, mode: int = 0o644) -> bool:
    """Puts `text` at `path` in one step; returns whether anything changed."""
    if path.exists() and path.read_text() == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.chmod(mode)
    fresh.replace(path)
    return True
