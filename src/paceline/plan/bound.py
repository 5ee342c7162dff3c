"""A lower bound on the simulated time of every plan of a block, as one array.

A rank of a pipeline cannot start before the passes ahead of it, runs everything it holds for every
micro-batch, and is followed by the backward passes of the ranks before it. Passes take what their operators
take, what gathering their parameters takes, or what the host takes to issue them, whichever is longest. After
that the last bucket of gradients is reduced and parameters are updated. Each term is one that the simulation
cannot avoid, so the bound holds for it; where communication hides and stages are even it is close.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.plan.space import Block, PassOrder, plan_of
from paceline.plan.table import (
    PIECES,
    Array,
    HopKey,
    PassesKey,
    PassSeconds,
    PipelineKey,
    RankKey,
    RankKind,
    StageSecondsKey,
    Table,
    alike,
    distinct,
)
from paceline.predict.answer import straggling
from paceline.predict.stages import StageLayers as Layers
from paceline.sim.schedules import in_flight
from paceline.spec import schedules
from paceline.spec.vocabulary import Offload

#: what the time of a rank is spent on: pieces of the model; and what sharded parameters add to a pass, which
#: is the wait for its first gather unless the embedding (forward) or the head (backward) runs meanwhile, and
#: for its last scatter unless the embedding does
COLUMNS = (*PIECES, "first_gather", "first_regather", "last_scatter")


def counted(values: Mapping[str, float]) -> Array:
    """How often the seconds of each of `COLUMNS` are spent; zero where nothing is said."""
    return np.array([values.get(name, 0.0) for name in COLUMNS])


def columns(values: Mapping[str, Array]) -> Array:
    """Seconds of `COLUMNS`, zero where nothing is said, along a new last axis."""
    return np.stack(np.broadcast_arrays(*(values.get(name, 0.0) for name in COLUMNS)), axis=-1)


class RankLine(NamedTuple):
    """One kind of rank of a pipeline; or, each field an array, those of all pipelines of a block."""

    layers: Any
    first: Any
    last: Any
    #: micro-batches whose activations the fullest of these ranks holds at once
    live: Any
    #: counts of `COLUMNS`, from the first pass of the step to the last that has to follow a rank's own
    span: Array
    #: counts of the rank alone, after those ahead of it
    own: Array
    #: the same up to where the first of its gradients is complete; zero where nothing is known of it
    ready: Array
    #: counts of all micro-batches on the rank
    work: Array
    #: transfers between stages on the way of `span`
    hops: Any
    #: what the rank reduces last has nothing to hide behind
    exposed: Any


class PipelinePath(NamedTuple):
    """One micro-batch through all stages of a pipeline and back; or, as arrays, of all pipelines."""

    counts: Array
    hops: Any
    #: the ends of the model are on different ranks
    apart: Any


@dataclass(frozen=True, slots=True)
class PipelineArrays:
    """The pipelines of a block, as arrays."""

    lines: RankLine
    #: stages that differ, and which of them each line is
    stages: tuple[Layers, ...]
    stage: NDArray[np.int64]
    #: where the lines of each pipeline start
    starts: NDArray[np.int64]
    paths: PipelinePath


@dataclass(frozen=True)
class LinesKey:
    """Key of the pipelines of a block."""

    pp: int
    micro_batches: int
    framework: str
    orders: tuple[PassOrder, ...]

    @staticmethod
    def of(block: Block) -> LinesKey:
        return LinesKey(block.mesh.pp, block.micro_batches, block.kernels.framework, block.orders)

    def find(self, table: Table) -> PipelineArrays:
        kinds = [table[PipelineKey(self.pp, order)] for order in self.orders]
        beside = table.sized(plan_of(framework=self.framework)).framework.p2p_overlap
        each = list(zip(self.orders, kinds, strict=True))
        lines = [self._line(order, row, rows[0].layers, beside) for order, rows in each for row in rows]
        paths = [self._path(order, rows, table.model.layers) for order, rows in each]
        stage, stages = distinct(Layers(row.layers, row.first, row.last) for rows in kinds for row in rows)
        starts = np.cumsum([0, *map(len, kinds[:-1])])
        return PipelineArrays(
            RankLine(*map(np.array, zip(*lines, strict=True))),
            stages,
            stage,
            starts,
            PipelinePath(*map(np.array, zip(*paths, strict=True))),
        )

    def _line(self, order: PassOrder, row: RankKind, top: int, beside: bool) -> RankLine:
        """Counts of some ranks; `top` layers are the first rank's; transfers run `beside` passes or not."""
        schedule, m = schedules.get(order.schedule), self.micro_batches
        own = _ahead(row) + m * _once(row)
        left = schedule.after_first_gradient(self.pp, m, order.vpp)
        waits = 0 if beside or schedule.v_shaped else m * (2 * row.chunks - row.first - row.last)
        fullest = row.ranks if schedule.v_shaped else row.ranks[:1]
        return RankLine(
            layers=row.layers,
            first=row.first,
            last=row.last,
            live=max(in_flight(order.schedule, rank, self.pp, m, order.vpp) for rank in fullest),
            span=own + _behind(row, schedule, top, m),
            own=own,
            ready=np.zeros(len(COLUMNS)) if left is None else np.maximum(0.0, own - _left(row, left)),
            work=m * _once(row),
            hops=max(waits, row.ahead * (1 if schedule.v_shaped else 2)),
            exposed=row.first and schedule.ends_with_embedding,
        )

    def _path(self, order: PassOrder, rows: Sequence[RankKind], layers: int) -> PipelinePath:
        schedule, between = schedules.get(order.schedule), self.pp * rows[0].chunks - 1
        counts = dict.fromkeys(COLUMNS, 1.0) | dict.fromkeys(COLUMNS[len(PIECES) :], between)
        counts |= {"layer.forward": layers, "layer.backward": layers}
        counts["layer.weight"] = -layers if schedule.splits else 0.0
        return PipelinePath(counted(counts), 2 * (between - schedule.v_shaped), not rows[0].last)


def _once(row: RankKind) -> Array:
    """Counts of one micro-batch on a rank."""
    return counted(
        {
            "layer.forward": row.layers,
            "layer.backward": row.layers,
            "embedding.forward": row.first,
            "embedding.backward": row.first,
            "head.forward": row.last,
            "head.backward": row.last,
            "first_gather": row.chunks - row.first,
            "first_regather": row.chunks - row.last,
            "last_scatter": row.chunks - row.first,
        }
    )


def _ahead(row: RankKind) -> Array:
    """Counts of the ranks ahead, until the first pass of this one."""
    waits = max(0, row.ahead - 1)
    return counted({"layer.forward": row.before, "embedding.forward": row.ahead > 0, "first_gather": waits})


def _behind(row: RankKind, schedule: schedules.Schedule, top: int, micro_batches: int) -> Array:
    """Counts of the ranks ahead, after the last pass of this one: what is known of it."""
    late = schedule.put_off(micro_batches, row.ahead)
    if schedule.v_shaped or late is None or not row.ahead:
        return counted({})
    return counted(
        {
            "layer.backward": row.before,
            "layer.weight": top - row.before - late * row.layers if late else 0,
            "embedding.backward": 1,
            "first_regather": row.ahead,
            "last_scatter": row.ahead - 1,
        }
    )


def _left(row: RankKind, passes: int) -> Array:
    """Counts of so many passes through a chunk, the last of a rank: at most."""
    return counted(
        {
            "layer.backward": passes * -(-row.layers // row.chunks),
            "embedding.backward": row.first,
            "head.backward": row.last,
            "first_regather": passes,
            "last_scatter": passes,
        }
    )


class Spent(NamedTuple):
    """Seconds of `COLUMNS`, by shape and state, where the device, the network or the host is in the way."""

    device: Array
    network: Array
    host: Array

    def longest(self, counts: Array) -> Array:
        """Seconds of device or network, whichever takes longer, in some counts."""
        return np.maximum(self.device @ counts.T, self.network @ counts.T)


def spent(layers: PassSeconds, states: NDArray[np.void], offloads: Array, contention: float) -> Spent:
    """Seconds of some shapes and states; `offloads` says which states copy activations to the host."""
    device_s = {name: seconds[:, None] for name, seconds in layers.device_s.items()}
    host_s = {name: seconds[:, None] for name, seconds in layers.host_s.items()}
    device, sent = {}, {name: states[name] for name in PIECES}
    for name in PIECES[:-1]:
        # collectives beside a layer slow it; those of the ends have nothing beside them
        slowed = contention if name.startswith("layer") else 1.0
        device[name] = device_s[name] + slowed * sent[name]
    for name in ("layer.forward", "layer.backward"):
        # a layer waits for what of its copies neither it nor the host that issues it hides
        hidden = np.maximum(device_s[name], host_s[name])
        device[name] += offloads * np.maximum(0.0, layers.copying_s[:, None] - hidden)
    waits = {"first_gather": "gather", "first_regather": "regather", "last_scatter": "scatter"}
    device |= {name: (1 - contention) * states[of] for name, of in waits.items()}
    device["layer.weight"] = device_s["layer.weight"]
    # when the host issues weight gradients is not known
    host_s["layer.weight"] = host_s["layer.backward"]
    return Spent(columns(device), columns(sent), columns(host_s))


def bounds(block: Block, table: Table) -> Array:
    """Seconds that each plan of a block takes at least: (shapes, orders, states)."""
    known, step = table[LinesKey.of(block)], table.sized(block.plan(0))
    lines, starts, framework = known.lines, known.starts, step.framework
    # buckets and prefetching are not seen here
    where, states = alike(block.states, "bucket_bytes", "prefetch")
    stages, of_state = table[StageSecondsKey(block.mesh, block.kernels, states, known.stages)]
    stages = stages[:, known.stage]
    layers = table[PassesKey(RankKey.of(block))]
    offloads = np.array([state.offload is Offload.ACTIVATIONS for state in states])
    seconds = spent(layers, of_state, offloads, framework.contention)
    hops = [table[HopKey(block.mesh, block.batch, block.kernels, shape.sp)] for shape in block.shapes]
    hop = np.array(hops)[:, None, None]
    # a host may issue a pass while its rank waits for another, so that hosts' times of several ranks do not
    # add up
    issued = seconds.host @ lines.work.T
    span = np.maximum(seconds.longest(lines.span) + hop * lines.hops, issued)
    own = np.maximum(seconds.longest(lines.own), issued)
    # reduced beside the last passes, or after them; the first rank is the last to be done
    begin = seconds.longest(lines.ready) if framework.dp_overlap else own
    tied = of_state["tied"][:, None]
    alone = of_state["last_reduce"][:, None] + tied * known.paths.apart
    per_line = np.repeat(np.arange(len(starts)), np.diff([*starts, len(known.stage)]))
    ends = np.maximum(np.maximum(span, own + lines.exposed * alone[:, per_line]), begin + stages["reduce"])
    path = seconds.longest(known.paths.counts) + hop * known.paths.hops + alone
    longest = np.maximum(np.maximum.reduceat(ends, starts, axis=-1), path)
    after = np.maximum.reduceat(stages["update"], starts, axis=-1) + of_state["first_gather"][:, None]
    if not framework.dp_overlap:
        after = after + np.maximum.reduceat(stages["regather"], starts, axis=-1)
    # every rank waits for the slowest node, as long as the rank that computes least at least
    device_s = columns({name: layers.device_s[name] for name in PIECES[:-1]})
    steady = np.minimum.reduceat(device_s @ lines.work.T, starts, axis=-1)[:, None]
    host = framework.step_s + max(0, block.micro_batches - 1) * framework.micro_batch_s
    found = longest + after + host + straggling(step.cluster) * steady
    return np.asarray(found[:, where].transpose(0, 2, 1))
