"""What the host spends on issuing a step in eager mode, and on one compiled.

    forward    calls * call + modules * module      framework calls and module calls in Python
    backward   operators * backward + parameters * gradient      the autograd engine
    optimizer  parameters * update
    compiled   kernels * compiled, and gradients as above      the generated code that launches them

Constants are of one CPU; other hosts scale all of them (`Device.calibration["host"]`).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from paceline.spec.vocabulary import Phase
from paceline.spec.workload import Workload

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCurve:
    """Seconds per unit of host work."""

    call_s: float
    module_s: float
    backward_s: float
    gradient_s: float
    update_s: float
    #: between kernels that follow each other on the device
    gap_s: float
    #: issuing one kernel of a compiled graph
    compiled_s: float


@cache
def default_host() -> HostCurve:
    """The host of the measured machine."""
    table = tomllib.loads((files("paceline.cost") / "fitted" / "host.toml").read_text())
    return HostCurve(**{key: float(value) for key, value in table["host"].items()})


def issue_times(workload: Workload, host: HostCurve, scale: float = 1.0) -> Array:
    """Host seconds of each operator of the distinct segments: a segment's total is shared evenly among its
    operators.
    """
    trained = max(1, workload.trained)
    counts = np.array([len(segment.ops) for segment in workload.segments])
    backward = np.array([segment.phase == Phase.BACKWARD for segment in workload.segments])
    backward_ops = max(1, int((counts * backward)[list(workload.order)].sum()))
    totals = []
    for segment, count in zip(workload.segments, counts, strict=True):
        if workload.options.get("compiled") and segment.phase != Phase.OPTIMIZER:
            gradients = (
                host.gradient_s * trained * count / backward_ops if segment.phase == Phase.BACKWARD else 0.0
            )
            totals.append(
                gradients
                + host.compiled_s * sum(op.dims[3] if op.kind == "fused" else 1 for op in segment.ops)
            )
        elif segment.phase == Phase.BACKWARD:
            totals.append(count * (host.backward_s + host.gradient_s * trained / backward_ops))
        elif segment.phase == Phase.OPTIMIZER:
            totals.append(trained * host.update_s)
        else:
            totals.append(segment.calls * host.call_s + segment.modules * host.module_s)
    return np.repeat(scale * np.array(totals) / np.maximum(1, counts), counts)
