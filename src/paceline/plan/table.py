"""What plans are made of, found once: seconds and bytes of layers by shape, of stages by state.

A space of a million plans has about a thousand different layers and a few thousand different states. All of
them are found by the functions that predict a single plan (`predict/`); none has a formula of its own here.

What a function finds is kept under its arguments: frozen parts of a plan. Beside the model and the cluster it
knows nothing else, so that no field can matter to a value and be missing in its key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce, wraps
from itertools import accumulate
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.plan.space import (
    Batch,
    Block,
    Kernels,
    LayerOptions,
    PassOrder,
    StateOptions,
    plan_of,
    usual_precision,
)
from paceline.predict.distributed import TransformerStep as Step
from paceline.predict.memory import kept, passing, placeholders, saved, update_bytes
from paceline.predict.stages import RankParts
from paceline.predict.stages import StageLayers as Layers
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Degrees, Plan
from paceline.spec.transformer import Transformer
from paceline.spec.vocabulary import Offload, Recompute

Array = NDArray[np.float64]
#: an array whose columns have names
Records = NDArray[np.void]
#: one row of them
Row = Mapping[str, Any]
#: places in other arrays
Places = NDArray[np.int64]
#: parts of plans: frozen dataclasses
Parts = tuple[Any, ...]
T = TypeVar("T")
P = ParamSpec("P")
#: pieces of the model that a pass runs, one way each; and weight gradients of a layer that are put off
PIECES = (
    "layer.forward",
    "layer.backward",
    "embedding.forward",
    "embedding.backward",
    "head.forward",
    "head.backward",
    "layer.weight",
)
#: those beside which activations are copied to the host and back
COPIED = PIECES[:2]
#: what sharded parameters add to a pass of a chunk: the wait for its first gather unless the embedding
#: (forward) or the head (backward) runs meanwhile, and for its last scatter unless the embedding does
WAITS = ("first_gather", "first_regather", "last_scatter")


@dataclass
class Table:
    """What was found for one model on one cluster."""

    model: Transformer
    cluster: Cluster
    found: dict[Any, Any] = field(default_factory=dict)

    def timed(self, *parts: Any) -> Step:
        """A step with its operators timed."""
        return Step.of(self.model, self.cluster, plan_of(*parts), None, None)

    def sized(self, *parts: Any, **more: Any) -> Step:
        """A step with the operators of another plan: good for sizes and collectives, which need no more."""
        plan = plan_of(*parts, **more)
        return usual_step(self, plan.framework).replanned(plan)


def once(find: Callable[P, T]) -> Callable[P, T]:
    """Keeps what a function finds in the table that is its first argument, under the others."""

    @wraps(find)
    def found(*arguments: P.args, **_: P.kwargs) -> T:
        table: Any
        table, *parts = arguments
        key = find, *parts
        if key not in table.found:
            table.found[key] = find(*arguments, **_)
        value: T = table.found[key]
        return value

    return found


def records(rows: Sequence[Row]) -> Records:
    """An array with a column for each key of some rows, which have the same ones."""
    columns = [(name, float, np.shape(value)) for name, value in rows[0].items()]
    return np.array([tuple(row.values()) for row in rows], columns)


def largest(*values: Any) -> Array:
    """The largest of some arrays, element by element."""
    found: Array = reduce(np.maximum, values)
    return found


@once
def of_parts(
    table: Table, row: Callable[..., Row], fixed: Parts, choices: Parts, stages: tuple[Layers, ...] = ()
) -> Records:
    """What a function says of steps with some fixed parts and one of the choices each; or of their stages:
    (choices, stages).
    """
    steps = [table.sized(*fixed, choice) for choice in choices]
    if not stages:
        return records([row(step) for step in steps])
    return records([row(step, stage) for step in steps for stage in stages]).reshape(len(steps), -1)


@once
def usual_step(table: Table, framework: str) -> Step:
    """A step of a plan that has nothing unusual."""
    precision = usual_precision(table.cluster.device)
    return table.timed(Batch(mbs=1, gbs=1, seq=table.model.seq), Kernels(precision, framework, False))


# -- layers ----------------------------------------------------------------------------------------


def layer_parts(block: Block) -> Parts:
    """What the layers of a block depend on: the mesh without its pipeline and its replicas, samples, and
    kernels.
    """
    several = min(2, block.micro_batches)  # gradients are added up where there are several micro-batches
    batch = replace(block.batch, gbs=several * block.batch.mbs)
    return block.mesh.inner, batch, block.kernels


@once
def layer_step(table: Table, rank: Parts, shape: LayerOptions) -> Step:
    """A step with its operators timed; they are the same in all ways to recompute."""
    plain = replace(shape, recompute=Recompute.NONE)
    if shape == plain:
        return table.timed(*rank, shape)
    return replace(layer_step(table, rank, plain), plan=plan_of(*rank, shape))


@once
def pass_seconds(table: Table, rank: Parts, shapes: tuple[LayerOptions, ...]) -> Records:
    """Seconds of the pieces, (shapes, `PIECES`): of the device, of the host that issues them, and to copy
    their activations to the host's memory where they are offloaded.
    """
    rows = []
    for shape in shapes:
        step = layer_step(table, rank, shape)
        plain = layer_step(table, rank, replace(shape, recompute=Recompute.NONE))
        copied = replace(step, plan=replace(step.plan, offload=Offload.ACTIVATIONS)).tasks.copying_s
        for name in PIECES:  # of which recomputation is in one
            task = (step if name == "layer.backward" else plain).tasks.piece(name)
            rows.append({"device": task.seconds, "host": task.host_s, "copying": copied * (name in COPIED)})
    return records(rows).reshape(len(shapes), -1)


def layer_bytes(step: Step) -> Row:
    """Bytes that a layer, and the embedding, save of one micro-batch; that come and go at the loss, and in a
    backward pass without and with the embedding; and that are there all the time.
    """
    layer, embedding = saved(step)
    (_, inner), (loss, first) = (passing(step, Layers(0, ends, ends)) for ends in (False, True))
    passed = {"loss": loss, "inner": inner, "first": first, "fixed": placeholders(step)}
    return {"layer": layer, "embedding": embedding, **passed}


@once
def hop_s(table: Table, mesh: Degrees, batch: Batch, kernels: Kernels, sp: bool) -> float:
    """Seconds that take an activation from a stage to the next."""
    step = table.sized(mesh, batch, kernels, sp=sp)
    return step.mesh.total(step.sent.hop)


# -- stages ----------------------------------------------------------------------------------------


class RankKind(NamedTuple):
    """Ranks of a pipeline that hold as many layers and the same ends."""

    stage: Layers
    ranks: list[int]
    #: layers of the first chunks of the ranks ahead of the last of these
    before: int
    #: layers of the first rank
    top: int


@once
def rank_kinds(table: Table, pp: int, order: PassOrder) -> list[RankKind]:
    """The different ranks of a pipeline."""
    held = RankParts(table.model, plan_of(order, pp=pp))
    alike: dict[Layers, list[int]] = {}
    for rank, stage in enumerate(held.stages):
        alike.setdefault(stage, []).append(rank)
    ahead = [0, *accumulate(layers for (_, layers), *_ in held.chunks)]
    top = held.stages[0].layers
    return [RankKind(stage, ranks, ahead[ranks[-1]], top) for stage, ranks in alike.items()]


def stage_b(step: Step, stage: Layers) -> Row:
    """Bytes of a stage: kept for the whole step, whole for a while, reduced in a backward pass, and asked for
    by the update.
    """
    of, update = kept(step, stage), update_bytes(step, stage)
    states = of.parameters + of.gradients + of.optimizer
    return {"states": states, "gathered": of.gathered, "reduced": of.reduced, "update": update}


def stage_s(step: Step, stage: Layers) -> Row:
    """Seconds to reduce the gradients of a stage, to gather what was updated, and to update."""
    experts = stage.layers * step.parts.experts
    whole = step.sent.whole(step.parts.whole(stage) - experts, experts) if step.sent.replicated else ((), ())
    reduce, regather = map(step.mesh.total, whole)
    return {"reduce": reduce, "regather": regather, "update": step.update(step.updated(stage))}


def state_s(step: Step) -> Row:
    """Seconds to gather and scatter the parameters of each of `PIECES`, and of a layer as in `WAITS`; the
    least that is reduced after the last gradient of the first rank, and gathered before its first pass; and
    to keep both copies of an embedding equal.
    """
    parts, sent, whole = step.parts, step.sent, step.plan.pp == 1
    gather, scatter = _moved_s(step, parts.layer)
    regather = gather * step.plan.reshard
    embedding = _moved_s(step, parts.ends(True, whole))  # a chunk that has both ends gathers them at once
    head = _moved_s(step, 0.0 if whole else parts.ends(False, True))
    beside = sent.replicated and step.framework.dp_overlap
    ends = sent.whole(parts.tensors("embedding")[0][0], 0.0) if beside else ((), ())
    last_reduce, first_gather = map(step.mesh.total, ends)
    return {
        "pieces": (gather, regather + scatter, *embedding, *head, scatter),
        "waits": (gather, regather, scatter),
        "last_reduce": last_reduce,
        "first_gather": first_gather,
        "tied": step.mesh.total(sent.tied),
    }


def _moved_s(step: Step, parameters: float) -> tuple[float, float]:
    """Seconds to gather sharded parameters, and to scatter their gradients."""
    if not (step.sent.sharded and parameters):
        return 0.0, 0.0
    return step.mesh.total(step.sent.unshard(parameters)), step.mesh.total(step.sent.scatter(parameters))


@lru_cache(maxsize=65536)
def alike(states: tuple[StateOptions, ...], *ignored: str) -> tuple[Places, tuple[StateOptions, ...]]:
    """States that differ in other fields than those ignored, which are usual in them; and which of them each
    state is.
    """
    usual = {name: getattr(Plan, name) for name in ignored}
    return distinct(replace(state, **usual) for state in states)


def distinct(items: Iterable[T]) -> tuple[Places, tuple[T, ...]]:
    """Where each item stands among those that differ, and these."""
    seen: dict[T, int] = {}
    where = [seen.setdefault(item, len(seen)) for item in items]
    return np.array(where), tuple(seen)
