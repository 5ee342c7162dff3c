"""Failures, checkpoints and restarts: how much of a long job's time is progress.

A job of n devices, each of which fails once in `mtbf_s` on average, is interrupted every M = mtbf_s / n. It
writes a checkpoint of delta seconds every tau; a failure costs what was done since the last one, and a
restart of r seconds. With exponential failures, the time for tau seconds of progress is (Daly 2006)

    T = M e^(r/M) (e^((tau + delta)/M) - 1),    goodput = tau / T,    best tau about sqrt(2 delta M) - delta

>>> round(goodput(3600.0, write_s=60.0, restart_s=600.0, interrupted_s=86400.0), 3)
0.956
"""

from __future__ import annotations

import math

#: device seconds between interruptions: 419 unexpected ones in 54 days of 16,384 H100 (Dubey et al., The
#: Llama 3 Herd of Models, 2024)
DEVICE_MTBF_S = 54 * 86400.0 * 16384 / 419
#: seconds from an interruption until steps go on: detection, a spare node, loading, warm-up; guessed
RESTART_S = 600.0
#: B/s at which one node writes to shared storage; guessed
STORAGE_BPS = 2e9
#: bytes of a checkpoint per parameter: weights in 2 bytes, and fp32 copy and two moments of Adam
CHECKPOINT_BYTES = 14.0


def interrupted_s(devices: int, mtbf_s: float = DEVICE_MTBF_S) -> float:
    """Seconds between interruptions of a job of so many devices."""
    return mtbf_s / devices


def best_interval_s(write_s: float, between_s: float) -> float:
    """Seconds of progress between checkpoints that lose least (Daly's first-order optimum); at least one
    write apart.
    """
    return max(write_s, math.sqrt(2 * write_s * between_s) - write_s) if write_s else between_s / 100


def goodput(interval_s: float, *, write_s: float, restart_s: float, interrupted_s: float) -> float:
    """The share of time that is progress, with a checkpoint after every `interval_s` of it."""
    exponent = (interval_s + write_s) / interrupted_s
    if exponent > 50 or restart_s / interrupted_s > 50:  # no checkpoint is ever reached
        return 0.0
    return interval_s / (interrupted_s * math.exp(restart_s / interrupted_s) * math.expm1(exponent))
