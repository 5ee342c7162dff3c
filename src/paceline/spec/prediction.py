"""A prediction: the answer, its interval, where the time and the memory go, and what it rests on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.sim.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One line of the breakdown: operators of one kind, with what bounds most of their time."""

    name: str
    seconds: float
    share: float
    count: int
    bound_by: str
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peak allocated bytes by kind, and what the allocator would reserve to serve them."""

    peak_bytes: int
    reserved_bytes: int
    by_kind: Mapping[str, int]
    available_bytes: int
    peak_at: str
    #: the 90 % interval of both
    peak_low_bytes: int = 0
    peak_high_bytes: int = 0
    reserved_low_bytes: int = 0
    reserved_high_bytes: int = 0

    @property
    def fits(self) -> bool:
        return self.reserved_bytes <= self.available_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether the step fits, and if not, by how much and what would help (name, bytes it would leave)."""

    fits: bool
    needed_bytes: int
    available_bytes: int
    remedies: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One input the answer rests on: what, how it is known, where from, and the share of time it decides."""

    what: str
    kind: str
    source: str
    share: float | None = None
    #: of a line about the interval: standard deviation of the logarithm that it contributes
    sigma: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One training step of a workload on a device. Seconds, bytes; `throughput` in units per second."""

    model: str
    device: str
    batch: int
    seq: int | None
    precision: str
    optimizer: str
    unit: str
    step_s: float
    step_s_low: float
    step_s_high: float
    kernel_s: float
    kernel_s_low: float
    kernel_s_high: float
    host_s: float
    throughput: float
    mfu: float
    flops: float
    parameters: int
    kernels: float
    bound_by: str
    breakdown: tuple[Part, ...]
    phases: Mapping[str, float]
    memory: Memory
    fit: Fit
    provenance: tuple[Evidence, ...]
    energy_j: float | None = None
    cost_per_unit: float | None = None
    #: what `cost_per_unit` (USD) rests on, with its date; or that there is no price
    price: str = ""
    timeline: Timeline | None = field(default=None, repr=False, compare=False)

    @property
    def peak_bytes(self) -> int:
        """Peak allocated bytes."""
        return self.memory.peak_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        out = {k: v for k, v in _plain(self).items() if k not in ("timeline", "memory")}
        return {**out, **_memory(self.memory), "fits": self.fit.fits}

    def __rich__(self) -> Any:
        from paceline.report.terminal import prediction_view

        return prediction_view(self)

    def _repr_html_(self) -> str:
        from paceline.report.html import prediction_html

        return prediction_html(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage: its layers, seconds per micro-batch, and the memory of one of its devices."""

    layers: int
    forward_s: float
    backward_s: float
    memory: Memory


def fullest(stages: Iterable[Stage]) -> Memory:
    """The memory of the stage that holds most."""
    return max((stage.memory for stage in stages), key=lambda memory: memory.peak_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedPrediction:
    """One training step of a transformer under a plan on a cluster. Seconds, bytes; `throughput` in tokens
    per second.

    `breakdown` follows the critical path: its seconds add up to `step_s`.
    """

    model: str
    cluster: str
    device: str
    plan: str
    devices: int
    batch: int
    seq: int
    precision: str
    unit: str
    step_s: float
    step_s_low: float
    step_s_high: float
    throughput: float
    #: model FLOPs, and all that is computed, over the peak of the matrix products' precision
    mfu: float
    hfu: float
    flops: float
    parameters: int
    micro_batches: int
    #: of the step, seconds in which communication and nothing else goes on, and in which a stage waits for
    #: another
    exposed_s: float
    bubble_s: float
    bound_by: str
    breakdown: tuple[Part, ...]
    stages: tuple[Stage, ...]
    fit: Fit
    provenance: tuple[Evidence, ...]
    energy_j: float | None = None
    cost_per_unit: float | None = None
    #: what `cost_per_unit` (USD) rests on, with its date; or that there is no price
    price: str = ""
    #: what sending gradients less, later or without waiting may cost in accuracy, and on what evidence
    accuracy: Evidence | None = None
    timeline: Timeline | None = field(default=None, repr=False, compare=False)

    @property
    def memory(self) -> Memory:
        """Of a device of the fullest stage."""
        return fullest(self.stages)

    @property
    def peak_bytes(self) -> int:
        """Peak allocated bytes of a device of the fullest stage."""
        return self.memory.peak_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`: the keys of a `Prediction` and more."""
        return {**_plain(self), **_memory(self.memory), "fits": self.fit.fits}

    def __rich__(self) -> Any:
        from paceline.report.terminal import distributed_view

        return distributed_view(self)

    def _repr_html_(self) -> str:
        from paceline.report.html import distributed_html

        return distributed_html(self)


def _memory(found: Memory) -> dict[str, Any]:
    """The fullest device's bytes, with their 90 % interval."""
    names = (
        "peak_bytes",
        "peak_low_bytes",
        "peak_high_bytes",
        "reserved_bytes",
        "reserved_low_bytes",
        "reserved_high_bytes",
    )
    return {**{name: getattr(found, name) for name in names}, "memory": dict(found.by_kind)}


def _plain(prediction: Prediction | DistributedPrediction) -> dict[str, Any]:
    names = [name for name in prediction.__dataclass_fields__ if name != "timeline"]
    out: dict[str, Any] = {}
    for name in names:
        value = getattr(prediction, name)
        if isinstance(value, tuple):
            value = [asdict(item) for item in value]
        elif hasattr(value, "__dataclass_fields__"):
            value = asdict(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        out[name] = value
    return out
