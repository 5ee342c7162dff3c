"""What happened in one step of one rank: work by group, and the time in which there was none, by its cause.

Every second of the step is counted once. Where work overlaps, computation goes before communication, and of
two of a kind the one that began first; so communication counts as far as no computation hides it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paceline.diagnose import groups
from paceline.diagnose.intervals import Union
from paceline.diagnose.nesting import innermost
from paceline.diagnose.steps import Launched, Steps, Window, find, match, region
from paceline.readers.kineto import Floats, Ints, KinetoTrace, Spans

COMMUNICATION = "communication"
#: why nothing ran on the device
CAUSES = {
    "data": "waiting for the next batch",
    "compile": "compiling",
    "read-back": "after the host waited for the device",
    "launch": "the host issuing operators",
    "outside": "the host outside of operators",
    "latency": "between a launch and its start, and between kernels",
}
_LOADERS = ("enumerate(DataLoader)", "dataloader", "DataLoader")
_OPTIMIZER = ("Optimizer.step#",)
_COMPILERS = (
    "_compile.compile_inner",
    "compile_inner",
    "torch._dynamo",
    "CompiledFxGraph.compile",
    "Inductor",
)
_WAITS = (
    "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "hipDeviceSynchronize",
    "hipStreamSynchronize", "hipEventSynchronize",
)  # fmt: skip
#: a host that runs no operator for so many seconds does something else than the Python between two of them
PAUSE_S = 1e-3


@dataclass(frozen=True, slots=True)
class Share:
    """Work of one group in a step: seconds in which it is what the step spends its time on, and in all."""

    group: str
    seconds: float
    busy_s: float
    count: int


@dataclass(frozen=True)
class Activity:
    """One step of one rank."""

    trace: KinetoTrace
    window: Window
    #: how the step was found, and how many there are
    found_by: str
    steps: int
    #: work within the step, cut at its ends; group of each, operator that launched it (-1: unknown)
    work: Spans
    group: tuple[str, ...]
    operator: Ints
    #: when the host began to issue each, and was done
    called_s: Floats
    issued_s: Floats

    @staticmethod
    def of(trace: KinetoTrace, step: int | None = None) -> Activity:
        """A step of a trace, by default the typical one."""
        launched = Launched.of(trace)
        steps = find(trace, launched)
        window = steps.typical if step is None else steps.windows[step]
        if len(trace.work):
            return _on_device(trace, steps, window, launched)
        return _on_host(trace, steps, window)

    @property
    def on_device(self) -> bool:
        return len(self.trace.work) > 0

    @property
    def step_s(self) -> float:
        return self.window.seconds

    @cached_property
    def busy(self) -> Union:
        """When any work runs."""
        return Union.of(self.work.start_s, self.work.end_s)

    @cached_property
    def gaps(self) -> Union:
        """When none does."""
        return self.busy.gaps(self.window.start_s, self.window.end_s)

    @cached_property
    def communicates(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which work is communication."""
        return np.array([group == COMMUNICATION for group in self.group], dtype=bool)

    @cached_property
    def exclusive_s(self) -> Floats:
        """Seconds of the step that each piece of work alone accounts for."""
        start, end = self.work.start_s, self.work.end_s
        out = np.zeros(len(start))
        compute = ~self.communicates
        out[compute] = _new(start[compute], end[compute])
        hidden = Union.of(start[compute], end[compute])
        sent = self.communicates
        # of overlapping collectives, what is left of each after those before it and after computation
        both = _new_parts(start[sent], end[sent])
        out[sent] = (both[1] - both[0]) - hidden.within(*both)
        return out

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """Work by group, the largest first."""
        found = []
        names = np.array(self.group)
        lasted = self.work.end_s - self.work.start_s
        for name in dict.fromkeys(self.group):
            which = names == name
            found.append(
                Share(
                    name, float(self.exclusive_s[which].sum()), float(lasted[which].sum()), int(which.sum())
                )
            )
        return tuple(sorted(found, key=lambda share: -share.seconds))

    @cached_property
    def idle(self) -> dict[str, float]:
        """Seconds without work, by cause; adds up to all of them."""
        parts = gap_causes(self)
        return {cause: float(seconds.sum()) for cause, seconds in parts.items() if seconds.sum() > 0}

    @property
    def busy_s(self) -> float:
        return self.busy.total_s

    def select(self, chosen: Callable[[str], bool]) -> Ints:
        """Places of the work of some groups."""
        return np.flatnonzero([chosen(group) for group in self.group])


def _new(start_s: Floats, end_s: Floats) -> Floats:
    """Seconds that each of some intervals, in order, adds to those before it."""
    begin, end = _new_parts(start_s, end_s)
    return end - begin


def _new_parts(start_s: Floats, end_s: Floats) -> tuple[Floats, Floats]:
    """The end of each interval that reaches beyond those before it."""
    if not len(start_s):
        return start_s, end_s
    reached = np.concatenate([[-np.inf], np.maximum.accumulate(end_s)[:-1]])
    begin = np.minimum(np.maximum(start_s, reached), end_s)
    return begin, end_s


def _cut(spans: Spans, window: Window) -> tuple[Spans, Ints]:
    """What of some events lies in a step, and their places."""
    where = np.flatnonzero((spans.end_s > window.start_s) & (spans.start_s < window.end_s))
    found = spans.pick(where)
    start = np.maximum(found.start_s, window.start_s)
    end = np.minimum(found.end_s, window.end_s)
    columns = {name: getattr(found, name) for name in Spans.__slots__}
    return Spans(**{**columns, "start_s": start, "end_s": end}), where


def _on_device(trace: KinetoTrace, steps: Steps, window: Window, launched: Launched) -> Activity:
    work, where = _cut(trace.work, window)
    operator = match(work.external, trace.ops.external)
    called = launched.called_s[where]
    group = _device_groups(trace, work, operator, called)
    return Activity(
        trace=trace,
        window=window,
        found_by=steps.found_by,
        steps=len(steps.windows),
        work=work,
        group=group,
        operator=operator,
        called_s=called,
        issued_s=launched.issued_s[where],
    )


def _device_groups(trace: KinetoTrace, work: Spans, operator: Ints, called_s: Floats) -> tuple[str, ...]:
    """Groups of kernels and copies."""
    updates = region(trace, *_OPTIMIZER)
    updating = updates.within(called_s, called_s + 1e-9) > 0
    known: dict[tuple[int, int, int], str] = {}
    out = []
    columns = (work.name.tolist(), operator.tolist(), work.detail.tolist(), updating.tolist())
    for name, op, call, update in zip(*columns, strict=True):
        inputs = int(trace.ops.detail[op]) if op >= 0 else -1
        key = (name, int(trace.ops.name[op]) if op >= 0 else -1, inputs)
        if key not in known:
            known[key] = _group(trace, *key)
        group = COMMUNICATION if call >= 0 else known[key]
        out.append("optimizer" if update and group not in (COMMUNICATION, "transfer") else group)
    return tuple(out)


def _group(trace: KinetoTrace, kernel: int, op: int, inputs: int) -> str:
    """The group of a kernel that an operator with some inputs launched; each by its place in its table."""
    kernel_name = trace.names[kernel]
    own = groups.by_kernel(kernel_name)
    if own in (COMMUNICATION, "transfer") or op < 0:
        return own
    group = groups.by_operator(trace.names[op], kernel_name)
    types = trace.inputs[inputs].types if inputs >= 0 else ()
    return "cast" if group == "copy" and groups.casts(types) else group


def _on_host(trace: KinetoTrace, steps: Steps, window: Window) -> Activity:
    """A step of a trace without a device: each operator's own time, without that of those it calls."""
    segments, owner = innermost(trace.ops)
    work, where = _cut(segments, window)
    operator = owner[where]
    start = work.start_s
    marks = {"data": region(trace, *_LOADERS), "optimizer": region(trace, *_OPTIMIZER)}
    inside = {name: union.within(start, start + 1e-9) > 0 for name, union in marks.items()}
    group = []
    for i, op in enumerate(operator.tolist()):
        marked = next((name for name in marks if inside[name][i]), None)
        group.append(marked or _host_group(trace, op))
    sent, regions = _sent_by_host(trace, window)
    return Activity(
        trace=trace,
        window=window,
        found_by=steps.found_by,
        steps=len(steps.windows),
        work=_joined(work, sent),
        group=(*group, *[COMMUNICATION] * regions),
        operator=np.concatenate([operator, np.full(regions, -1)]),
        called_s=np.concatenate([start, sent.start_s]),
        issued_s=np.concatenate([start, sent.start_s]),
    )


def _sent_by_host(trace: KinetoTrace, window: Window) -> tuple[Spans, int]:
    """Collectives of gloo or MPI, which PyTorch marks as regions on the threads that run them."""
    wanted = [i for i, name in enumerate(trace.names) if name.startswith(("gloo:", "mpi:", "ucc:"))]
    found, _ = _cut(trace.regions.pick(np.isin(trace.regions.name, wanted)), window)
    return found, len(found)


def _joined(first: Spans, second: Spans) -> Spans:
    """Events of both, one after the other."""
    return Spans(
        **{name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in Spans.__slots__}
    )


def _host_group(trace: KinetoTrace, op: int) -> str:
    inputs = int(trace.ops.detail[op])
    group = groups.by_operator(trace.names[trace.ops.name[op]])
    types = trace.inputs[inputs].types if inputs >= 0 else ()
    return "cast" if group == "copy" and groups.casts(types) else group


def gap_causes(activity: Activity) -> dict[str, Floats]:
    """Seconds of each gap, by cause."""
    gaps, trace = activity.gaps, activity.trace
    start, end = gaps.start_s, gaps.end_s
    late_end = _host_late_until(activity) if activity.on_device else end
    late = late_end - start
    loading = region(trace, *_LOADERS).within(start, late_end)
    compiling = np.minimum(region(trace, *_COMPILERS).within(start, late_end), late - loading)
    left = late - loading - compiling
    outside = np.minimum(_pauses(activity).within(start, late_end), left)
    waited = _after_a_wait(activity, start, late_end)
    read_back = np.where(waited, left - outside, 0.0)
    return {
        "data": loading,
        "compile": compiling,
        "read-back": read_back,
        "launch": left - outside - read_back,
        "outside": outside,
        "latency": end - late_end,
    }


def _host_late_until(activity: Activity) -> Floats:
    """Of each gap, until when the work that ends it was not yet issued."""
    gaps = activity.gaps
    order = np.argsort(activity.work.start_s, kind="stable")
    starts, issued = activity.work.start_s[order], activity.issued_s[order]
    place = np.searchsorted(starts, gaps.end_s - 1e-12)
    ends_it = np.where(place < len(starts), issued[np.minimum(place, len(starts) - 1)], gaps.end_s)
    return np.clip(ends_it, gaps.start_s, gaps.end_s)


def _pauses(activity: Activity) -> Union:
    """When no operator was running on the host for longer than Python takes between two of them."""
    ops, calls = activity.trace.ops, activity.trace.launches
    start = np.concatenate([ops.start_s, calls.start_s])
    end = np.concatenate([ops.end_s, calls.end_s])
    window = activity.window
    between = Union.of(start, end).gaps(min(window.host_start_s, window.start_s), window.end_s)
    long = between.end_s - between.start_s > PAUSE_S
    return Union(between.start_s[long], between.end_s[long])


def _after_a_wait(
    activity: Activity, start_s: Floats, end_s: Floats
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which gaps hold the end of a call in which the host waited for the device."""
    waits = host_waits(activity)
    first = np.searchsorted(waits, start_s - 20e-6)
    last = np.searchsorted(waits, end_s)
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = last > first
    return found


def host_waits(activity: Activity) -> Floats:
    """When the host was done waiting for the device, each time."""
    trace = activity.trace
    wanted = [i for i, name in enumerate(trace.names) if name.startswith(_WAITS)]
    return np.sort(trace.launches.end_s[np.isin(trace.launches.name, wanted)])
