"""A third stream beside host and device: transfers, which run in order while operators go on.

A transfer is released when an operator has ended and starts when the one before it is done; another operator
may have to wait for it. While transfers run, operators take longer by a share (they compete for bandwidth and
multiprocessors). Between two points at which something is released or awaited the transfer stream is busy
without a gap until a known time, so that each such stretch is a running maximum again (`sim.streams`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.sim.streams import pace, run

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Transfer:
    """`seconds` on the transfer stream: from before operator `release` on, and done before operator `needed`
    starts.
    """

    name: str
    seconds: float
    release: int
    needed: int
    #: the collectives that it is made of: operation, bytes, axis of the mesh
    exchanges: tuple[tuple[str, float, str], ...] = ()

    @property
    def op(self) -> str:
        """The first of its collectives."""
        return self.exchanges[0][0] if self.exchanges else ""


@dataclass(slots=True)
class Streams:
    """Where the three streams stand, and what the device waited for so far."""

    host_at: float = 0.0
    device_at: float = 0.0
    transfer_at: float = 0.0
    #: seconds that operators waited for transfers, by their name
    waits: dict[str, float] = field(default_factory=dict)
    #: seconds by which transfers beside them made operators longer
    slowed_s: float = 0.0
    #: each transfer with its start and end
    sent: list[tuple[Transfer, float, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlapped:
    """A step in steady state: seconds per step, start and end of each operator, and what was waited for."""

    period_s: float
    starts: Array
    ends: Array
    waits: dict[str, float]
    slowed_s: float
    #: each transfer with its start and end
    sent: list[tuple[Transfer, float, float]]


def steady(
    issue: Array,
    duration: Array,
    syncs: NDArray[np.int64],
    transfers: Sequence[Transfer] = (),
    contention: float = 0.0,
) -> Overlapped:
    """The step once steps follow one another; without transfers the same as `sim.streams.steady_step`."""
    first = Streams()
    play(first, issue, duration, syncs, transfers, contention)
    second = Streams(first.host_at, first.device_at, first.transfer_at)
    starts, ends = play(second, issue, duration, syncs, transfers, contention)
    period = pace((first.host_at, first.device_at), (second.host_at, second.device_at), len(syncs) > 0)
    origin = min(first.host_at, first.device_at)
    sent = [(transfer, start - origin, end - origin) for transfer, start, end in second.sent]
    return Overlapped(
        period_s=period,
        starts=starts - origin,
        ends=ends - origin,
        waits=second.waits,
        slowed_s=second.slowed_s,
        sent=sent,
    )


def play(
    at: Streams,
    issue: Array,
    duration: Array,
    syncs: NDArray[np.int64],
    transfers: Sequence[Transfer],
    contention: float,
) -> tuple[Array, Array]:
    """Run one step from where the streams stand; start and end of each operator."""
    size = len(duration)
    starts, ends = np.empty(size), np.empty(size)
    queue = sorted(transfers, key=lambda transfer: transfer.release)
    finished: dict[int, tuple[float, str]] = {}  # operator -> end of the last transfer it waits for
    places = sorted({0, size, *(t.release for t in queue), *(t.needed for t in queue)})
    sent = 0
    for place, stop in zip(places, [*places[1:], size], strict=True):
        while sent < len(queue) and queue[sent].release <= place:
            transfer = queue[sent]
            begin = max(at.transfer_at, at.device_at)
            at.transfer_at = begin + transfer.seconds
            at.sent.append((transfer, begin, at.transfer_at))
            finished[transfer.needed] = (at.transfer_at, transfer.name)
            sent += 1
        if place in finished:
            until, name = finished[place]
            if until > at.device_at:
                at.waits[name] = at.waits.get(name, 0.0) + until - at.device_at
                at.device_at = until
        if stop > place:
            inside = syncs[(syncs >= place) & (syncs < stop)] - place
            part = slice(place, stop)
            starts[part], ends[part] = _stretch(at, issue[part], duration[part], inside, contention)
            if len(inside) and inside[-1] == stop - place - 1 and stop < size:
                at.host_at = max(at.host_at, at.device_at)
    return starts, ends


def _stretch(
    at: Streams, issue: Array, duration: Array, syncs: NDArray[np.int64], contention: float
) -> tuple[Array, Array]:
    """Operators beside a transfer stream that is busy until `at.transfer_at`, then free."""
    host_at, device_at = at.host_at, at.device_at
    if contention > 0 and at.transfer_at > device_at:
        slow = duration * (1 + contention)
        ends, _, _ = run(issue, slow, syncs, host_at, device_at)
        within = int(np.searchsorted(ends, at.transfer_at))  # operators that end before the stream is free
        if within < len(duration):
            beside = max(0.0, at.transfer_at - (ends[within] - slow[within]))
            slow[within] = duration[within] + min(
                beside * contention / (1 + contention), duration[within] * contention
            )
            slow[within + 1 :] = duration[within + 1 :]
        at.slowed_s += float((slow - duration).sum())
        duration = slow
    ends, at.host_at, at.device_at = run(issue, duration, syncs, host_at, device_at)
    return ends - duration, ends
