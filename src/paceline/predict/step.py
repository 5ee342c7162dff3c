"""Predict one training step of a workload on a device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from paceline.capture.fuse import fuse
from paceline.catalog import frameworks
from paceline.cost import memory as memory_model
from paceline.cost import money
from paceline.cost.chip import Chip, chip
from paceline.cost.curves import Curves, curves_for
from paceline.cost.expanded import Expanded
from paceline.cost.host import default_host
from paceline.cost.operators import OpTimes, power_sigma, sustained, times
from paceline.cost.pack import PackedOps, pack
from paceline.predict.answer import leading
from paceline.predict.evidence import device_evidence
from paceline.predict.interval import SPREADS, Errors, around, bounded, module_errors
from paceline.sim.cuts import written_out
from paceline.sim.streams import steady_step
from paceline.sim.timeline import Span, Timeline
from paceline.spec import synchronisation as synchronisations
from paceline.spec.device import Device
from paceline.spec.framework import Framework
from paceline.spec.prediction import Evidence, Prediction
from paceline.spec.synchronisation import Synchronisation
from paceline.spec.workload import Op, Workload

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What surrounds the step besides model and device: the framework, how fast its host is, and which curves
    apply; what is left out is the usual.
    """

    framework: Framework | None = None
    host_speed: float = 1.0
    curves: Curves | None = None
    #: in place of the framework's way to bring gradients together
    exchange: Synchronisation | None = None

    @property
    def modules(self) -> Framework:
        """The framework that runs a captured module."""
        return self.framework or frameworks.get(frameworks.USUAL)

    @property
    def synchronisation(self) -> Synchronisation:
        """How gradients of a captured module are brought together."""
        return self.exchange or synchronisations.get(self.modules.sync)


def predict(
    workload: Workload,
    device: Device,
    conditions: Conditions = Conditions(),  # noqa: B008
    trace: bool = False,
) -> Prediction:
    """Step time with interval, memory, breakdown and provenance."""
    workload = as_run(workload, device)
    timed = Timed.of(workload, device, conditions)
    step, found = timed.step, bounded(memory_model.memory(workload, device), SPREADS["memory"]["captured"])
    step_s, starts, ends = steady_step(step.issue, step.device, step.syncs)
    if device.kind == "cpu":  # the cores that issue are those that compute
        step_s = step.host_s + float(step.device.sum())
    if found.peak_bytes > conditions.modules.reallocation_above * device.memory_bytes:
        step_s += conditions.modules.reallocation_s * found.peak_bytes
    kernel_low, kernel_high = around(step.device_s, timed.sigma)
    low, high = around(step_s, timed.step_sigma(step_s))
    breakdown = step.breakdown(timed.packed, timed.costs)
    hosted = step.host_s > 1.02 * float(step.device.sum())
    return Prediction(
        model=workload.name,
        device=device.name,
        batch=workload.batch,
        seq=workload.seq,
        precision=workload.precision,
        optimizer=workload.optimizer,
        unit=workload.unit,
        step_s=step_s,
        step_s_low=low,
        step_s_high=high,
        kernel_s=step.device_s,
        kernel_s_low=kernel_low,
        kernel_s_high=kernel_high,
        host_s=step.host_s,
        throughput=workload.units_per_step / step_s,
        mfu=workload.flops / step_s / timed.peak_flops,
        flops=workload.flops,
        parameters=workload.parameter_count,
        kernels=float(step.kernels.sum()),
        bound_by="host" if hosted else leading((part.bound_by, part.seconds) for part in breakdown),
        breakdown=breakdown,
        phases=step.phases(workload),
        memory=found,
        fit=memory_model.fit(workload, found),
        provenance=tuple(timed.provenance()),
        energy_j=money.energy_j(device, step_s),
        price=money.basis(device),
        cost_per_unit=money.per_unit(device, step_s, workload.units_per_step),
        timeline=_timeline(timed, starts, ends) if trace else None,
    )


_FUSED: WeakKeyDictionary[Workload, Workload] = WeakKeyDictionary()


def compiled(device: Device) -> bool:
    """Whether whole steps are compiled and issued at once: XLA's way, which alone drives TPUs."""
    return device.kind == "tpu"


def as_run(workload: Workload, device: Device) -> Workload:
    """The workload as it runs on a device: pointwise work of whole steps that are compiled is fused."""
    if not compiled(device) or workload.options.get("compiled"):
        return workload
    if workload not in _FUSED:
        _FUSED[workload] = fuse(workload)
    return _FUSED[workload]


@dataclass(frozen=True, slots=True)
class Timed:
    """A workload's operators timed on a device, the step they make up, and how sure that is."""

    workload: Workload
    device: Device
    chip: Chip
    curves: Curves
    packed: PackedOps
    costs: OpTimes
    step: Expanded
    errors: Errors

    @staticmethod
    def of(workload: Workload, device: Device, conditions: Conditions) -> Timed:
        target, curves = chip(device), conditions.curves or curves_for(device)
        packed = pack(workload)
        costs = sustained(times(packed, target, curves), packed, device)
        framework = conditions.modules
        # a step that XLA compiled is issued in one call, while the one before it runs
        scale = framework.host_scale / conditions.host_speed * device.calibration.get("host", 1.0)
        step = Expanded.of(workload, packed, costs, default_host(), 0.0 if compiled(device) else scale)
        return Timed(
            workload, device, target, curves, packed, costs, step, module_errors(device, curves, framework)
        )

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm of device time."""
        limit = power_sigma(self.step.spent(self.packed), self.packed, self.device)
        return self.errors.sigma(self.step.by_group(self.packed), limit)

    def step_sigma(self, step_s: float) -> float:
        """The same of a step of so many seconds, which the host's error concerns as far as the host sets its
        pace.
        """
        device_s, host_s, hosted = self.step.device_s, self.step.host_s, 0.0
        if host_s > 0.5 * device_s:
            hosted = min(1.0, max(0.0, (host_s - device_s) / max(step_s, 1e-12) * 2 + 0.5))
        return math.hypot((1 - hosted) * self.sigma, hosted * SPREADS["operators"]["host"].sigma)

    @property
    def matrix_dtypes(self) -> set[str]:
        """Types in which something is computed that counts as FLOPs."""
        return {dtype for dtype, flops in self.packed.dtypes.total(self.packed.flops).items() if flops > 0}

    @property
    def peak_flops(self) -> float:
        """FLOP/s at the peak of the fastest of them."""
        peaks = self.chip.peaks
        return max((peaks.get(dtype, peaks["fp32"]) for dtype in self.matrix_dtypes), default=peaks["fp32"])

    def provenance(self) -> Iterator[Evidence]:
        """What the times rest on."""
        yield from device_evidence(self.device, self.chip, sorted(self.matrix_dtypes), self.curves)
        for name in self.curves.inherited:
            what = f"curves not fitted for {self.curves.name} come from {name}"
            yield Evidence(what=what, kind="derived", source="scaled by the datasheet")
        for what, kind, source in self._remarks():
            yield Evidence(what=what, kind=kind, source=source)
        yield from self.errors.evidence()

    def _remarks(self) -> Iterator[tuple[str, str, str]]:
        """Of the workload: what, its kind, its source."""
        workload, spent = self.workload, self.step.by_group(self.packed)
        total, most = sum(spent.values()) or 1.0, sorted(spent, key=lambda group: -spent[group])[:4]
        leading = ", ".join(f"{group} {100 * spent[group] / total:.0f} %" for group in most)
        yield f"time is mostly: {leading}", "derived", "captured operators"
        if compiled(self.device):
            yield "the whole step is one program: fused, issued at once", "derived", "XLA"
        versions = ", ".join(f"{name} {version}" for name, version in workload.captured_with.items())
        what = f"workload {workload.name}: {workload.parameter_count:,} parameters"
        yield what, "measured", f"captured with {versions}"
        yield from ((line, "warning", "capture") for line in workload.warnings)


def details(op: Op) -> dict[str, object]:
    """What a trace says of an operator."""
    moved = op.bytes_read + op.bytes_written
    return {"module": op.module, "dtype": op.dtype, "dims": list(op.dims), "flops": op.flops, "bytes": moved}


def _timeline(timed: Timed, starts: Array, ends: Array) -> Timeline:
    """What host and device do when."""
    issued, spans = np.cumsum(timed.step.issue), []
    times = np.column_stack([issued - timed.step.issue, issued, starts, ends]).tolist()
    for (_, op), (issue, left, start, end) in zip(written_out(timed.workload), times, strict=True):
        spans.append(Span(op.name, "host", issue, left, op.phase, {}))
        spans.append(Span(op.name, "device", start, end, op.phase, {"phase": op.phase, **details(op)}))
    return Timeline(tuple(spans), f"{timed.workload.name} on one device")
