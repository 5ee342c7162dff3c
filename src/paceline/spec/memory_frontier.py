"""Where the memory of a step goes, and what less of it costs in time: the answer of `analyze --memory`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.errors import SpecError
from paceline.spec.recomputation import RecomputePolicy
from paceline.units import show


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveMoment:
    """Live bytes by kind at one moment of a step, `at_s` seconds of operators after its begin."""

    at_s: float
    phase: str
    by_kind: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.by_kind.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """What one module of the chain keeps for the backward pass, and what its forward pass takes."""

    path: str
    saved_bytes: int
    forward_s: float
    #: live bytes that it made, at the moments of the chart
    live: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepCost:
    """Operators of one kind in a forward pass: what keeping their results takes, and what computing them
    again would.
    """

    kind: str
    saved_bytes: int
    forward_s: float

    @property
    def s_per_byte(self) -> float:
        return self.forward_s / self.saved_bytes if self.saved_bytes else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One policy: its predicted peak memory and step time on the device."""

    name: str
    #: what it does, in words
    words: str
    policy: RecomputePolicy
    peak_bytes: int
    #: of the peak, what comes and goes in a step: activations and temporaries
    passing_bytes: int
    step_s: float
    step_s_low: float
    step_s_high: float
    #: share of the step that it adds
    overhead: float
    #: share of the FLOPs of the step that it adds
    compute: float
    #: no other point needs less memory and less time
    best: bool = False
    #: bytes that go to the host and come back in a step; the least time of one, were all copies hidden
    offloaded_bytes: int = 0
    hidden_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFrontier:
    """Lifetimes of one step of one model, and policies from the fastest to the leanest."""

    model: str
    batch: int
    seq: int | None
    precision: str
    device: str
    available_bytes: int
    #: at the moment when most is live
    peak: LiveMoment
    moments: tuple[LiveMoment, ...]
    modules: tuple[ModuleMemory, ...]
    kinds: tuple[KeepCost, ...]
    points: tuple[FrontierPoint, ...]
    notes: tuple[str, ...] = ()

    def within(self, limit_bytes: float) -> FrontierPoint:
        """The fastest point that needs at most so many bytes."""
        fitting = [point for point in self.points if point.peak_bytes <= limit_bytes]
        if not fitting:
            least = min(self.points, key=lambda point: point.peak_bytes)
            raise SpecError(
                f"no policy for {self.model} needs {show(limit_bytes, 'bytes')} or less; the leanest,"
                f" {least.name}, needs {show(least.peak_bytes, 'bytes')}: take a smaller batch"
            )
        return min(fitting, key=lambda point: (point.step_s, point.peak_bytes))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        plain = asdict(self)
        for point, data in zip(self.points, plain["points"], strict=True):
            data["policy"] = point.policy.to_dict()
        return plain

    def __rich__(self) -> Any:
        from paceline.report.memory_frontier import memory_view

        return memory_view(self)
