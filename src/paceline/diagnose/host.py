"""Findings about a device that waits for its host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from paceline.diagnose.activity import _LOADERS, Activity, gap_causes, host_waits
from paceline.diagnose.findings import Finding, TracePlace
from paceline.diagnose.steps import region
from paceline.readers.kineto import Floats
from paceline.units import show

#: gaps of the host's making that are nearer to one another than this are one stretch
NEAR_S = 100e-6
_PLACES = 3
_ALLOCATIONS = ("cudaMalloc", "cudaFree", "hipMalloc", "hipFree", "cuMemCreate", "cuMemMap")
_COMPILED = "Torch-Compiled Region:"
_GRAPHS = "torch.compile(mode='reduce-overhead') for CUDA graphs; a fused optimizer; a larger micro-batch"
_FEWER_LAUNCHES = f"torch.compile; {_GRAPHS}"


def findings(activity: Activity) -> Iterator[Finding]:
    """All of them, for a trace with a device."""
    if activity.on_device:
        causes = gap_causes(activity)
        yield from _launch_bound(activity, causes["launch"])
        yield from _latency(activity, causes["latency"])
        yield from _read_backs(activity, causes["read-back"])
        yield from _pauses(activity, causes["outside"])
        yield from _allocations(activity)
    yield from _data(activity)
    yield from _compiling(activity)


def _ms(seconds: float) -> str:
    return show(seconds, "time")


def _launch_bound(activity: Activity, idle_s: Floats) -> Iterator[Finding]:
    total = float(idle_s.sum())
    if total <= 0:
        return
    places = stretches(activity, idle_s)
    count = int((idle_s > 0).sum())
    waits = idle_s[idle_s > 0]
    each = max(1, len(activity.work))
    median = float(np.median(waits))
    evidence = [
        f"{count} kernels started only when the host issued them, the median one {_ms(median)} late",
        f"one is issued every {_ms(activity.step_s / each)} and runs for {_ms(activity.busy_s / each)}",
    ]
    if activity.trace.recorded:
        what = ", ".join(activity.trace.recorded)
        evidence.append(f"the profiler recorded {what}, which slows the host: less is lost without it")
    yield Finding(
        kind="launch-bound",
        title=(
            f"the device is idle while the host issues operators ({100 * total / activity.step_s:.0f} % of"
            " the step)"
        ),
        saves_s=total,
        basis="all of the time in which the next kernel was not yet issued",
        advice=_FEWER_LAUNCHES if not _compiled(activity) else _GRAPHS,
        evidence=tuple(evidence),
        places=places,
    )


def _compiled(activity: Activity) -> bool:
    """Whether torch.compile made kernels of the step."""
    return "fused" in activity.group


def stretches(activity: Activity, idle_s: Floats) -> tuple[TracePlace, ...]:
    """The stretches of a step in which the device waited longest for its host."""
    gaps, late = activity.gaps, idle_s > 0
    start, end, lost = gaps.start_s[late], gaps.end_s[late], idle_s[late]
    if not len(start):
        return ()
    first = np.concatenate([[True], start[1:] - end[:-1] > NEAR_S])
    number = np.cumsum(first) - 1
    starts, ends = start[first], end[np.concatenate([first[1:], [True]])]
    idle = np.bincount(number, weights=lost)
    begins = np.sort(activity.work.start_s)
    found = []
    for i in np.argsort(-idle)[:_PLACES]:
        kernels = int(np.searchsorted(begins, ends[i], "right") - np.searchsorted(begins, starts[i]))
        busy = 1 - idle[i] / (ends[i] - starts[i])
        what = f"{kernels} kernels, the device busy {100 * busy:.0f} % of the time"
        found.append(TracePlace(float(starts[i]), float(ends[i]), what))
    return tuple(found)


def _latency(activity: Activity, idle_s: Floats) -> Iterator[Finding]:
    total = float(idle_s.sum())
    if total <= 0:
        return
    count = int((idle_s > 0).sum())
    yield Finding(
        kind="launch-gaps",
        title=f"{count} gaps between kernels that were already issued",
        saves_s=total,
        basis="all of these gaps; CUDA graphs leave some",
        advice="fewer kernels (torch.compile fuses them), or CUDA graphs",
        evidence=(f"{_ms(total / max(1, count))} each on average",),
    )


def _read_backs(activity: Activity, idle_s: Floats) -> Iterator[Finding]:
    total = float(idle_s.sum())
    if total <= 0:
        return
    window = activity.window
    waits = host_waits(activity)
    inside = waits[(waits > window.start_s) & (waits < window.end_s)]
    callers = Counter(_callers(activity, inside))
    evidence = tuple(f"{count} x in {name}" for name, count in callers.most_common(3))
    where = gaps_of(activity, idle_s, "the host had waited for the device")
    yield Finding(
        kind="read-back",
        title=(
            f"the host waits for the device {len(inside)} times a step, and the device for the host after"
            " that"
        ),
        saves_s=total,
        basis="idle time that follows such a wait",
        advice="keep values on the device: no .item(), print or if on them in each step; copies with"
        " non_blocking=True from pinned memory",
        evidence=evidence,
        places=where,
    )


def _callers(activity: Activity, at_s: Floats) -> list[str]:
    """The operator that was open at each time: the innermost one that began last."""
    ops = activity.trace.ops
    found = []
    for at in at_s.tolist():
        place = int(np.searchsorted(ops.start_s, at)) - 1
        while place >= 0 and ops.end_s[place] < at - 1e-9 and ops.start_s[place] > at - 1e-3:
            place -= 1
        open_ = place >= 0 and ops.end_s[place] >= at - 1e-9
        found.append(activity.trace.names[ops.name[place]] if open_ else "no operator (synchronize)")
    return found


def gaps_of(activity: Activity, idle_s: Floats, what: str) -> tuple[TracePlace, ...]:
    """The longest gaps of one cause."""
    gaps = activity.gaps
    longest = [i for i in np.argsort(-idle_s)[:_PLACES] if idle_s[i] > 0]
    return tuple(TracePlace(float(gaps.start_s[i]), float(gaps.end_s[i]), what) for i in longest)


def _pauses(activity: Activity, idle_s: Floats) -> Iterator[Finding]:
    total = float(idle_s.sum())
    if total > 0:
        yield Finding(
            kind="host-outside",
            title="the host does something other than operators while the device is idle",
            saves_s=total,
            basis="idle time in which no operator ran on the host for over a millisecond",
            advice="look there: logging, checkpoints, tokenising, garbage collection; do it less often, or on"
            " another thread",
            places=gaps_of(activity, idle_s, "no operator on the host"),
        )


def _allocations(activity: Activity) -> Iterator[Finding]:
    """Calls that ask the driver for memory: after the first steps there should be none."""
    trace, window = activity.trace, activity.window
    wanted = [i for i, name in enumerate(trace.names) if name.startswith(_ALLOCATIONS)]
    inside = (trace.launches.start_s >= window.host_start_s) & (trace.launches.end_s <= window.host_end_s)
    calls = trace.launches.pick(np.isin(trace.launches.name, wanted) & inside)
    if not len(calls):
        return
    longest = np.argsort(calls.start_s - calls.end_s)[:_PLACES]
    yield Finding(
        kind="allocations",
        title=f"{len(calls)} calls a step that ask the driver for memory or give it back",
        saves_s=float((calls.end_s - calls.start_s).sum()),
        basis="all of the time of these calls",
        advice="memory is short or fragmented: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or a smaller"
        " micro-batch; a snapshot of the memory names what is in the way (paceline diagnose SNAPSHOT.pickle)",
        places=tuple(
            TracePlace(float(calls.start_s[i]), float(calls.end_s[i]), trace.names[calls.name[i]])
            for i in longest
        ),
    )


def _data(activity: Activity) -> Iterator[Finding]:
    """Waits for the data loader; without a device also the loading itself."""
    loaded = sum(share.seconds for share in activity.shares if share.group == "data")
    total = activity.idle.get("data", 0.0) + loaded
    if total <= 0:
        return
    union = region(activity.trace, *_LOADERS)
    window = activity.window
    inside = np.flatnonzero((union.end_s > window.host_start_s) & (union.start_s < window.host_end_s))
    longest = sorted(inside.tolist(), key=lambda i: union.start_s[i] - union.end_s[i])[:_PLACES]
    yield Finding(
        kind="data",
        title="the step waits for its batch",
        saves_s=total,
        basis="time in the data loader in which nothing else ran",
        advice=(
            "more workers in the DataLoader (num_workers, prefetch_factor, persistent_workers), pinned"
            " memory, or data that is prepared beforehand"
        ),
        evidence=(f"{len(inside)} batches fetched in the step",),
        places=tuple(
            TracePlace(float(union.start_s[i]), float(union.end_s[i]), "data loader") for i in longest
        ),
    )


def _compiling(activity: Activity) -> Iterator[Finding]:
    total = activity.idle.get("compile", 0.0)
    trace = activity.trace
    compiled = sorted({name for name in trace.names if name.startswith(_COMPILED)})
    again = [name for name in compiled if not name.rstrip().endswith("/0")]
    if total <= 0 and not again:
        return
    evidence = [f"{len(again)} regions were compiled again: {', '.join(again[:4])}"] if again else []
    yield Finding(
        kind="recompile",
        title="torch.compile compiles within the step"
        if total > 0
        else "torch.compile compiled regions again",
        saves_s=total,
        basis="idle time in which the compiler ran",
        advice=(
            "TORCH_LOGS=recompiles says why; fixed shapes (padding, drop_last), or mark_dynamic; warm up"
            " before measuring"
        ),
        evidence=tuple(evidence),
    )
