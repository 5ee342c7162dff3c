"""The operators of a captured step, written out and timed: one entry for each that runs, on the device and
on the host that issues it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.cost.host import HostCurve, issue_times
from paceline.cost.operators import OpTimes
from paceline.cost.pack import PackedOps
from paceline.spec.prediction import Part
from paceline.spec.workload import Workload

Array = NDArray[np.float64]

#: kinds as people know them
TITLES = {
    "gemm": "matrix products",
    "conv": "convolutions",
    "attention": "fused attention",
    "elementwise": "pointwise",
    "cast": "precision casts",
    "copy": "copies and transposes",
    "cat": "concatenation",
    "fill": "fills",
    "norm": "layer and RMS norms",
    "batchnorm": "batch norms",
    "softmax": "softmax and loss",
    "reduce": "reductions",
    "pool": "pooling and resizing",
    "gather": "look-ups",
    "scatter": "scatters",
    "optimizer": "optimizer",
    "rnn": "recurrent layers",
    "sort": "sorting",
    "scan": "scans",
    "sync": "read-backs",
    "fused": "fused pointwise and reductions",
}


#: what may bound an operator
BOUNDS = ("latency", "compute", "memory")


def bounds_of(costs: OpTimes) -> NDArray[np.str_]:
    """What bounds each operator."""
    late = costs.latency_s > 0.5 * costs.busy
    return np.where(late, "latency", np.where(costs.compute_s > costs.memory_s, "compute", "memory"))


@dataclass(slots=True)
class Expanded:
    """The step with repeated segments written out: one entry per operator that runs."""

    index: NDArray[np.int64]
    issue: Array
    busy: Array
    device: Array
    kernels: Array
    syncs: NDArray[np.int64]
    segment: NDArray[np.int64]

    @staticmethod
    def of(
        workload: Workload, packed: PackedOps, costs: OpTimes, host: HostCurve, host_scale: float
    ) -> Expanded:
        sizes = np.array([len(segment.ops) for segment in workload.segments])
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        order = np.array(workload.order)
        index = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in order])
        issue = issue_times(workload, host, host_scale)
        kernels = costs.kernels[index]
        sync = packed.groups.map(lambda group: float(group == "sync"))
        return Expanded(
            index,
            issue[index],
            costs.busy[index],
            costs.seconds[index] + kernels * host.gap_s,
            kernels,
            np.flatnonzero(sync[index]),
            np.repeat(order, sizes[order]),
        )

    @property
    def device_s(self) -> float:
        """Seconds in which the device is busy."""
        return float(self.busy.sum())

    @property
    def host_s(self) -> float:
        """Seconds of the host to issue all of it."""
        return float(self.issue.sum())

    def by_group(self, packed: PackedOps) -> dict[str, float]:
        """Device seconds by group of operators, several precisions and directions of one kind apart."""
        return packed.groups.total(self.spent(packed))

    def spent(self, packed: PackedOps) -> Array:
        """Device seconds of each packed operator."""
        return np.bincount(self.index, weights=self.busy, minlength=packed.size).astype(float)

    def phases(self, workload: Workload) -> dict[str, float]:
        """Device seconds by phase."""
        out: dict[str, float] = defaultdict(float)
        per_segment = np.bincount(self.segment, weights=self.busy, minlength=len(workload.segments))
        for segment, seconds in zip(workload.segments, per_segment, strict=True):
            out[segment.phase] += float(seconds)
        return dict(out)

    def breakdown(self, packed: PackedOps, costs: OpTimes) -> tuple[Part, ...]:
        """Device time by kind of operator, and what bounds most of each."""
        runs, total = np.bincount(self.index, minlength=packed.size), packed.kinds.total
        spent, counts, flops = runs * costs.busy, total(runs), total(runs * packed.flops)
        bounds = bounds_of(costs)
        by_bound = {bound: total(spent * (bounds == bound)) for bound in BOUNDS}
        parts = (
            Part(
                name=TITLES.get(kind, kind),
                seconds=seconds,
                share=seconds / spent.sum(),
                count=int(counts[kind]),
                flops=flops[kind],
                bound_by=max(BOUNDS, key=lambda bound: by_bound[bound][kind]),
            )
            for kind, seconds in total(spent).items()
        )
        return tuple(sorted((part for part in parts if part.seconds), key=lambda part: -part.seconds))
