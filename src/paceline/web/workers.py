"""Processes that compute panels, so that one that takes long does not hold up the others."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from paceline import extend
from paceline.errors import PacelineError, RunError
from paceline.plan.workers import follow

#: seconds that one answer may take
LIMIT_S = 60.0
#: bytes that a worker may allocate
MEMORY = 8 << 30


class Workers:
    """Two pools of processes: one for what is asked while a slider moves, one for all else."""

    def __init__(self, processes: int = 0) -> None:
        count = processes or max(1, min(4, os.cpu_count() or 1))
        self._pools = {kind: _pool(count) for kind in ("quick", "slow")}

    def warm(self) -> None:
        """Waits till a process of each pool has imported what it needs."""
        for started in [pool.submit(_ready) for pool in self._pools.values()]:
            started.result()

    async def run(self, kind: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's value, computed by a process of a pool."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pools[kind], _limited, function, arguments)

    def close(self) -> None:
        """Ends the processes; what is still asked is dropped."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


def _pool(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        count, get_context("spawn"), initializer=_start, initargs=(extend.loaded(), os.getpid())
    )


def _start(extensions: tuple[str, ...], server: int) -> None:
    """In a new process: it ends with the server, whose Ctrl-C is not its own; memory is limited, extensions
    are loaded.
    """
    import resource

    follow(server)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    extend.load_all(extensions)


def _ready() -> None:
    import paceline.web.panels  # noqa: F401


def _limited(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """A function's value, within the time limit; numbers out of range are a user's mistake."""

    def too_long(*_: Any) -> None:
        raise RunError(f"this takes longer than {LIMIT_S:.0f} s to compute; ask for less")

    signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        return function(*arguments)
    except (ArithmeticError, MemoryError) as error:
        raise PacelineError(f"numbers of this scenario are out of range ({type(error).__name__})") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
