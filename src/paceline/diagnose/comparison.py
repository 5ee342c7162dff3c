"""A measured step beside its prediction: by operator group, gaps, launches and communication.

The rows of both add up to their steps, so that the differences add up to the difference of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from paceline.diagnose.activity import CAUSES, Activity, host_waits
from paceline.diagnose.findings import title
from paceline.predict.step import Conditions, Timed, as_run, predict
from paceline.readers.kineto import KinetoTrace
from paceline.spec.device import Device
from paceline.spec.prediction import Prediction
from paceline.spec.workload import Workload

#: groups of the trace that a prediction counts among others
_SAME = {"fill": "copy", "cat": "copy", "gather": "scatter", "sync": "transfer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """One group of work, or idle time of one cause: seconds of the step, kernels."""

    name: str
    #: work or idle
    kind: str
    measured_s: float
    predicted_s: float
    measured_kernels: int = 0
    predicted_kernels: int = 0

    @property
    def difference_s(self) -> float:
        """By how much longer it took than predicted."""
        return self.measured_s - self.predicted_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the host does in a step: seconds, calls into the device's runtime that launch something, waits."""

    measured_s: float
    predicted_s: float
    launches: int
    predicted_launches: int
    waits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """A measured step and the prediction of the same; the rows with the largest differences first."""

    model: str
    path: str
    measured_on: str
    predicted_for: str
    measured_s: float
    predicted_s: float
    predicted_low_s: float
    predicted_high_s: float
    measured_kernel_s: float
    predicted_kernel_s: float
    measured_peak_bytes: int
    predicted_peak_bytes: int
    found_by: str
    rows: tuple[ComparedRow, ...]
    host: Host
    #: the share of the measured step in rows whose work or cause is known
    accounted: float
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        rows = [{**asdict(row), "difference_s": row.difference_s} for row in self.rows]
        return {**asdict(self), "rows": rows}

    def __rich__(self) -> Any:
        from paceline.report.diagnosis import comparison_view

        return comparison_view(self)


def compare(
    trace: KinetoTrace,
    workload: Workload,
    device: Device,
    conditions: Conditions = Conditions(),  # noqa: B008
) -> StepComparison:
    """The typical step of a trace beside the prediction of a workload on a device."""
    activity = Activity.of(trace)
    predicted = predict(workload, device, conditions)
    timed = Timed.of(as_run(workload, device), device, conditions)
    rows = [*_work(activity, timed), *_idle(activity, timed, predicted)]
    unknown = sum(row.measured_s for row in rows if row.name == title("other"))
    return StepComparison(
        model=predicted.model,
        path=trace.path,
        measured_on=trace.device,
        predicted_for=device.name,
        measured_s=activity.step_s,
        predicted_s=predicted.step_s,
        predicted_low_s=predicted.step_s_low,
        predicted_high_s=predicted.step_s_high,
        measured_kernel_s=sum(share.busy_s for share in activity.shares),
        predicted_kernel_s=predicted.kernel_s,
        measured_peak_bytes=int(trace.allocated.max(initial=0)),
        predicted_peak_bytes=predicted.peak_bytes,
        found_by=activity.found_by,
        rows=tuple(sorted(rows, key=lambda row: -abs(row.difference_s))),
        host=_host(activity, predicted),
        accounted=1 - unknown / activity.step_s,
        notes=_notes(activity, workload),
    )


def _work(activity: Activity, timed: Timed) -> list[ComparedRow]:
    """Groups of work on both sides."""
    seconds, kernels = _predicted(timed)
    measured_s: dict[str, float] = {}
    measured_kernels: dict[str, int] = {}
    for share in activity.shares:
        group = _SAME.get(share.group, share.group)
        measured_s[group] = measured_s.get(group, 0.0) + share.seconds
        measured_kernels[group] = measured_kernels.get(group, 0) + share.count
    return [
        ComparedRow(
            name=title(group),
            kind="work",
            measured_s=measured_s.get(group, 0.0),
            predicted_s=seconds.get(group, 0.0),
            measured_kernels=measured_kernels.get(group, 0),
            predicted_kernels=round(kernels.get(group, 0.0)),
        )
        for group in dict.fromkeys([*measured_s, *seconds])
    ]


def _predicted(timed: Timed) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Seconds and kernels of each group as predicted."""
    step, packed = timed.step, timed.packed
    out: list[dict[str, float]] = []
    for weights in (step.busy, step.kernels):
        totals: dict[str, float] = {}
        each = np.bincount(step.index, weights=weights, minlength=packed.size)
        for kind, value in packed.kinds.total(each).items():
            group = _SAME.get(kind, kind)
            if value > 0:
                totals[group] = totals.get(group, 0.0) + value
        out.append(totals)
    return out[0], out[1]


def _idle(activity: Activity, timed: Timed, predicted: Prediction) -> list[ComparedRow]:
    """Time without work on both sides: a prediction knows the host that issues, and gaps between kernels."""
    between = float((timed.step.device - timed.step.busy).sum())
    expected = {"latency": between, "launch": predicted.step_s - predicted.kernel_s - between}
    causes = dict.fromkeys([*activity.idle, *expected])
    return [
        ComparedRow(
            name=f"idle: {CAUSES[cause]}",
            kind="idle",
            measured_s=activity.idle.get(cause, 0.0),
            predicted_s=expected.get(cause, 0.0),
        )
        for cause in causes
    ]


def _host(activity: Activity, predicted: Prediction) -> Host:
    window = activity.window
    waits = host_waits(activity)
    inside = (waits > window.host_start_s) & (waits <= window.host_end_s)
    return Host(
        measured_s=window.host_end_s - window.host_start_s,
        predicted_s=predicted.host_s,
        launches=len(activity.work) if activity.on_device else 0,
        predicted_launches=round(predicted.kernels),
        waits=int(inside.sum()),
    )


def _notes(activity: Activity, workload: Workload) -> tuple[str, ...]:
    """What makes the two differ that is no error of either."""
    out = []
    if activity.trace.recorded and activity.on_device:
        what = ", ".join(activity.trace.recorded)
        out.append(
            f"the profiler recorded {what}: the host was slower than in a run without it, so idle time is"
            " longer; kernels are not"
        )
    compiled = any(share.group == "fused" for share in activity.shares)
    if compiled != bool(workload.options.get("compiled")):
        said = "compiled" if compiled else "eager"
        out.append(f"the measured step is {said}, the prediction is not: say --compile for one that is")
    if any(share.group == "communication" for share in activity.shares):
        out.append("the prediction is of one device: it has no communication")
    return tuple(out)
