"""How much concurrency a network has: work and depth by layer, kind and form of parallelism."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Work and depth, in operations, of both passes of a part of a network.

    Of a layer, the depth is its longest chain, and the average parallelism its work over that. Of a kind of
    operator, the depth is that of the deepest one, and the average parallelism that of all of them, one after
    the other.
    """

    name: str
    #: operators of the forward pass
    operators: int
    forward_work: float
    forward_depth: float
    backward_work: float
    backward_depth: float
    parallelism: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStretch:
    """Work and depth of a whole pass, in operations: all of its operators, and its longest chain of them."""

    name: str
    work: float
    depth: float
    #: operations of the longest chain by kind of operator, most first
    chain: tuple[tuple[str, float], ...] = ()

    @property
    def parallelism(self) -> float:
        return self.work / self.depth if self.depth else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionChoice:
    """All convolutions by one algorithm: operations, and the sum of their depths, of both passes.

    `fits` of them can use it; the others count as direct.
    """

    algorithm: str
    fits: int
    convolutions: int
    forward_work: float
    forward_depth: float
    backward_work: float
    backward_depth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelForm:
    """One form of parallelism: for how many ranks there is work, and what a rank sends in a step."""

    name: str
    most: float
    limit: str
    #: bytes that a rank sends in a step with 2 ranks, and with as many as the form allows; None of a mixture,
    #: which sends what its parts send
    bytes_two: float | None
    bytes_most: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndPoint:
    """How far one form goes on one kind of hardware: the last rank count that it uses to at least half."""

    form: str
    hardware: str
    ranks: int
    speedup: float
    #: what stops it: the batch, the narrowest layer, stages of unequal time, communication
    stops: str
    #: (ranks, step time in seconds) in powers of two, to one beyond the structural limit
    curve: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """The concurrency of one training step of one model, and where each form of parallelism ends."""

    model: str
    batch: int
    seq: int | None
    precision: str
    #: the depth is a bound: repeated blocks were captured once and are taken one after the other
    folded: bool
    forward: ChainStretch
    backward: ChainStretch
    step: ChainStretch
    kinds: tuple[Passes, ...]
    layers: tuple[Passes, ...]
    convolutions: tuple[ConvolutionChoice, ...]
    forms: tuple[ParallelForm, ...]
    hardware: str = ""
    #: devices whose lanes the step's average parallelism fills; None without a device
    devices_filled: float | None = None
    ends: tuple[EndPoint, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""

        whole = {part.name: part for part in (self.forward, self.backward, self.step)}
        stretches = {name: {**asdict(part), "parallelism": part.parallelism} for name, part in whole.items()}
        return {**asdict(self), **stretches}

    def __rich__(self) -> Any:
        from paceline.report.concurrency import concurrency_view

        return concurrency_view(self)
