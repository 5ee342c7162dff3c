"""Device time of operators: every group by its formula, gathered back per operator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.cost.attention import attention_time
from paceline.cost.chip import Chip
from paceline.cost.curves import Curves
from paceline.cost.matrix import matrix_time, stacked
from paceline.cost.pack import MOST_ALIGNED, Labels, PackedOps, StreamEntries
from paceline.cost.power import ProductMix, relative, rule, slowdown
from paceline.cost.stream import L2_HIT, L2_SHARE, constants, stream_features
from paceline.spec.device import Device

Array = NDArray[np.float64]

#: cuDNN runs the layers of a recurrent stack on several streams: elapsed over summed kernel time, from LSTM
#: steps on an H200
RECURRENT_OVERLAP = 0.72


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Per operator: seconds on the device, kernels launched, and the time each resource alone would need;
    `latency_s` is what remains however small the tensors: launches and chains that one block walks.

    `busy` adds kernels up as a profiler does; where some of them overlap, `seconds` is less.
    """

    seconds: Array
    busy: Array
    kernels: Array
    compute_s: Array
    memory_s: Array
    latency_s: Array


def features(entries: StreamEntries, chip: Chip) -> Array:
    """Stream features of a group's entries on a chip, cache hits counted."""
    hit = (entries.access_reuse >= 0) & (entries.access_reuse + entries.access_bytes < L2_SHARE * chip.l2)
    weight = np.where(hit, L2_HIT, 1.0) * entries.access_bytes
    read = np.bincount(entries.access_entry, weights=weight, minlength=len(entries.owner))
    return stream_features(
        chip,
        launches=entries.launches,
        moved=read + entries.written,
        elements=entries.elements,
        rows=entries.rows,
        serial=entries.serial,
    )


def dtype_of(group: str, chip: Chip) -> str:
    """The type whose peak bounds a matrix group."""
    return next((part for part in group.split(".") if part in chip.peaks), "fp32")


def times(packed: PackedOps, chip: Chip, curves: Curves) -> OpTimes:
    """Device time of each packed operator."""
    seconds, kernels, latency = np.zeros((3, packed.size))

    def add(
        groups: Labels,
        owner: NDArray[np.int64],
        count: Array,
        each: Array,
        fixed: Array | float,
        launches: Array | float = 1.0,
    ) -> None:
        scaled = count * groups.map(curves.scale_of)
        np.add(seconds, np.bincount(owner, weights=scaled * each, minlength=packed.size), out=seconds)
        np.add(latency, np.bincount(owner, weights=scaled * fixed, minlength=packed.size), out=latency)
        np.add(
            kernels,
            np.bincount(
                owner, weights=count * launches * groups.map(curves.kernels_of), minlength=packed.size
            ),
            out=kernels,
        )

    if packed.matrix:
        groups, m = packed.products
        found = [curves.matrix_curve(group) for group in groups.names]
        layouts = np.array([[curve.layouts.get(layout, 1.0) for layout in m.layout.names] for curve in found])
        aligned = np.array(
            [[curve.alignment.get(str(a), 1.0) for a in range(MOST_ALIGNED + 1)] for curve in found]
        )
        curve = stacked(found, groups.codes)
        each = matrix_time(
            chip,
            groups.map(lambda group: chip.peaks[dtype_of(group, chip)]),
            curve,
            batch=m.batch,
            m=m.m,
            n=m.n,
            k=m.k,
            traffic=m.traffic,
            itemsize=m.itemsize,
            share=layouts[groups.codes, m.layout.codes] * aligned[groups.codes, m.align],
        )
        add(groups, m.owner, m.count, each, curve.launch_s)
    if packed.stream:
        groups, s = packed.flows
        table = features(s, chip)
        weights = np.array([constants(curves.stream_curve(group)) for group in groups.names])[groups.codes]
        costs = table * weights
        add(groups, s.owner, s.count, costs.sum(axis=1), costs[:, 0] + costs[:, 4], s.launches)
    for group, a in packed.attention.items():
        peak = chip.peaks["tf32" if "fp32" in group else "bf16"]
        fused = curves.attention_curve(group)
        each = attention_time(
            chip, peak, fused, flops=a.flops, scores=a.scores, traffic=a.traffic, blocks=a.blocks
        )
        add(Labels((group,), np.zeros(len(each), dtype=int)), a.owner, a.count, each, fused.launch_s)
    peaks = packed.dtypes.map(lambda dtype: chip.peaks.get(dtype, chip.peaks["fp32"]))
    elapsed = seconds * packed.groups.map(lambda group: RECURRENT_OVERLAP if group == "rnn" else 1.0)
    return OpTimes(elapsed, seconds, kernels, packed.flops / peaks, packed.moved / chip.bandwidth, latency)


def in_matrix_units(packed: PackedOps, device: Device) -> NDArray[np.bool_]:
    """The products that run in the matrix units, whose clock the board's power limits."""
    units = relative(device)
    return np.asarray((packed.flops > 0) & (packed.dtypes.map(lambda dtype: float(dtype in units)) > 0))


def power_sigma(seconds: NDArray[Any], packed: PackedOps, device: Device) -> float:
    """Standard deviation of the logarithm of device time that the power limit adds, for seconds spent by
    operator: what is not known of the limit concerns products in matrix units, by their share of the time."""
    found, total = rule(device), float(seconds.sum())
    if found is None or not total:
        return 0.0
    return found.sigma * float(seconds[in_matrix_units(packed, device)].sum()) / total


def sustained(costs: OpTimes, packed: PackedOps, device: Device) -> OpTimes:
    """The same operators at the clock that a long run sustains.

    Every packed operator counts once, however often its block is repeated: the constants of the rule were
    fitted so.
    """
    products = in_matrix_units(packed, device)
    count = float(products.sum())
    if not count:
        return costs
    units = packed.dtypes.map(lambda dtype: relative(device).get(dtype, 0.0))
    moved, seconds = packed.moved, costs.seconds
    mix = ProductMix(
        flops=float((packed.flops * units).sum()) / count,
        moved=float(moved[products].sum()) / count,
        seconds=float(seconds[products].sum()) / count,
        other_moved=float(moved[~products].sum()) / count,
        other_s=float(seconds[~products].sum()) / count,
    )
    slow = np.where(products, slowdown(device, mix), 1.0)
    return replace(costs, seconds=costs.seconds * slow, busy=costs.busy * slow)
