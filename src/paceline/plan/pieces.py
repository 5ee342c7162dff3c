"""Seconds of a piece of the model (a layer, the embedding or the head, one way), as the event engine would
find them.

Within a piece the device runs one thing after another; only collectives that hide behind some operators run
beside it. So its time is a sum, in which each such region is worked out by itself: the same walk as
`predict.simulated.Simulation.piece`, without a program. A test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.cost.transformer import Collective
from paceline.predict.distributed import Step

#: seconds of a collective: operation, bytes, axis of the mesh
Send = Callable[[str, float, str], float]


def piece_s(step: Step, name: str, send: Send) -> tuple[float, float]:
    """Seconds of the device, and of the host that issues; without recomputation and copies to the host."""
    host_s = float(step.issue(name).sum()) + step.framework.issue_collective_s * len(
        step.pieces[name].piece.collectives
    )
    return _joined(_operators(step, name, send), step.wait(name), host_s, step.framework.blocking)


def recomputed_s(step: Step, send: Send) -> tuple[float, float]:
    """What running a layer's forward pass again adds to its backward pass, by the plan's word for it."""
    name = "layer.forward"
    if step.plan.recompute == "none":
        return 0.0, 0.0
    if step.plan.recompute == "full":
        return piece_s(step, name, send)
    keep = step.again()
    device_s, host_s = (
        float((step.pieces[name].each + step.gaps(name))[keep].sum()),
        float(step.issue(name)[keep].sum()),
    )
    return _joined(device_s, 0.0, host_s, step.framework.blocking)


def _joined(device_s: float, wait_s: float, host_s: float, blocking: bool) -> tuple[float, float]:
    """A host that waits for every kernel before it issues the next is part of the device's time."""
    return (device_s + host_s, 0.0) if blocking else (device_s + wait_s, host_s)


def _operators(step: Step, name: str, send: Send) -> float:
    """Seconds of a piece's operators and collectives on the device."""
    timed = step.pieces[name]
    seconds = timed.each + step.gaps(name)
    beside: dict[tuple[int, ...], list[Collective]] = {}
    total = 0.0
    for collective in timed.piece.collectives:
        if collective.behind:
            beside.setdefault(collective.behind, []).append(collective)
        else:
            total += send(collective.op, collective.size, collective.axis)
    if not beside:
        return total + float(seconds.sum())
    regions = {behind[0]: behind for behind in beside}
    stops = sorted({*regions, len(seconds)})
    at = 0
    while at < len(seconds):
        if at in regions:
            ops = regions[at]
            sent = [(c.axis, send(c.op, c.size, c.axis), c.parts) for c in beside[ops]]
            total += region_s(float(seconds[list(ops)].sum()), sent, step.framework.contention)
            at += len(ops)
        else:
            stop = next(stop for stop in stops if stop > at)
            total += float(seconds[at:stop].sum())
            at = stop
    return total


def region_s(compute_s: float, sent: Sequence[tuple[str, float, int]], contention: float) -> float:
    """Seconds of operators with collectives (axis, seconds, parts) beside them, which slow them down by a
    share while any is under way.

    Those over one axis follow each other; the first of several parts of one cannot hide.
    """
    begin = 0.0
    busy: list[tuple[float, float]] = []
    free: dict[str, float] = {}
    for axis, seconds, parts in sent:
        if not seconds:
            continue
        start = max(begin, free.get(axis, 0.0))
        free[axis] = start + seconds
        busy.append((start, start + seconds))
        if parts > 1:
            begin = start + seconds / parts
    at, left = begin, compute_s
    for start, end in sorted(busy):
        if end <= at:
            continue
        alone = max(0.0, start - at)
        if left <= alone:
            break
        left, at = left - alone, max(at, start)
        if left <= (end - at) * (1 - contention):
            left, at = 0.0, at + left / (1 - contention)
            break
        left, at = left - (end - at) * (1 - contention), end
    return max(at + left, *free.values(), 0.0)
