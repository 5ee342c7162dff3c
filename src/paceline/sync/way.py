"""What a way of synchronising says of a step: which gradients travel together, by which collectives, and what
encoders and servers add to the work of a device.

A way sees the gradients of one stage of the pipeline (`Gradient`), whatever the model was made from, and
answers with messages; when these are sent, what they hide behind and who waits for them follows from the
simulation (`predict/exchange.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.cost.chip import Chip
from paceline.sim.mesh import Mesh
from paceline.sim.program import Label, buckets
from paceline.sim.work import GATHERS, REDUCTION
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan
from paceline.spec.prediction import Evidence
from paceline.spec.synchronisation import Relaxation
from paceline.spec.vocabulary import Sharding

#: a chunk of the model, and so many operators or pieces of a pass through it
Place = tuple[int, int]


class Gradient(NamedTuple):
    """The gradient of one tensor on one rank."""

    name: str
    shape: tuple[int, ...]
    #: as it is reduced in full; of the parameter, as it is gathered
    bytes: float
    parameter_bytes: float
    #: its number in the order in which gradients are complete
    turn: int
    #: where it is complete in the last backward pass, and where the first forward pass needs the parameter
    ready: Place
    needed: Place
    #: seconds of the backward pass until it is complete, while nothing is in the way
    ready_s: float = 0.0
    #: the mesh axis of the ranks that hold the same tensor
    axis: str = "dp"
    #: the module that holds it
    layer: str = ""
    #: rows of the activations that a fully connected layer multiplies; 0: it is none
    rows: int = 0
    #: seconds of the product that makes it, and of its arithmetic alone
    product_s: tuple[float, float] = (0.0, 0.0)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Gradients that travel together, and their parameters on the way back."""

    gradients: Sequence[Gradient]
    reduce: tuple[Label, ...]
    #: what brings the updated parameters back
    gather: tuple[Label, ...] = ()
    #: reduced as soon as all are complete, not after all passes; and parameters gathered as the next forward
    #: pass needs them, not before it
    early: bool = True
    gathers_early: bool = True
    #: seconds of the device before it sends, and before the update
    encode_s: float = 0.0
    decode_s: float = 0.0
    #: seconds of the backward pass's last product that it saves
    spared_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRule:
    """In what pieces gradients are reduced, and when."""

    bucket_bytes: float
    #: of the first bucket, kept small so that communication starts early
    first_bytes: float | None = None
    #: seconds after which a bucket is sent even if it is not full
    cycle_s: float = math.inf
    #: buckets are reduced while the backward pass goes on, not after it
    early: bool = True
    #: parameters are gathered while the next forward pass goes on, not before it
    gathers_early: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The ranks of one stage of the pipeline, as a way sees them."""

    mesh: Mesh
    chip: Chip
    timing: BucketRule
    #: seconds of the backward pass, on the clock of `Gradient.ready_s`
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way of synchronising."""

    #: what travels in a step
    messages: Callable[[Side, Sequence[Gradient]], Iterable[Message]]
    #: what it may cost in accuracy, and on what evidence
    accuracy: Evidence | None = None
    #: bytes per parameter that a device keeps from one step to the next
    state_bytes: float = 0.0
    #: share of the optimizer's state and work that one of so many replicas has
    update_share: Callable[[int], float] = lambda replicas: 1.0
    #: of the replicas of a plan, those that average every step
    island: Callable[[Plan, Cluster], int] = lambda plan, cluster: plan.dp
    #: what gradients are encoded as
    code: str = ""


def in_buckets(
    side: Side, gradients: Sequence[Gradient], size: Callable[[Gradient], float]
) -> Iterator[list[Gradient]]:
    """Gradients put together as they become complete, those of experts apart; last of them first."""
    turns, timing = sorted(gradients, key=lambda gradient: gradient.turn), side.timing
    found: list[list[Gradient]] = []
    for axis in dict.fromkeys(gradient.axis for gradient in turns):
        mine = [gradient for gradient in turns if gradient.axis == axis]
        sizes, times = [size(g) for g in mine], [g.ready_s for g in mine]
        places = buckets(sizes, timing.bucket_bytes, timing.first_bytes, times, timing.cycle_s)
        found += [[mine[i] for i in bucket] for bucket in places]
    yield from sorted(found, key=lambda bucket: bucket[-1].turn)


def by_layer(gradients: Sequence[Gradient]) -> Iterator[list[Gradient]]:
    """Gradients of one module after another, as they become complete."""
    layer: list[Gradient] = []
    for gradient in sorted(gradients, key=lambda gradient: gradient.turn):
        if layer and (gradient.layer, gradient.axis) != (layer[0].layer, layer[0].axis):
            yield layer
            layer = []
        layer.append(gradient)
    if layer:
        yield layer


def full_bytes(gradients: Iterable[Gradient]) -> float:
    return sum(gradient.bytes for gradient in gradients)


def averaged(side: Side, gradients: Sequence[Gradient]) -> Iterator[Message]:
    """In full, every step, as the plan's sharding says."""
    zero = side.mesh.plan.sharding in (Sharding.ZERO1, Sharding.ZERO2)
    for bucket in in_buckets(side, gradients, lambda gradient: gradient.bytes):
        axis = bucket[0].axis
        kept = sum(gradient.parameter_bytes for gradient in bucket)
        op = "reduce_scatter" if zero else "all_reduce"
        yield Message(
            gradients=bucket,
            reduce=(side.mesh.label((op, full_bytes(bucket), axis), REDUCTION),),
            gather=(side.mesh.label(("all_gather", kept, axis), GATHERS),) if zero else (),
            early=side.timing.early,
            gathers_early=side.timing.early and side.timing.gathers_early,
        )


#: gradients are averaged in full, every step
USUAL = Way(messages=averaged)


def usual(relax: Relaxation) -> Way:
    """All-reduce has no settings."""
    return USUAL
