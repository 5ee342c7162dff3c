"""What plans are made of, found once: seconds and bytes of layers by shape, of stages by state.

A space of a million plans has about a thousand different layers and a few thousand different states. All of
them are found by the functions that predict a single plan (`predict/`); none has a formula of its own here.

What is found is kept under a key: a frozen dataclass of parts of a plan. A key finds its value from its own
fields, the model and the cluster alone, so that no field can matter to a value and be missing in its key.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from paceline.cost.curves import Curves, curves_for
from paceline.plan.space import (
    Batch,
    Block,
    Kernels,
    LayerOptions,
    Mesh,
    PassOrder,
    StateOptions,
    plan_of,
    usual_precision,
)
from paceline.predict.distributed import TransformerStep as Step
from paceline.predict.memory import available_bytes, kept, passing, placeholders, saved, update_bytes
from paceline.predict.sizes import Sizes
from paceline.predict.stages import StageLayers as Layers
from paceline.sim.program import Label
from paceline.sim.work import Exchange
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan
from paceline.spec.transformer import Transformer
from paceline.spec.vocabulary import Offload, Recompute

Array = NDArray[np.float64]
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
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


class Key(Hashable, Protocol[T_co]):
    """A frozen dataclass that finds its value from its own fields."""

    def find(self, table: Table) -> T_co: ...


@dataclass
class Table:
    """What was found for one model on one cluster."""

    model: Transformer
    cluster: Cluster
    _found: dict[Key[Any], Any] = field(default_factory=dict)
    _likes: dict[str, Step] = field(default_factory=dict)

    def __getitem__(self, key: Key[T]) -> T:
        """What a key stands for, found before or now."""
        if key not in self._found:
            self._found[key] = key.find(self)
        return cast(T, self._found[key])

    @cached_property
    def curves(self) -> Curves:
        return curves_for(self.cluster.device)

    def timed(self, plan: Plan) -> Step:
        """A step with its operators timed."""
        return Step.of(self.model, self.cluster, plan, None, self.curves)

    def sized(self, plan: Plan) -> Step:
        """A step with the operators of another plan: good for sizes and collectives, which need no more."""
        if plan.framework not in self._likes:
            sizes = Batch(mbs=1, gbs=1, seq=self.model.seq)
            precision = usual_precision(self.cluster.device)
            like = plan_of(sizes, precision=precision, framework=plan.framework)
            self._likes[plan.framework] = self.timed(like)
        return self._likes[plan.framework].replanned(plan)


# -- layers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankKey:
    """Key of what a layer takes on one rank, in seconds: the mesh without its pipeline and its replicas."""

    mesh: Mesh
    batch: Batch
    kernels: Kernels
    shape: LayerOptions

    @staticmethod
    def of(block: Block) -> tuple[RankKey, ...]:
        """Of each shape of a block."""
        mesh = replace(block.mesh, pp=1, dp=1)
        several = min(2, block.micro_batches)  # gradients are added up where there are several micro-batches
        batch = replace(block.batch, gbs=several * block.batch.mbs)
        return tuple(RankKey(mesh, batch, block.kernels, shape) for shape in block.shapes)

    @property
    def plan(self) -> Plan:
        return plan_of(self.mesh, self.batch, self.kernels, self.shape)

    def find(self, table: Table) -> LayerTasks:
        """Seconds of the pieces; those of other ways to recompute differ in a layer's backward pass alone."""
        plain = replace(self, shape=replace(self.shape, recompute=Recompute.NONE))
        if self == plain:
            step = table.timed(self.plan)
            return LayerTasks(step, {name: Sizes(step).piece(name) for name in PIECES})
        like = table[plain]
        step, again = replace(like.step, plan=self.plan), "layer.backward"
        return LayerTasks(step, {**like.pieces, again: Sizes(step).piece(again)})


@dataclass(frozen=True, slots=True)
class LayerTasks:
    """A step with its pieces as tasks."""

    step: Step
    pieces: Mapping[str, Label]

    @property
    def copying_s(self) -> float:
        """Seconds to copy a layer's activations to the host, where they are offloaded."""
        return replace(self.step, plan=replace(self.step.plan, offload=Offload.ACTIVATIONS)).copying_s


@dataclass(frozen=True)
class PassesKey:
    """Key of arrays of what layers take: by shape."""

    ranks: tuple[RankKey, ...]

    def find(self, table: Table) -> PassSeconds:
        found = [table[rank] for rank in self.ranks]
        tasks = {name: [one.pieces[name] for one in found] for name in PIECES}
        return PassSeconds(
            device_s={name: np.array([task.seconds for task in tasks[name]]) for name in PIECES},
            host_s={name: np.array([task.host_s for task in tasks[name]]) for name in PIECES},
            copying_s=np.array([one.copying_s for one in found]),
        )


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds by shape."""

    #: of each piece: of the device, and of the host that issues it
    device_s: Mapping[str, Array]
    host_s: Mapping[str, Array]
    #: to copy a layer's activations to the host
    copying_s: Array


@dataclass(frozen=True)
class SizesKey:
    """Key of bytes that come and go, by shape."""

    ranks: tuple[RankKey, ...]

    def find(self, table: Table) -> RankBytes:
        steps = [table.sized(rank.plan) for rank in self.ranks]
        inner, ends = ([passing(step, Layers(0, both, both)) for step in steps] for both in (False, True))
        rows = [
            (*saved(step), loss, layer, first, placeholders(step))
            for step, (_, layer), (loss, first) in zip(steps, inner, ends, strict=True)
        ]
        return RankBytes(*np.array(rows).T)


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes by shape."""

    #: that a layer, and the embedding, save of one micro-batch
    layer: Array
    embedding: Array
    #: that come and go: at the loss; in a backward pass, without and with the embedding; all the time
    loss: Array
    inner: Array
    first: Array
    fixed: Array


@dataclass(frozen=True)
class HopKey:
    """Key of the seconds that take an activation from a stage to the next."""

    mesh: Mesh
    batch: Batch
    kernels: Kernels
    sp: bool

    def find(self, table: Table) -> float:
        step = table.sized(plan_of(self.mesh, self.batch, self.kernels, sp=self.sp))
        return step.mesh.total(step.hop)


@dataclass(frozen=True)
class RoomKey:
    """Key of the bytes that a plan may reserve on a device."""

    mesh: Mesh
    kernels: Kernels

    def find(self, table: Table) -> float:
        return available_bytes(table.sized(plan_of(self.mesh, self.kernels)))


# -- stages ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankKind:
    """Ranks of a pipeline that hold as many layers and the same ends."""

    layers: int
    chunks: int
    first: bool
    last: bool
    ranks: tuple[int, ...]
    #: of the last of them: layers of the chunks ahead of its first one
    before: int

    @property
    def ahead(self) -> int:
        """Of the last of them: chunks ahead of its first one."""
        return self.ranks[-1]

    @property
    def held(self) -> Layers:
        return Layers(self.layers, self.first, self.last)


@dataclass(frozen=True)
class PipelineKey:
    """Key of the different ranks of a pipeline."""

    pp: int
    order: PassOrder

    def find(self, table: Table) -> tuple[RankKind, ...]:
        step = table.sized(plan_of(self.order, pp=self.pp))
        held = step.chunks()
        layers = dict(chunk for mine in held for chunk in mine)
        alike: dict[tuple[int, int, bool, bool], list[int]] = {}
        for rank, (mine, stage) in enumerate(zip(held, step.held(), strict=True)):
            alike.setdefault((stage.layers, len(mine), stage.first, stage.last), []).append(rank)
        return tuple(
            RankKind(*kind, tuple(ranks), sum(layers[chunk] for chunk in range(ranks[-1])))
            for kind, ranks in alike.items()
        )


#: bytes of a stage: kept for the whole step, whole for a while, reduced in a backward pass, asked for by the
#: update
STAGE_BYTES = np.dtype([(name, float) for name in ("states", "gathered", "reduced", "update")])
#: seconds of a stage: to reduce its gradients, to gather what was updated, to update
STAGE_SECONDS = np.dtype([(name, float) for name in ("reduce", "regather", "update")])
#: seconds of a state on any stage: to gather and scatter the parameters of a piece, and of a layer one way;
#: the least that is reduced after the last gradient of the first rank, and gathered before its first pass; to
#: keep both copies of an embedding equal
STATE_SECONDS = np.dtype(
    [
        (name, float)
        for name in (*PIECES, "gather", "regather", "scatter", "last_reduce", "first_gather", "tied")
    ]
)


@dataclass(frozen=True)
class StageBytesKey:
    """Key of `STAGE_BYTES`: (states, stages)."""

    mesh: Mesh
    kernels: Kernels
    states: tuple[StateOptions, ...]
    stages: tuple[Layers, ...]

    def find(self, table: Table) -> NDArray[np.void]:
        steps = [table.sized(plan_of(self.mesh, self.kernels, state)) for state in self.states]
        return np.array([[self._row(step, stage) for stage in self.stages] for step in steps], STAGE_BYTES)

    @staticmethod
    def _row(step: Step, stage: Layers) -> tuple[float, ...]:
        of = kept(step, stage)
        states = of.parameters + of.gradients + of.optimizer
        return states, of.gathered, of.reduced, update_bytes(step, stage)


@dataclass(frozen=True)
class StageSecondsKey:
    """Key of `STAGE_SECONDS`, (states, stages), and `STATE_SECONDS`, (states)."""

    mesh: Mesh
    kernels: Kernels
    states: tuple[StateOptions, ...]
    stages: tuple[Layers, ...]

    def find(self, table: Table) -> tuple[NDArray[np.void], NDArray[np.void]]:
        steps = [table.sized(plan_of(self.mesh, self.kernels, state)) for state in self.states]
        stages = [[_stage_s(step, stage) for stage in self.stages] for step in steps]
        return np.array(stages, STAGE_SECONDS), np.array([_state_s(step) for step in steps], STATE_SECONDS)


def _stage_s(step: Step, stage: Layers) -> tuple[float, ...]:
    experts = stage.layers * step.expert_parameters()
    whole = step.exchanges(step.parameters(stage) - experts, experts) if step.replicated else ((), ())
    return (*map(step.mesh.total, whole), step.update(step.updated(stage)))


def _state_s(step: Step) -> tuple[float, ...]:
    none: list[Exchange] = []

    def moved(parameters: float) -> tuple[float, float]:
        """Seconds to gather parameters, and to scatter their gradients."""
        if not (step.sharded and parameters):
            return 0.0, 0.0
        return step.mesh.total(step.unshard(parameters)), step.mesh.total(step.scatter(parameters))

    whole = step.plan.pp == 1  # a chunk that has both ends gathers them at once
    gather, scatter = moved(step.layer_parameters())
    regather = gather if step.plan.reshard else 0.0
    embedding = moved(step.end_parameters(True, whole))
    head = moved(0.0 if whole else step.end_parameters(False, True))
    beside = step.replicated and step.framework.dp_overlap
    ends = step.exchanges(step.tensors("embedding")[0][0], 0.0) if beside else (none, none)
    back = regather + scatter
    pieces = (gather, back, *embedding, *head, back)
    return (*pieces, gather, regather, scatter, *map(step.mesh.total, ends), step.mesh.total(step.tied))


@lru_cache(maxsize=65536)
def alike(
    states: tuple[StateOptions, ...], *ignored: str
) -> tuple[NDArray[np.int64], tuple[StateOptions, ...]]:
    """States that differ in other fields than those ignored, which are usual in them; and which of them each
    state is.
    """
    usual = {name: getattr(Plan, name) for name in ignored}
    plain = [replace(state, **usual) for state in states]
    return distinct(plain)


def distinct(items: Iterable[T]) -> tuple[NDArray[np.int64], tuple[T, ...]]:
    """Where each item stands among those that differ, and these."""
    seen: dict[T, int] = {}
    where = [seen.setdefault(item, len(seen)) for item in items]
    return np.array(where), tuple(seen)
