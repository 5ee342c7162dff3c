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
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children, get_all_start_methods, get_context
from typing import Any

from paceline.errors import PacelineError, RunError

#: runs a function over tasks and gives results in order, as `map` does
Run = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
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


@contextmanager
def workers(count: int) -> Iterator[Run]:
    """So many processes, forked from this one with what it knows; none besides this one where that is less
    than two, or where there is no way to fork.
    """
    if count < 2 or "fork" not in get_all_start_methods():
        yield map
        return
    others = set(active_children())
    executor = ProcessPoolExecutor(count, get_context("fork"), initializer=_begin, initargs=(os.getpid(),))
    with _undisturbed():
        executor.submit(os.getpid).result()  # the first task forks all of them
    processes = set(active_children()) - others
    try:
        yield partial(_over, executor)
    finally:
        with _undisturbed():
            for process in processes:  # whatever they do
                process.kill()
            executor.shutdown()


def _over(executor: ProcessPoolExecutor, run: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
    """Results in the order of the tasks; what a task raises, and RunError where a worker was killed."""
    try:
        waiting = [executor.submit(_sendable, run, task) for task in tasks]
        yield from (future.result() for future in waiting)
    except BrokenProcessPool:
        raise RunError(
            "a worker process of the search was killed, perhaps for lack of memory; run it again on fewer"
            " cores (taskset), or narrow the space (--fix, --forbid)"
        ) from None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Puts Ctrl-C off; processes that are forked meanwhile do not hear it, and ignore it later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(parent: int) -> None:
    """A worker hears no Ctrl-C, and ends when its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    follow(parent)


def follow(parent: int) -> None:
    """Ends this process when the one that started it is gone, from a thread that looks now and then."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


def _sendable(run: Callable[[Any], Any], task: Any) -> Any:
    """The result of a task; its error as the parent can read it, with where it was raised."""
    try:
        return run(task)
    except Exception as error:
        if not isinstance(error, PacelineError):  # the message of ours is all there is to say
            error.add_note("".join(traceback.format_exception(error)))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            text = f"a worker process of the search failed: {type(error).__name__}: {error}"
            raise RunError(text) from None
        raise
