"""Operators of a host as they call one another."""

from __future__ import annotations

from array import array

import numpy as np

from paceline.readers.kineto import Ints, Spans


def innermost(ops: Spans) -> tuple[Spans, Ints]:
    """Times in which each operator itself runs, not one that it calls; and which operator each belongs to."""
    start, end, owner = array("d"), array("d"), array("q")
    for thread in np.unique(ops.thread):
        _flatten(ops, np.flatnonzero(ops.thread == thread), start, end, owner)
    place = np.array(owner, dtype=np.int64)
    times = np.array(start), np.array(end)
    order = np.argsort(times[0], kind="stable")
    found = ops.pick(place[order])
    columns = {name: getattr(found, name) for name in Spans.__slots__}
    return Spans(**{**columns, "start_s": times[0][order], "end_s": times[1][order]}), place[order]


def _flatten(ops: Spans, which: Ints, start: array[float], end: array[float], owner: array[int]) -> None:
    """Walks the operators of one thread in order, with those that are open on a stack."""
    stack: list[tuple[int, float]] = []
    at = 0.0

    def until(time: float) -> None:
        """The innermost open operator runs until `time`."""
        if stack and time > at:
            start.append(at)
            end.append(time)
            owner.append(stack[-1][0])

    begins, ends = ops.start_s[which].tolist(), ops.end_s[which].tolist()
    for place, begin, finish in zip(which.tolist(), begins, ends, strict=True):
        while stack and stack[-1][1] <= begin:
            until(stack[-1][1])
            at = max(at, stack.pop()[1])
        until(begin)
        at = max(at, begin) if stack else begin
        stack.append((place, min(finish, stack[-1][1]) if stack else finish))
    while stack:
        until(stack[-1][1])
        at = max(at, stack.pop()[1])
