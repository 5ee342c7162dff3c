"""Time of operators bound by memory or by simple arithmetic per element.

    time = launches * launch
         + bytes * traffic / bandwidth            traffic >= 1: passes over the data, over what DRAM reaches
         + elements * element / (SMs * clock)     cycles of one multiprocessor per element
         + rows * row / (SMs * clock)             and per row, window tap or other inner unit
         + serial * step / clock                  and per step of a chain that only one block walks

Bytes of inputs used so recently that they are still in the cache count by `L2_HIT`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.cost.chip import Chip

Array = NDArray[np.float64]

#: share of the cache that recent data can count on, and what a hit costs relative to DRAM;
#: both fitted once to the pointwise operators of whole training steps on an H200 (60 MB of cache)
L2_SHARE = 0.5
L2_HIT = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCurve:
    """Fitted constants of one class of operator on one architecture."""

    launch_s: float
    traffic: float
    element: float = 0.0
    row: float = 0.0
    step: float = 0.0


def stream_features(
    chip: Chip, *, launches: Array, moved: Array, elements: Array, rows: Array, serial: Array
) -> Array:
    """The formula's terms with all constants one: what the fit regresses on and `constants` weigh."""
    return np.stack(
        [launches, moved / chip.bandwidth, elements / chip.sm_hz, rows / chip.sm_hz, serial / chip.clock],
        axis=1,
    )


def constants(curve: StreamCurve) -> tuple[float, float, float, float, float]:
    """The weights of the terms, in their order."""
    return curve.launch_s, curve.traffic, curve.element, curve.row, curve.step
