"""What plans are made of, timed once: pieces of a layer by shape, collectives and updates by mesh and state.

A space of a million plans has about a thousand different layers and a few thousand different exchanges of
state. Everything here is what the simulation (`predict/simulated.py`) would take, asked for once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from paceline.catalog import frameworks
from paceline.cost.curves import Curves, curves_for
from paceline.plan.pieces import piece_s, recomputed_s
from paceline.plan.space import Block, Choice
from paceline.predict.distributed import Step
from paceline.predict.gradients import Exchange
from paceline.spec import schedules
from paceline.spec.cluster import Cluster
from paceline.spec.transformer import Transformer
from paceline.spec.vocabulary import Offload

Array = NDArray[np.float64]
T = TypeVar("T")
#: order of the seconds in a row of `Table.pieces`
PIECES = (
    "layer.forward",
    "layer.backward",
    "embedding.forward",
    "embedding.backward",
    "head.forward",
    "head.backward",
    "layer.weight",
)


@dataclass(frozen=True, slots=True)
class Row:
    """A rank of the pipeline as counts: what it runs per micro-batch, and what runs ahead of its first
    pass.
    """

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


@dataclass(frozen=True, slots=True)
class Stacked:
    """`State` of all states and orders of a block."""

    #: of each state, that of the first order: what does not depend on the order
    first: list[State]
    #: (states, rows of all orders)
    reduce_s: Array
    regather_s: Array
    #: (states, orders)
    tied_s: Array
    last_reduce_s: Array
    first_gather_s: Array
    update_s: Array


@dataclass
class Table:
    """Times of one model on several clusters, kept as they are asked for."""

    model: Transformer
    _pieces: dict[tuple[Any, ...], Array] = field(default_factory=dict)
    _steps: dict[tuple[Any, ...], tuple[Step, Array]] = field(default_factory=dict)
    _inner: dict[tuple[Any, ...], float] = field(default_factory=dict)
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
        """A step with a shape whose operators are not timed: good for sizes and collectives, which need no
        more.
        """
        plan = block.of(shape, block.orders[0], block.states[0], {"offload": "none"})
        style = frameworks.get(plan.framework)
        like = self._likes.get(block.cluster.name)
        if like is None:
            like = self._likes[block.cluster.name] = Step.of(
                self.model, block.cluster, plan, None, self.curves(block.cluster)
            )
        return replace(like, plan=plan, framework=style, shape=Step.shape_of(self.model, plan, style))

    def pieces(self, block: Block, shape: Choice) -> Array:
        """Seconds on the device, and of the host, of each of `PIECES`: (2, 7)."""
        m, common = block.mesh, block.common
        key = (
            block.cluster.name,
            m.tp,
            m.cp,
            m.ep,
            common["mbs"],
            common["seq"],
            shape["sp"],
            shape["context"],
            common["precision"],
            common["framework"],
            block.micro_batches > 1,
        )
        whole = (*key, shape["recompute"])
        if whole not in self._pieces:
            plan = block.of(shape, block.orders[0], block.states[0], {"offload": "none"})
            if key not in self._steps:
                step = Step.of(self.model, block.cluster, plan, None, self.curves(block.cluster))
                found = [piece_s(step, name, partial(self._sending, step)) for name in PIECES[:-1]]
                self._steps[key] = step, np.array([*found, (step.pieces["layer.backward"].weight_s, 0.0)]).T
            step, plain = self._steps[key]
            step = replace(step, plan=plan)
            again = plain.copy()
            again[:, PIECES.index("layer.backward")] += recomputed_s(step, partial(self._sending, step))
            self._pieces[whole] = again
        return self._pieces[whole]

    def _sending(self, step: Step, op: str, size: float, axis: str) -> float:
        """Seconds of a collective within a piece: over tensor, context or expert ranks."""
        p = step.plan
        key = step.cluster.name, op, size, axis, p.tp, p.cp, p.ep, step.framework.dispatch
        if key not in self._inner:
            self._inner[key] = step.send(op, size, axis)
        return self._inner[key]

    def rows(self, block: Block, order: Choice) -> tuple[Row, ...]:
        """Every kind of rank of a pipeline; of those that do the same, the one that starts last."""
        key = block.mesh.pp, order["schedule"], order["vpp"]
        if key not in self._rows:
            step = self.at(block, order, block.states[0])
            held = step.chunks()
            layers = dict(chunk for mine in held for chunk in mine)
            found: dict[tuple[Any, ...], Row] = {}
            for rank, mine in enumerate(held):
                row = Row(
                    sum(count for _, count in mine),
                    len(mine),
                    *step.ends(rank),
                    rank,
                    sum(layers[c] for c in range(rank)),
                )
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
        key = (
            block.cluster.name,
            block.mesh,
            block.common["precision"],
            block.common["framework"],
            self._kinds[rows],
            rows[0].chunks,
            schedules.get(order["schedule"]).v_shaped,
            *(state.get(name) for name in ("sharding", "shard", "reshard", "offload")),
        )
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

    def copying(self, block: Block) -> Array:
        """Seconds to copy a layer's activations to the host, where they are offloaded, by shape."""

        def find() -> Array:
            steps = [self.step(block, shape) for shape in block.shapes]
            return np.array(
                [
                    replace(step, plan=replace(step.plan, offload=Offload.ACTIVATIONS)).copying_s
                    for step in steps
                ]
            )

        return self.once(("copying", *block.alike), find)

    def hops(self, block: Block) -> Array:
        """Seconds to take an activation to the next stage, by shape; its size follows from whether ranks
        share the sequence.
        """
        if block.mesh.pp == 1:
            return np.zeros(len(block.shapes))
        found: dict[bool, float] = {}
        for shape in block.shapes:
            if shape["sp"] not in found:
                step = self.step(block, shape)
                found[shape["sp"]] = self.send(step, step.hop)
        return np.array([found[shape["sp"]] for shape in block.shapes])

    def stacked(self, block: Block, kinds: Sequence[Choice]) -> Stacked:
        """Seconds of all states and orders of a block; blocks that differ in their micro-batch share them."""
        m, common = block.mesh, block.common
        orders = tuple([(order["schedule"], order["vpp"]) for order in block.orders])

        def find() -> Stacked:
            states = [[self.state(block, order, kind) for order in block.orders] for kind in kinds]
            by_row = (
                np.array([np.concatenate([getattr(state, name) for state in of]) for of in states])
                for name in ("reduce_s", "regather_s")
            )
            names = ("tied_s", "last_reduce_s", "first_gather_s", "update_s")
            by_order = (np.array([[getattr(state, name) for state in of] for of in states]) for name in names)
            return Stacked([of[0] for of in states], *by_row, *by_order)

        return self.once(
            ("stacked", block.cluster.name, m, common["precision"], common["framework"], orders, len(kinds)),
            find,
        )

    def held(self, block: Block, order: Choice) -> tuple[tuple[Row, int], ...]:
        """Every kind of rank with the numbers of those that may hold most: the first of them, or all where
        chunks go down and up.
        """
        key = "held", block.mesh.pp, order["schedule"], order["vpp"]

        def find() -> tuple[tuple[Row, int], ...]:
            step = self.at(block, order, block.states[0])
            found: dict[Any, tuple[Row, int]] = {}
            for rank, mine in enumerate(step.chunks()):
                row = Row(sum(count for _, count in mine), len(mine), *step.ends(rank), 0, 0)
                found.setdefault(
                    (row, rank if schedules.get(order["schedule"]).v_shaped else -1), (row, rank)
                )
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
                (self.send(step, way(ends[0])), self.send(step, way(ends[1])) if ends[1] else 0.0)
                for way in (step.unshard, step.scatter)
            )
        reduces, gathers = np.zeros(len(rows)), np.zeros(len(rows))
        last_reduce = first_gather = 0.0
        if step.replicated:
            for i, row in enumerate(rows):
                experts = row.layers * step.expert_parameters()
                dense = row.layers * (
                    step.layer_parameters() - step.expert_parameters()
                ) + step.end_parameters(row.first, row.last)
                reduces[i], gathers[i] = (self.send(step, way) for way in step.exchanges(dense, experts))
            if step.framework.dp_overlap:
                table = step.tensors("embedding")[0][0]
                last_reduce, first_gather = (self.send(step, way) for way in step.exchanges(table, 0.0))
        return State(
            gather,
            scatter,
            ends_gather,
            ends_scatter,
            reduces,
            gathers,
            last_reduce,
            first_gather,
            self.send(step, step.tied),
            self._update(step, max(step.updated(row) for row in rows)),
        )

    def _update(self, step: Step, parameters: float) -> float:
        key = (
            step.cluster.device.name,
            parameters,
            step.plan.offload,
            step.plan.precision,
            step.framework.name,
        )
        if key not in self._updates:
            self._updates[key] = step.update(parameters)
        return self._updates[key]
