"""What the host spends on issuing a step in eager mode, and on one compiled.

    forward    calls * call + modules * module      framework calls and module calls in Python
    backward   operators * backward + parameters * gradient      the autograd engine
    optimizer  parameters * update

Constants are of one CPU; other hosts scale all of them (`Device.calibration["host"]`).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

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


def issue_times(workload: Workload, host: HostCurve, scale: float = 1.0) -> list[Array]:
    """Host seconds of each operator, per distinct segment: a segment's total shared evenly among its operators."""
    trained = max(1, sum(p.ready >= 0 for p in workload.parameters))
    backward_ops = max(1, sum(len(workload.segments[i].ops) for i in workload.order if workload.segments[i].phase == "backward"))
    out = []
    for segment in workload.segments:
        count = len(segment.ops)
        if segment.phase == "backward":
            total = count * (host.backward_s + host.gradient_s * trained / backward_ops)
        elif segment.phase == "optimizer":
            total = trained * host.update_s
        else:
            total = segment.calls * host.call_s + segment.modules * host.module_s
        out.append(np.full(count, scale * total / max(1, count)))
    return out
