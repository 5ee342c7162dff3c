"""Calls into torch's stores that may never return: a stopped process does not answer for its store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises; TimeoutError once it has taken `seconds`.

    The call runs on a thread of its own. A time-out leaves that thread behind: a store's limits do not apply
    to the wait for its answer, and nothing else ends it.
    """
    outcome: list[Any] = []
    problem: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            problem.append(error)

    thread = threading.Thread(target=work, name="paceline-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if problem:
        raise problem[0]
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return outcome[0]  # type: ignore[no-any-return]
