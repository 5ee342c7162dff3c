"""The event engine: when each task of a program runs.

A task starts when the tasks it waits for are done; streams run their tasks in order, so that waiting for a
stream is waiting for the task ahead on it, and a collective that several roles take part in starts when the
last of them arrives. Two things change the pace of what already runs: a collective that crowds the device
slows the computation beside it by a share, and collectives that run from one role at the same time share its
links. Ties go to the task issued first: the same program gives the same times, bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from paceline.errors import SpecError
from paceline.sim.program import COMPUTE, HOST, LAUNCHED, Program

Array = NDArray[np.float64]
#: the pace of collectives over some axes that run at the same time, each as a share of its pace alone
Share = Callable[[tuple[str, ...]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Run:
    """Start and end of each task, in seconds."""

    start: Array
    end: Array
    events: int

    @property
    def seconds(self) -> float:
        return float(self.end.max(initial=0.0))


class _Pace:
    """The tasks whose pace can change while they run."""

    def __init__(self, program: Program, contention: float, share: Share | None) -> None:
        labels = program.labels
        self.rate_beside = 1.0 - contention
        self.share = share
        self.shares: dict[tuple[str, ...], Sequence[float]] = {}
        crowds = np.array([label.crowds for label in labels], dtype=bool)[program.label]
        sends = np.array([bool(label.op) and share is not None for label in labels], dtype=bool)[
            program.label
        ]
        computes = np.array([kind == COMPUTE for _, kind in program.streams], dtype=bool)[program.stream]
        crowded = np.zeros(program.roles, dtype=bool)
        crowded[program.role[crowds]] = contention > 0
        #: 0: fixed; 1: computation that a collective may slow down; 2: collective
        self.kind: list[int] = np.where(
            ~computes & (crowds | sends), 2, np.where(computes & crowded[program.role], 1, 0)
        ).tolist()
        self.role: list[int] = program.role.tolist()
        self.crowds: list[bool] = crowds.tolist()
        self.axis: list[str] = [labels[i].axis for i in program.label.tolist()] if share is not None else []
        self.work: list[float] = program.work.tolist()
        self.left, self.since, self.rate = list(self.work), [0.0] * len(program), [1.0] * len(program)
        self.computing = [-1] * program.roles
        self.crowd = [0] * program.roles
        self.sending: list[list[int]] = [[] for _ in range(program.roles)]

    def start(self, task: int, now: float, due: list[float], heap: list[tuple[float, int]]) -> None:
        role = self.role[task]
        self.since[task] = now
        if self.kind[task] == 1:
            self.computing[role] = task
            rate = self.rate[task] = self.rate_beside if self.crowd[role] else 1.0
            due[task] = now + self.left[task] / rate
        else:
            due[task] = now + self.left[task]
            self._change(task, role, now, due, heap, 1)
        heappush(heap, (due[task], task))

    def end(self, task: int, now: float, due: list[float], heap: list[tuple[float, int]]) -> None:
        role = self.role[task]
        if self.kind[task] == 1:
            self.computing[role] = -1
        else:
            self._change(task, role, now, due, heap, -1)

    def _change(
        self, task: int, role: int, now: float, due: list[float], heap: list[tuple[float, int]], by: int
    ) -> None:
        """A collective comes or goes."""
        if self.crowds[task]:
            self.crowd[role] += by
            if self.crowd[role] == (by > 0) and (beside := self.computing[role]) >= 0:
                self._set(beside, self.rate_beside if by > 0 else 1.0, now, due, heap)
        if self.share is None:
            return
        sending = self.sending[role]
        if by > 0:
            sending.append(task)
        else:
            sending.remove(task)
        if sending:
            key = tuple(self.axis[t] for t in sending)
            if key not in self.shares:
                self.shares[key] = self.share(key) if len(key) > 1 else (1.0,)
            for t, rate in zip(sending, self.shares[key], strict=True):
                if rate != self.rate[t]:
                    self._set(t, rate, now, due, heap)

    def _set(
        self, task: int, rate: float, now: float, due: list[float], heap: list[tuple[float, int]]
    ) -> None:
        left = self.left[task] = max(0.0, self.left[task] - (now - self.since[task]) * self.rate[task])
        self.since[task], self.rate[task] = now, rate
        due[task] = now + left / rate
        heappush(heap, (due[task], task))


def run(program: Program, contention: float = 0.0, share: Share | None = None) -> Run:
    """Runs a program.

    `contention` is the share by which computation slows down beside collectives that crowd the device.
    """
    count = len(program)
    if not 0.0 <= contention < 1.0:
        raise SpecError(f"contention is a share between 0 and 1, got {contention:g}")
    waiting = np.diff(program.first).tolist()
    order = np.argsort(program.before, kind="stable")
    after = np.repeat(np.arange(count, dtype=np.int32), np.diff(program.first))[order].tolist()
    last = np.cumsum(np.bincount(program.before, minlength=count)).tolist()
    pace = _Pace(program, contention, share)
    kind, work = pace.kind, pace.work
    begin, due, done = [0.0] * count, [0.0] * count, bytearray(count)
    heap: list[tuple[float, int]] = []
    pop, push = heappop, heappush
    events, now = 0, 0.0
    ready = [task for task in range(count) if not waiting[task]]
    while True:
        for task in ready:
            begin[task] = now
            if kind[task]:
                pace.start(task, now, due, heap)
            else:
                end = due[task] = now + work[task]
                push(heap, (end, task))
        if not heap:
            break
        now, task = pop(heap)
        events += 1
        ready = []
        if done[task] or due[task] != now:
            continue  # its pace has changed since
        done[task] = 1
        if kind[task]:
            pace.end(task, now, due, heap)
        for successor in after[last[task - 1] if task else 0 : last[task]]:
            waiting[successor] -= 1
            if not waiting[successor]:
                ready.append(successor)
    if not all(done):
        raise SpecError(
            f"{count - sum(done)} of {count} tasks wait for each other, the first of them"
            f" {_name(program, done.index(0))}"
        )
    return Run(np.array(begin), np.array(due), events)


def _name(program: Program, task: int) -> str:
    return repr(program.labels[program.label[task]].name)


def breakdown(
    program: Program, found: Run, role: int = 0, idle: str = "idle", since: float = 0.0
) -> dict[str, float]:
    """Where a role's time goes, by the parts of its labels; the seconds add up to those of the run `since`
    then.

    What it computes is what it computes. Where it waits for the host last of all, that is the host's time.
    Where it computes slower, or not at all while something is sent, that is the time of what is sent; of the
    rest, the host's while it issues, else `idle`.
    """
    mine = np.array([owner == role for owner, _ in program.streams], dtype=bool)
    kinds = np.array([{COMPUTE: 1, HOST: 2, LAUNCHED: 2}.get(kind, 0) for _, kind in program.streams])[
        program.stream
    ]
    here = mine[program.stream] | ((program.also >= 0) & mine[program.also])
    start, end, labels = found.start.tolist(), found.end.tolist(), program.label.tolist()
    sent, issued = (
        _Cover(
            [
                (start[t], end[t], program.labels[labels[t]].part)
                for t in np.flatnonzero(here & (kinds == kind)).tolist()
            ]
        )
        for kind in (0, 2)
    )
    out: dict[str, float] = defaultdict(float)

    def wait(begin: float, stop: float, seconds: float, otherwise: str) -> None:
        for cover in (sent, issued):
            for part, shared in cover.within(begin, stop):
                out[part] += min(shared, seconds)
                seconds -= min(shared, seconds)
        out[otherwise] += seconds

    at = since
    for task in np.flatnonzero(here & (kinds == 1) & (found.start >= since)).tolist():
        label = program.labels[labels[task]]
        if start[task] > at and _awaits_host(program, found, task, kinds):
            out["host"] += start[task] - at
        elif start[task] > at:
            wait(at, start[task], start[task] - at, idle)
        took = end[task] - start[task]
        whole = min(label.seconds, took)
        if took > whole:
            wait(start[task], end[task], took - whole, label.part)
        for part, seconds in label.shares.items():
            out[part] += seconds * whole / label.seconds if label.seconds else 0.0
        at = end[task]
    if found.seconds > at:
        wait(at, found.seconds, found.seconds - at, idle)
    return {part: seconds for part, seconds in out.items() if seconds > 0}


def _awaits_host(program: Program, found: Run, task: int, kinds: NDArray[np.int64]) -> bool:
    """Whether the last that a task waits for is the host."""
    before = program.before[program.first[task] : program.first[task + 1]]
    return bool(len(before)) and bool(kinds[before[int(found.end[before].argmax())]] == 2)


class _Cover:
    """Intervals without overlaps; asked for from left to right."""

    def __init__(self, intervals: list[tuple[float, float, str]]) -> None:
        self.intervals: list[tuple[float, float, str]] = []
        self.place, at = 0, 0.0
        for begin, stop, part in sorted(intervals):
            if stop > at:
                self.intervals.append((max(at, begin), stop, part))
                at = stop

    def within(self, begin: float, stop: float) -> Iterator[tuple[str, float]]:
        """(part, seconds) of what lies between two times."""
        while self.place < len(self.intervals) and self.intervals[self.place][1] <= begin:
            self.place += 1
        for left, right, part in islice(self.intervals, self.place, None):
            if left >= stop:
                break
            yield part, min(right, stop) - max(left, begin)
