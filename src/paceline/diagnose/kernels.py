"""Findings about the work itself: casts, operators that could be fused, the optimizer, copies from"
" the host."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from paceline.diagnose.activity import Activity
from paceline.diagnose.findings import Finding, TracePlace
from paceline.readers.kineto import Ints
from paceline.units import show

#: groups that a compiler fuses with their neighbours
FUSIBLE = ("elementwise", "cast", "copy", "fill", "cat", "norm", "softmax", "reduce")
_FUSED = re.compile(r"_fused_|FusedAdam|multi_tensor_adam|triton_")
_SHOWN = 3


def findings(activity: Activity) -> Iterator[Finding]:
    """All of them."""
    yield from _casts(activity)
    yield from _optimizer(activity)
    if activity.on_device:
        yield from _unfused(activity)
        yield from _copies(activity)


def _casts(activity: Activity) -> Iterator[Finding]:
    which = activity.select(lambda group: group == "cast")
    total = float(activity.exclusive_s[which].sum())
    if total <= 0:
        return
    shapes = Counter(_input(activity, place) for place in which.tolist())
    repeated = [(shape, count) for shape, count in shapes.most_common(_SHOWN) if shape]
    yield Finding(
        kind="casts",
        title=f"{len(which)} changes of type ({100 * total / activity.step_s:.0f} % of the step)",
        saves_s=total,
        basis="all of the time of these copies",
        advice=(
            "parameters in bf16 with float32 masters in the optimizer (pure bf16, FSDP mixed precision) in"
            " place of autocast; torch.compile fuses the casts of activations"
        ),
        evidence=tuple(f"{shape}: {count} times" for shape, count in repeated),
    )


def _input(activity: Activity, place: int) -> str:
    """Sizes and types of a copy, as text."""
    op = int(activity.operator[place])
    detail = int(activity.trace.ops.detail[op]) if op >= 0 else -1
    if detail < 0:
        return ""
    found = activity.trace.inputs[detail]
    sizes = " x ".join(map(str, found.dims[0])) or "a scalar"
    return f"{sizes}, {found.types[1]} to {found.types[0]}".replace("c10::", "")


def _optimizer(activity: Activity) -> Iterator[Finding]:
    """An optimizer that is not one of the fused ones: at best it takes as long as its longest pass"
    " over memory."""
    which = activity.select(lambda group: group == "optimizer")
    if not len(which):
        return
    work, trace = activity.work, activity.trace
    ops = activity.operator[which]
    callers = [trace.names[trace.ops.name[op]] if op >= 0 else "" for op in ops.tolist()]
    names = [
        f"{trace.names[work.name[i]]} {caller}" for i, caller in zip(which.tolist(), callers, strict=True)
    ]
    seconds = activity.exclusive_s[which]
    fused = np.array([bool(_FUSED.search(name)) for name in names])
    if seconds[fused].sum() > 0.5 * seconds.sum():
        return
    begin, end = float(work.start_s[which].min()), float(work.end_s[which].max())
    passes = Counter(callers)
    name, count = passes.most_common(1)[0]
    longest = max(float(seconds[[caller == other for caller in callers]].sum()) for other in passes)
    lasts = min(end - begin, activity.step_s)
    yield Finding(
        kind="unfused-optimizer",
        title=f"the optimizer runs {len(which)} separate operators",
        saves_s=max(0.0, lasts - longest),
        basis="from its first operator to its last, less the longest of its passes over the parameters",
        advice="fused=True (AdamW, Adam, SGD), or at least foreach=True",
        evidence=(
            f"{show(lasts, 'time')} from the first to the last",
            f"{count} times {name or 'one kernel'}",
        ),
        places=(TracePlace(begin, end, "optimizer"),),
    )


def _unfused(activity: Activity) -> Iterator[Finding]:
    """Runs of kernels that a compiler would make one of: that one takes at least as long as the"
    " longest part."""
    runs = _runs(activity)
    seconds = activity.exclusive_s
    saved = [float(seconds[run].sum() - seconds[run].max()) for run in runs]
    total = sum(saved)
    if total <= 0:
        return
    order = np.argsort(saved)[::-1][:_SHOWN]
    work = activity.work
    places = tuple(
        TracePlace(float(work.start_s[runs[i][0]]), float(work.end_s[runs[i][-1]]), f"{len(runs[i])} kernels")
        for i in order
    )
    yield Finding(
        kind="unfused",
        title=(
            f"{sum(len(run) for run in runs)} pointwise, normalising and reducing kernels in {len(runs)}"
            " runs that could be fused"
        ),
        saves_s=total,
        basis="of each run, all but its longest kernel",
        advice="torch.compile, or fused modules (norms, rotary embeddings, SwiGLU, cross-entropy)",
        places=places,
    )


def _runs(activity: Activity) -> list[Ints]:
    """Consecutive kernels on one stream that a compiler may fuse, two or more."""
    fusible = np.array([group in FUSIBLE for group in activity.group])
    out = []
    for thread in np.unique(activity.work.thread):
        places = np.flatnonzero(activity.work.thread == thread)
        flags = fusible[places].astype(int)
        edges = np.diff(np.concatenate([[0], flags, [0]]))
        begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        out += [places[a:b] for a, b in zip(begins, ends, strict=True) if b - a > 1]
    return out


def _copies(activity: Activity) -> Iterator[Finding]:
    which = activity.select(lambda group: group == "transfer")
    total = float(activity.exclusive_s[which].sum())
    if total <= 0:
        return
    names = Counter(activity.trace.names[activity.work.name[i]] for i in which.tolist())
    yield Finding(
        kind="host-copies",
        title=f"{len(which)} copies between host and device with nothing beside them",
        saves_s=total,
        basis="time in which only such a copy ran",
        advice="pinned memory with non_blocking=True, on a stream of its own",
        evidence=tuple(f"{count} x {name}" for name, count in names.most_common(_SHOWN)),
    )
