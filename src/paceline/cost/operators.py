"""Device time of operators: every group by its formula, gathered back per operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.cost.attention import attention_time
from paceline.cost.chip import Chip
from paceline.cost.curves import Curves
from paceline.cost.matrix import matrix_time
from paceline.cost.pack import Packed, StreamEntries
from paceline.cost.stream import L2_HIT, L2_SHARE, stream_features, stream_time

Array = NDArray[np.float64]

#: cuDNN runs the layers of a recurrent stack on several streams: elapsed over summed kernel time, from LSTM steps on an H200
RECURRENT_OVERLAP = 0.72


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Per operator: seconds on the device, kernels launched, and the time each resource alone would need.

    `busy` adds kernels up as a profiler does; where some of them overlap, `seconds` is less.
    """

    seconds: Array
    busy: Array
    kernels: Array
    compute_s: Array
    memory_s: Array


def features(entries: StreamEntries, chip: Chip) -> Array:
    """Stream features of a group's entries on a chip, cache hits counted."""
    hit = (entries.access_reuse >= 0) & (entries.access_reuse + entries.access_bytes < L2_SHARE * chip.l2)
    weight = np.where(hit, L2_HIT, 1.0) * entries.access_bytes
    read = np.bincount(entries.access_entry, weights=weight, minlength=len(entries.owner))
    return stream_features(
        chip, launches=entries.launches, moved=read + entries.written, elements=entries.elements, rows=entries.rows, serial=entries.serial,
    )


def times(packed: Packed, chip: Chip, curves: Curves) -> OpTimes:
    """Device time of each packed operator."""
    seconds, kernels = np.zeros(packed.size), np.zeros(packed.size)

    def add(group: str, owner: NDArray[np.int64], count: Array, each: Array, launches: Array | float = 1.0) -> None:
        seconds.__iadd__(np.bincount(owner, weights=count * each * curves.scale_of(group), minlength=packed.size))
        kernels.__iadd__(np.bincount(owner, weights=count * launches * curves.kernels_of(group), minlength=packed.size))

    for group, m in packed.matrix.items():
        curve = curves.matrix_curve(group)
        share = np.array([curve.layouts.get(layout, 1.0) for layout in m.layout])
        if curve.alignment:
            share = share * np.array([curve.alignment.get(str(a), 1.0) for a in m.align])
        peak = chip.peaks[next((part for part in group.split(".") if part in chip.peaks), "fp32")]
        each = matrix_time(
            chip, peak, curve, batch=m.batch, m=m.m, n=m.n, k=m.k, traffic=m.traffic, itemsize=m.itemsize, share=share,
        )
        add(group, m.owner, m.count, each)
    for group, s in packed.stream.items():
        add(group, s.owner, s.count, stream_time(features(s, chip), curves.stream_curve(group)), s.launches)
    for group, a in packed.attention.items():
        peak = chip.peaks["tf32" if "fp32" in group else "bf16"]
        each = attention_time(chip, peak, curves.attention_curve(group), flops=a.flops, scores=a.scores, traffic=a.traffic, blocks=a.blocks)
        add(group, a.owner, a.count, each)
    peaks = np.array([chip.peaks.get(dtype, chip.peaks["fp32"]) for dtype in packed.dtypes])
    elapsed = seconds * np.where(np.array([group == "rnn" for group in packed.groups]), RECURRENT_OVERLAP, 1.0)
    return OpTimes(elapsed, seconds, kernels, packed.flops / peaks, packed.moved / chip.bandwidth)
