"""What plans are made of, found once: seconds and bytes of layers by shape, of stages by state.

A space of a million plans has about a thousand different layers and a few thousand different states. All of
them are found by the functions that predict a single plan (`predict/`); none has a formula of its own here.

What a function finds is kept under its arguments: frozen parts of a plan. Beside the model and the cluster it
knows nothing else, so that no field can matter to a value and be missing in its key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, reduce, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.cost.curves import Curves, curves_for
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
from paceline.predict.sizes import Sizes
from paceline.predict.stages import StageLayers as Layers
from paceline.sim.program import Label
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Degrees, Plan
from paceline.spec.transformer import Transformer
from paceline.spec.vocabulary import Offload, Recompute

Array = NDArray[np.float64]
#: an array whose columns have names
Records = NDArray[np.void]
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

    @cached_property
    def curves(self) -> Curves:
        return curves_for(self.cluster.device)

    def timed(self, *parts: Any) -> Step:
        """A step with its operators timed."""
        return Step.of(self.model, self.cluster, plan_of(*parts), None, self.curves)

    def sized(self, *parts: Any, **more: Any) -> Step:
        """A step with the operators of another plan: good for sizes and collectives, which need no more."""
        plan = plan_of(*parts, **more)
        return usual_step(self, plan.framework).replanned(plan)


def once(find: Callable[Concatenate[Table, P], T]) -> Callable[Concatenate[Table, P], T]:
    """Keeps in a table what a function finds for it, under the other arguments."""

    @wraps(find)
    def found(table: Table, /, *parts: P.args, **names: P.kwargs) -> T:
        key = find, parts, *names.items()
        if key not in table.found:
            table.found[key] = find(table, *parts, **names)
        value: T = table.found[key]
        return value

    return found


def records(rows: Sequence[Mapping[str, Any]]) -> Records:
    """An array with a column for each key of some rows, which have the same ones."""
    columns = [(name, float, np.shape(value)) for name, value in rows[0].items()]
    return np.array([tuple(row.values()) for row in rows], columns)


def largest(*values: Any) -> Array:
    """The largest of some arrays, element by element."""
    found: Array = reduce(np.maximum, values)
    return found


@once
def of_parts(table: Table, row: Callable[[Step], Mapping[str, Any]], fixed: Parts, choices: Parts) -> Records:
    """What a function says of steps with some fixed parts and one of the choices each."""
    return records([row(table.sized(*fixed, choice)) for choice in choices])


@once
def of_stages(
    table: Table,
    row: Callable[[Step, Layers], Mapping[str, float]],
    fixed: Parts,
    choices: Parts,
    stages: tuple[Layers, ...],
) -> Records:
    """The same of their stages: (choices, stages)."""
    steps = [table.sized(*fixed, choice) for choice in choices]
    return records([row(step, stage) for step in steps for stage in stages]).reshape(len(steps), -1)


@once
def usual_step(table: Table, framework: str) -> Step:
    """A step of a plan that has nothing unusual."""
    precision = usual_precision(table.cluster.device)
    return table.timed(Batch(mbs=1, gbs=1, seq=table.model.seq), Kernels(precision, framework, False))


# -- layers ----------------------------------------------------------------------------------------


class LayerKey(NamedTuple):
    """What layers depend on: the mesh without its pipeline and its replicas, samples, and kernels."""

    mesh: Degrees
    batch: Batch
    kernels: Kernels

    @staticmethod
    def of(block: Block) -> LayerKey:
        several = min(2, block.micro_batches)  # gradients are added up where there are several micro-batches
        batch = replace(block.batch, gbs=several * block.batch.mbs)
        return LayerKey(replace(block.mesh, pp=1, dp=1), batch, block.kernels)


@once
def tasks(table: Table, rank: LayerKey, shape: LayerOptions) -> tuple[Step, Mapping[str, Label]]:
    """A step with its pieces; those of other ways to recompute differ in a layer's backward pass alone."""
    plain = replace(shape, recompute=Recompute.NONE)
    if shape == plain:
        step = table.timed(*rank, shape)
        return step, {name: Sizes(step).piece(name) for name in PIECES}
    step, pieces = tasks(table, rank, plain)
    step, again = replace(step, plan=plan_of(*rank, shape)), "layer.backward"
    return step, {**pieces, again: Sizes(step).piece(again)}


@once
def pass_seconds(table: Table, rank: LayerKey, shapes: tuple[LayerOptions, ...]) -> Records:
    """Seconds of the pieces, (shapes, `PIECES`): of the device, of the host that issues them, and to copy
    their activations to the host's memory where they are offloaded.
    """
    rows = []
    for step, pieces in (tasks(table, rank, shape) for shape in shapes):
        copied = replace(step, plan=replace(step.plan, offload=Offload.ACTIVATIONS)).copying_s
        rows += [
            {"device": task.seconds, "host": task.host_s, "copying": copied * (name in COPIED)}
            for name, task in pieces.items()
        ]
    return records(rows).reshape(len(shapes), -1)


def layer_bytes(step: Step) -> Mapping[str, float]:
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
    return step.mesh.total(step.hop)


# -- stages ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankKind:
    """Ranks of a pipeline that hold as many layers and the same ends."""

    stage: Layers
    chunks: int
    ranks: tuple[int, ...]
    #: of the last of them: layers of the chunks ahead of its first one
    before: int


@once
def rank_kinds(table: Table, pp: int, order: PassOrder) -> tuple[RankKind, ...]:
    """The different ranks of a pipeline."""
    step = table.sized(order, pp=pp)
    held = step.chunks()
    layers = dict(chunk for mine in held for chunk in mine)
    alike: dict[tuple[Layers, int], list[int]] = {}
    for rank, (mine, stage) in enumerate(zip(held, step.held(), strict=True)):
        alike.setdefault((stage, len(mine)), []).append(rank)
    return tuple(
        RankKind(stage, chunks, tuple(ranks), sum(layers[chunk] for chunk in range(ranks[-1])))
        for (stage, chunks), ranks in alike.items()
    )


def stage_b(step: Step, stage: Layers) -> Mapping[str, float]:
    """Bytes of a stage: kept for the whole step, whole for a while, reduced in a backward pass, and asked for
    by the update.
    """
    of, update = kept(step, stage), update_bytes(step, stage)
    states = of.parameters + of.gradients + of.optimizer
    return {"states": states, "gathered": of.gathered, "reduced": of.reduced, "update": update}


def stage_s(step: Step, stage: Layers) -> Mapping[str, float]:
    """Seconds to reduce the gradients of a stage, to gather what was updated, and to update."""
    experts = stage.layers * step.expert_parameters()
    whole = step.exchanges(step.parameters(stage) - experts, experts) if step.replicated else ((), ())
    reduce, regather = map(step.mesh.total, whole)
    return {"reduce": reduce, "regather": regather, "update": step.update(step.updated(stage))}


def state_s(step: Step) -> Mapping[str, Any]:
    """Seconds to gather and scatter the parameters of each of `PIECES`, and of a layer as in `WAITS`; the
    least that is reduced after the last gradient of the first rank, and gathered before its first pass; and
    to keep both copies of an embedding equal.
    """
    whole = step.plan.pp == 1  # a chunk that has both ends gathers them at once
    gather, scatter = _moved_s(step, step.layer_parameters())
    regather = gather * step.plan.reshard
    embedding = _moved_s(step, step.end_parameters(True, whole))
    head = _moved_s(step, 0.0 if whole else step.end_parameters(False, True))
    beside = step.replicated and step.framework.dp_overlap
    ends = step.exchanges(step.tensors("embedding")[0][0], 0.0) if beside else ((), ())
    last_reduce, first_gather = map(step.mesh.total, ends)
    return {
        "pieces": (gather, regather + scatter, *embedding, *head, scatter),
        "waits": (gather, regather, scatter),
        "last_reduce": last_reduce,
        "first_gather": first_gather,
        "tied": step.mesh.total(step.tied),
    }


def _moved_s(step: Step, parameters: float) -> tuple[float, float]:
    """Seconds to gather sharded parameters, and to scatter their gradients."""
    if not (step.sharded and parameters):
        return 0.0, 0.0
    return step.mesh.total(step.unshard(parameters)), step.mesh.total(step.scatter(parameters))


@lru_cache(maxsize=65536)
def alike(
    states: tuple[StateOptions, ...], *ignored: str
) -> tuple[NDArray[np.int64], tuple[StateOptions, ...]]:
    """States that differ in other fields than those ignored, which are usual in them; and which of them each
    state is.
    """
    usual = {name: getattr(Plan, name) for name in ignored}
    return distinct(replace(state, **usual) for state in states)


def distinct(items: Iterable[T]) -> tuple[NDArray[np.int64], tuple[T, ...]]:
    """Where each item stands among those that differ, and these."""
    seen: dict[T, int] = {}
    where = [seen.setdefault(item, len(seen)) for item in items]
    return np.array(where), tuple(seen)
