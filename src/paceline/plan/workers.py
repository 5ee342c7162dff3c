"""Processes that a search forks: deaf to Ctrl-C, gone with the search, and gone with the process that started
them.

A Ctrl-C reaches every process of a terminal. Only the parent answers it: workers are forked while it is
blocked, and ignore it from then on. A parent that is killed cannot end its workers, so each of them looks
whether it is still there.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeVar, cast

from paceline.errors import PacelineError, RunError

A = TypeVar("A")
B = TypeVar("B")
#: seconds between two looks for the parent
LOOK_S = 0.5


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a search, with what was reached until then."""


@contextmanager
def reached(text: str) -> Iterator[None]:
    """Says of a Ctrl-C how far the search was."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt:
        raise Interrupted(text) from None


class Pool(Protocol):
    """Whatever runs a function over tasks and gives results in order."""

    def map(self, run: Callable[[A], B], tasks: Iterable[A], /) -> Iterable[B]: ...


class Here:
    """No other process."""

    def map(self, run: Callable[[A], B], tasks: Iterable[A], /) -> Iterable[B]:
        return map(run, tasks)


class Forked:
    """Processes that were forked from this one, with what it knew then; each runs one task at a time."""

    def __init__(self, count: int) -> None:
        context = get_context("fork")
        self._lines: list[Connection] = []
        self._processes = []
        with _undisturbed():
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, os.getpid()), daemon=True)
                process.start()
                theirs.close()  # a worker that died is noticed by the end of its line
                self._lines.append(ours)
                self._processes.append(process)

    def map(self, run: Callable[[A], B], tasks: Iterable[A], /) -> Iterator[B]:
        """Results in the order of the tasks; what a task raises, and RunError where a worker was killed."""
        waiting, idle = iter(enumerate(tasks)), list(self._lines)
        done: dict[int, tuple[B, Exception | None]] = {}
        following = 0
        while True:
            while idle and (task := next(waiting, None)) is not None:
                self._send(idle.pop(), (task[0], run, task[1]))
            if len(idle) == len(self._lines):
                return
            for line in wait([line for line in self._lines if line not in idle]):
                number, result, error = self._receive(cast(Connection, line))
                done[number] = result, error
                idle.append(cast(Connection, line))
            while following in done:
                result, error = done.pop(following)
                if error is not None:
                    raise error
                yield result
                following += 1

    def _send(self, line: Connection, task: Any) -> None:
        try:
            line.send(task)
        except BrokenPipeError:
            raise RunError(_KILLED) from None

    def _receive(self, line: Connection) -> Any:
        try:
            return line.recv()
        except (EOFError, ConnectionResetError):
            raise RunError(_KILLED) from None

    def close(self) -> None:
        """Ends the processes, whatever they do."""
        with _undisturbed():
            for process in self._processes:
                process.kill()
            for process, line in zip(self._processes, self._lines, strict=True):
                process.join()
                line.close()


_KILLED = (
    "a worker process of the search was killed, perhaps for lack of memory; run it again on fewer cores"
    " (taskset), or narrow the space (--fix, --forbid)"
)


@contextmanager
def workers(count: int) -> Iterator[Pool]:
    """So many processes; none besides this one where that is less than two, or where there is no way to
    fork.
    """
    if count < 2 or "fork" not in get_all_start_methods():
        yield Here()
        return
    pool = Forked(count)
    try:
        yield pool
    finally:
        pool.close()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Puts Ctrl-C off; processes that are forked meanwhile do not hear it, and ignore it later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(line: Connection, parent: int) -> None:
    """A worker: tasks in, results or errors out, until it is killed or its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    follow(parent)
    while True:
        number, run, task = line.recv()
        try:
            line.send((number, run(task), None))
        except Exception as error:
            line.send((number, None, _told(error)))


def _told(error: Exception) -> Exception:
    """An error as the parent can read it, with where it was raised."""
    if not isinstance(error, PacelineError):  # the message of ours is all there is to say
        error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RunError(f"a worker process of the search failed: {type(error).__name__}: {error}")
    return error


def follow(parent: int) -> None:
    """Ends this process when the one that started it is gone, from a thread that looks now and then."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
