"""Where the steps of a trace begin and end.

On the host, a step is marked by `ProfilerStep#N` (a profiler with a schedule), else by the ends of
`Optimizer.step`, which PyTorch always records; without either, the whole trace is one. On the device a step
lasts from the end of the work that was launched before it to the end of the work that was launched in it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paceline.diagnose.intervals import Union
from paceline.errors import DataError
from paceline.readers.kineto import Floats, Ints, KinetoTrace, Spans

_STEP, _OPTIMIZER, _BACKWARD = "ProfilerStep#", "Optimizer.step#", "autograd::engine::evaluate_function"


@dataclass(frozen=True, slots=True)
class Window:
    """One step: seconds of the trace, on the host and where the work was done."""

    host_start_s: float
    host_end_s: float
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a trace, and by what they were found."""

    windows: tuple[Window, ...]
    found_by: str

    @property
    def typical(self) -> Window:
        """The step in the middle by its length; the first, which may wait for what comes once, only if it is
        alone.
        """
        later = sorted(self.windows[1:] or self.windows, key=lambda window: window.seconds)
        return later[(len(later) - 1) // 2]


@dataclass(frozen=True)
class Launched:
    """Work on the device with the calls that launched it; `place` is -1 where a call is not in the trace."""

    trace: KinetoTrace
    place: Ints

    @staticmethod
    def of(trace: KinetoTrace) -> Launched:
        return Launched(trace, match(trace.work.correlation, trace.launches.correlation))

    @cached_property
    def called_s(self) -> Floats:
        """When the host began the call; of unknown calls, when the work began."""
        return self._of_calls(self.trace.launches.start_s)

    @cached_property
    def issued_s(self) -> Floats:
        """When the host was done with the call."""
        return self._of_calls(self.trace.launches.end_s)

    def _of_calls(self, times_s: Floats) -> Floats:
        if not len(times_s):
            return self.trace.work.start_s
        return np.where(self.place >= 0, times_s[self.place], self.trace.work.start_s)


def match(wanted: Ints, among: Ints) -> Ints:
    """The place of each number among others; -1 where it is not there or below 0."""
    if not len(among):
        return np.full(len(wanted), -1)
    order = np.argsort(among, kind="stable")
    place = order[np.minimum(np.searchsorted(among, wanted, sorter=order), len(among) - 1)]
    return np.where((among[place] == wanted) & (wanted >= 0), place, -1)


def find(trace: KinetoTrace, launched: Launched | None = None) -> Steps:
    """The steps of a trace."""
    host, found_by = _marked(trace)
    if not host:
        host, found_by = (
            [(0.0, trace.end_s)],
            "the whole trace: no ProfilerStep and no Optimizer.step is in it",
        )
    host = _with_backward(trace, host)
    if not len(trace.work):
        return Steps(tuple(Window(a, b, a, b) for a, b in host), found_by)
    ends = _Ends(launched or Launched.of(trace))
    windows = [Window(a, b, ends.before(a), ends.before(b)) for a, b in host]
    found = tuple(window for window in windows if window.seconds > 0)
    if not found:
        raise DataError(f"{trace.path}: no work of the device in any step")
    return Steps(found, found_by)


class _Ends:
    """When the device is done with all that was launched before a time."""

    def __init__(self, launched: Launched) -> None:
        order = np.argsort(launched.called_s, kind="stable")
        self._called = launched.called_s[order]
        self._done = np.maximum.accumulate(launched.trace.work.end_s[order])

    def before(self, at_s: float) -> float:
        place = int(np.searchsorted(self._called, at_s))
        return float(self._done[place - 1]) if place else at_s


def _marked(trace: KinetoTrace) -> tuple[list[tuple[float, float]], str]:
    """Steps on the host by their marks."""
    regions, names = trace.regions, trace.spelled(trace.regions)
    marks = [i for i, name in enumerate(names) if name.startswith(_STEP)]
    if marks:
        starts = regions.start_s[marks].tolist()
        return list(zip(starts, [*starts[1:], float(regions.end_s[marks[-1]])], strict=True)), "ProfilerStep"
    steps = Counter(name for name in names if name.startswith(_OPTIMIZER))
    if not steps:
        return [], ""
    usual = steps.most_common(1)[0][0]
    ends = regions.end_s[[i for i, name in enumerate(names) if name == usual]]
    bounds = [0.0, *_after_backward(trace, np.sort(ends)).tolist()]
    return list(itertools.pairwise(bounds)), usual


def _with_backward(trace: KinetoTrace, host: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Steps that train, where any does: a profiler also marks what comes after the last batch."""
    passes = backward(trace)
    start, end = np.array(host).T
    trains = passes.within(start, end) > 0
    return [step for step, keep in zip(host, trains, strict=True) if keep] or host


def _after_backward(trace: KinetoTrace, ends_s: Floats) -> Floats:
    """Ends of optimizer steps, of those that follow one another without a backward pass the last."""
    passes = backward(trace).start_s
    if not len(passes):
        return ends_s
    count = np.searchsorted(passes, ends_s)
    last = np.concatenate([count[1:] > count[:-1], [True]])
    ended: Floats = ends_s[last]
    return ended


def backward(trace: KinetoTrace) -> Union:
    """When the backward pass runs on the host."""
    wanted = [i for i, name in enumerate(trace.names) if name.startswith(_BACKWARD)]
    ops: Spans = trace.ops.pick(np.isin(trace.ops.name, wanted))
    return Union.of(ops.start_s, ops.end_s)


def region(trace: KinetoTrace, *starts: str) -> Union:
    """When regions (or operators) whose names begin in one of some ways are open on the host."""
    wanted = [i for i, name in enumerate(trace.names) if name.startswith(starts)]
    spans = [s.pick(np.isin(s.name, wanted)) for s in (trace.regions, trace.ops)]
    return Union.of(*(np.concatenate([getattr(s, column) for s in spans]) for column in ("start_s", "end_s")))
