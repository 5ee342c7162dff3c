"""Host and device as two streams: the host issues operators, the device runs them in order.

An operator starts when the host has issued it and the device has finished the one before:

    end[i] = max(end[i-1], issued[i]) + duration[i]

which unrolls to a running maximum, so that a step of 10^5 operators takes microseconds. The host
runs ahead across steps until it reads a value back.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def run(
    issue: Array, duration: Array, syncs: NDArray[np.int64], host_at: float, device_at: float
) -> tuple[Array, float, float]:
    """End of each operator, and when host and device are done; `syncs` index the operators the host waits
    for.

    `issue` is the host's time per operator, `duration` the device's; both start from the given times.
    """
    ends = np.empty_like(duration)
    begin = 0
    for stop in [*(syncs + 1), len(duration)]:
        if stop > begin:
            part = slice(begin, stop)
            issued = host_at + np.cumsum(issue[part])
            work = np.cumsum(duration[part])
            before = work - duration[part]
            ends[part] = work + np.maximum(np.maximum.accumulate(issued - before), device_at)
            host_at, device_at = float(issued[-1]), float(ends[stop - 1])
            begin = stop
        if stop < len(duration):
            host_at = max(host_at, device_at)
    return ends, host_at, device_at


def steady_step(issue: Array, duration: Array, syncs: NDArray[np.int64]) -> tuple[float, Array, Array]:
    """Seconds per step once steps follow one another, and start and end of each operator in one of them."""
    _, host, device = run(issue, duration, syncs, 0.0, 0.0)
    ends, host2, device2 = run(issue, duration, syncs, host, device)
    return (
        pace((host, device), (host2, device2), len(syncs) > 0),
        ends - duration - min(host, device),
        ends - min(host, device),
    )


def pace(before: tuple[float, float], after: tuple[float, float], reads_back: bool) -> float:
    """Seconds between the ends of two steps, of which the times of host and device are given.

    With no read-back the host may run ahead: the slower stream sets the pace.
    """
    return float(
        max(after) - max(before) if reads_back else max(b - a for a, b in zip(before, after, strict=True))
    )
