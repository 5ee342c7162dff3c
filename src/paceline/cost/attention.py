"""Time of fused attention.

    time = launch + flops / (peak * efficiency) + scores * score / (SMs * clock * exponentials)
           + bytes * traffic / bandwidth

The second term is the exponentials and rescaling per score, which the matrix units cannot hide; few
blocks of 128 queries fill the chip only in part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.cost.chip import Chip

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCurve:
    """Fitted constants of one direction and precision."""

    launch_s: float
    efficiency: float
    score: float
    traffic: float


def attention_time(
    chip: Chip,
    peak: float,
    curve: AttentionCurve,
    *,
    flops: Array,
    scores: Array,
    traffic: Array,
    blocks: Array,
) -> Array:
    """Seconds of each call."""
    filled = np.maximum(1.0, np.ceil(blocks / chip.sms) / np.maximum(blocks / chip.sms, 1e-9))
    filled = np.where(blocks > 4 * chip.sms, 1.0, filled)  # many waves: blocks of unequal length even out
    work = flops / (peak * curve.efficiency) + scores * curve.score / (chip.sm_hz * chip.exponentials)
    return np.asarray(curve.launch_s + work * filled + traffic * curve.traffic / chip.bandwidth)
