"""What plans are made of, timed once: pieces of a layer by shape, collectives and updates by mesh and state.

A space of a million plans has about a thousand different layers and a few thousand different exchanges of state. Everything here is
what the simulation (`predict/simulated.py`) would take, asked for once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from paceline.cost.curves import Curves, curves_for
from paceline.plan.space import Block, Choice
from paceline.predict.distributed import Step
from paceline.predict.gradients import Exchange
from paceline.predict.simulated import Simulation
from paceline.sim.schedules import V_SHAPED
from paceline.spec import framework as frameworks
from paceline.spec.cluster import Cluster
from paceline.spec.plan import RECOMPUTE
from paceline.spec.transformer import Transformer

Array = NDArray[np.float64]
T = TypeVar("T")
#: order of the seconds in a row of `Table.pieces`
PIECES = ("layer.forward", "layer.backward", "embedding.forward", "embedding.backward", "head.forward", "head.backward", "layer.weight")
#: fields of a plan on which a piece depends, besides whether micro-batches are accumulated
_SHAPE = ("tp", "cp", "ep", "mbs", "seq", "sp", "context", "precision", "framework")


@dataclass(frozen=True, slots=True)
class Row:
    """A rank of the pipeline as counts: what it runs per micro-batch, and what runs ahead of its first pass."""

    layers: int
    chunks: int
    first: bool
    last: bool
    #: chunks ahead of its first one, and their layers
    ahead: int
    before: int


@dataclass(frozen=True, slots=True)
class State:
    """Seconds of keeping state together, of one order and state of a block."""

    #: gather and scatter of one layer where parameters are sharded, and of the embedding's and the head's
    gather_s: float
    scatter_s: float
    ends_gather_s: tuple[float, float]
    ends_scatter_s: tuple[float, float]
    #: of each row, all that it reduces; and all that it gathers after the update
    reduce_s: Array
    regather_s: Array
    #: the least that is reduced after the last gradient of the first rank, and gathered before its first pass
    last_reduce_s: float
    first_gather_s: float
    #: to keep both copies of an embedding equal
    tied_s: float
    update_s: float


@dataclass
class Table:
    """Times of one model on several clusters, kept as they are asked for."""

    model: Transformer
    _pieces: dict[tuple[Any, ...], Array] = field(default_factory=dict)
    _steps: dict[tuple[Any, ...], Step] = field(default_factory=dict)
    _likes: dict[str, Step] = field(default_factory=dict)
    _rows: dict[tuple[Any, ...], tuple[Row, ...]] = field(default_factory=dict)
    _states: dict[tuple[Any, ...], State] = field(default_factory=dict)
    _kinds: dict[tuple[Row, ...], tuple[Any, ...]] = field(default_factory=dict)
    _sent: dict[tuple[Any, ...], float] = field(default_factory=dict)
    _updates: dict[tuple[Any, ...], float] = field(default_factory=dict)
    _made: dict[tuple[Any, ...], object] = field(default_factory=dict)
    _curves: dict[str, Curves] = field(default_factory=dict)

    def curves(self, cluster: Cluster) -> Curves:
        return self._curves.setdefault(cluster.device.name, curves_for(cluster.device))

    def step(self, block: Block, shape: Choice) -> Step:
        """A step with a shape whose operators are not timed: good for sizes and collectives, which need no more."""
        plan = block.of(shape, block.orders[0], block.states[0], {"offload": "none"})
        style = frameworks.get(plan.framework)
        like = self._likes.get(block.cluster.name)
        if like is None:
            like = self._likes[block.cluster.name] = Step.of(self.model, block.cluster, plan, None, self.curves(block.cluster))
        return replace(like, plan=plan, framework=style, shape=Step.shape_of(self.model, plan, style))

    def pieces(self, block: Block, shape: Choice) -> Array:
        """Seconds on the device, and of the host, of each of `PIECES`: (2, 7)."""
        plan = block.of(shape, block.orders[0], block.states[0], {"offload": "none"})
        key = (block.cluster.name, *(getattr(plan, name) for name in _SHAPE), plan.micro_batches > 1)
        whole = (*key, plan.recompute)
        if whole not in self._pieces:
            if key not in self._steps:
                self._steps[key] = Step.of(self.model, block.cluster, plan, None, self.curves(block.cluster))
            simulation = Simulation(replace(self._steps[key], plan=plan))
            like = next((self._pieces[(*key, other)] for other in RECOMPUTE if (*key, other) in self._pieces), None)
            found = np.empty((2, len(PIECES))) if like is None else like.copy()
            for i, name in enumerate(PIECES):
                if like is None or name == "layer.backward":  # what is recomputed changes nothing else
                    label = simulation.piece(name)
                    found[:, i] = label.seconds, label.host_s
            self._pieces[whole] = found
        return self._pieces[whole]

    def rows(self, block: Block, order: Choice) -> tuple[Row, ...]:
        """Every kind of rank of a pipeline; of those that do the same, the one that starts last."""
        key = block.mesh.pp, order["schedule"], order["vpp"]
        if key not in self._rows:
            step = self.at(block, order, block.states[0])
            held = step.chunks()
            layers = dict(chunk for mine in held for chunk in mine)
            found: dict[tuple[Any, ...], Row] = {}
            for rank, mine in enumerate(held):
                row = Row(sum(count for _, count in mine), len(mine), *step.ends(rank), rank, sum(layers[c] for c in range(rank)))
                found[row.layers, row.first, row.last, rank == 0] = row  # later ranks replace earlier ones
            self._rows[key] = tuple(found.values())
            self._kinds[self._rows[key]] = tuple((row.layers, row.first, row.last) for row in self._rows[key])
        return self._rows[key]

    def at(self, block: Block, order: Choice, state: Choice) -> Step:
        """A step under any plan of a block that has this order and state."""
        step = self.step(block, block.shapes[0])
        return replace(step, plan=block.of(block.shapes[0], order, state))

    def state(self, block: Block, order: Choice, state: Choice) -> State:
        """Collectives and update of an order and a state; they do not depend on the micro-batch."""
        rows = self.rows(block, order)
        key = (block.cluster.name, block.mesh, block.common["precision"], block.common["framework"], self._kinds[rows], rows[0].chunks,
               order["schedule"] in V_SHAPED, *(state.get(name) for name in ("sharding", "shard", "reshard", "offload")))
        if key not in self._states:
            self._states[key] = self._state(self.at(block, order, state), rows)
        return self._states[key]

    def send(self, step: Step, exchanges: Sequence[Exchange]) -> float:
        """Seconds of collectives one after another."""
        total = 0.0
        for op, size, axis in exchanges:
            group = step.group(axis)
            key = step.cluster.name, op, size, group
            if key not in self._sent:
                self._sent[key] = step.send(op, size, axis)
            total += self._sent[key]
        return total

    def copying(self, block: Block, shape: Choice) -> float:
        """Seconds to copy a layer's activations to the host, where they are offloaded."""
        step = self.step(block, shape)
        return replace(step, plan=replace(step.plan, offload="activations")).copying_s

    def hop(self, block: Block, shape: Choice) -> float:
        """Seconds to take an activation to the next stage."""
        step = self.step(block, shape)
        return step.total(step.hop) if step.plan.pp > 1 else 0.0

    def held(self, block: Block, order: Choice) -> tuple[tuple[Row, int], ...]:
        """Every kind of rank with the numbers of those that may hold most: the first of them, or all where chunks go down and up."""
        key = "held", block.mesh.pp, order["schedule"], order["vpp"]

        def find() -> tuple[tuple[Row, int], ...]:
            step = self.at(block, order, block.states[0])
            found: dict[Any, tuple[Row, int]] = {}
            for rank, mine in enumerate(step.chunks()):
                row = Row(sum(count for _, count in mine), len(mine), *step.ends(rank), 0, 0)
                found.setdefault((row, rank if order["schedule"] in V_SHAPED else -1), (row, rank))
            return tuple(found.values())

        return self.once(key, find)

    def once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What was made for a key before, or now."""
        if key not in self._made:
            self._made[key] = make()
        return cast(T, self._made[key])

    def _state(self, step: Step, rows: Sequence[Row]) -> State:
        gather = scatter = 0.0
        ends_gather = ends_scatter = (0.0, 0.0)
        if step.sharded:
            layer = step.layer_parameters()
            gather, scatter = self.send(step, step.unshard(layer)), self.send(step, step.scatter(layer))
            # a chunk that has both ends gathers them at once
            whole = len(rows) == 1 and rows[0].chunks == 1
            ends = [step.end_parameters(True, whole), 0.0 if whole else step.end_parameters(False, True)]
            ends_gather, ends_scatter = (
                (self.send(step, way(ends[0])), self.send(step, way(ends[1])) if ends[1] else 0.0) for way in (step.unshard, step.scatter))
        reduces, gathers = np.zeros(len(rows)), np.zeros(len(rows))
        last_reduce = first_gather = 0.0
        if step.replicated:
            for i, row in enumerate(rows):
                experts = row.layers * step.expert_parameters()
                dense = row.layers * (step.layer_parameters() - step.expert_parameters()) + step.end_parameters(row.first, row.last)
                reduces[i], gathers[i] = (self.send(step, way) for way in step.exchanges(dense, experts))
            if step.framework.dp_overlap:
                table = step.tensors("embedding")[0][0]
                last_reduce, first_gather = (self.send(step, way) for way in step.exchanges(table, 0.0))
        return State(
            gather, scatter, ends_gather, ends_scatter, reduces, gathers, last_reduce, first_gather, self.send(step, step.tied),
            self._update(step, max(step.updated(row) for row in rows)))

    def _update(self, step: Step, parameters: float) -> float:
        key = step.cluster.device.name, parameters, step.plan.offload, step.plan.precision, step.framework.name
        if key not in self._updates:
            self._updates[key] = step.update(parameters)
        return self._updates[key]
