"""A lower bound on the simulated time of every plan of a block, as one array.

A rank of a pipeline cannot start before the passes ahead of it, runs everything it holds for every
micro-batch, and is followed by the backward passes of the ranks before it. Passes take what their operators
take, what gathering their parameters takes, or what the host takes to issue them, whichever is longest. After
that the last bucket of gradients is reduced and parameters are updated. Each term is one that the simulation
cannot avoid, so the bound holds for it; where communication hides and stages are even it is close.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.plan.space import Block, PassOrder, StateOptions
from paceline.plan.table import (
    PIECES,
    WAITS,
    Array,
    Places,
    RankKind,
    Records,
    Row,
    Table,
    alike,
    distinct,
    hop_s,
    largest,
    layer_parts,
    of_parts,
    once,
    pass_seconds,
    rank_kinds,
    records,
    stage_s,
    state_s,
    usual_step,
)
from paceline.predict.answer import straggling
from paceline.predict.stages import StageLayers as Layers
from paceline.sim.schedules import in_flight
from paceline.spec import schedules
from paceline.spec.framework import Framework
from paceline.spec.vocabulary import Offload

#: what the time of a rank is spent on
COLUMNS = (*PIECES, *WAITS)


def counted(**values: float) -> Array:
    """How often the seconds of each of `COLUMNS` are spent; zero where nothing is said."""
    return np.array([values.get(name.replace(".", "_"), 0.0) for name in COLUMNS])


def forward(layers: float, first: float, last: float, gathers: float) -> Array:
    """Counts of forward passes: of layers, of the embedding, of the head; and of first gathers."""
    return counted(layer_forward=layers, embedding_forward=first, head_forward=last, first_gather=gathers)


def backward(layers: float, first: float, last: float, gathers: float, scatters: float) -> Array:
    """The same of backward passes, and of last scatters."""
    ends = {"embedding_backward": first, "head_backward": last}
    return counted(layer_backward=layers, first_regather=gathers, last_scatter=scatters, **ends)


@dataclass(frozen=True, slots=True)
class PipelineArrays:
    """The pipelines of a block: their ranks that differ, one pipeline after another."""

    #: of each of these ranks, what `_rank` says
    ranks: Records
    #: of each pipeline, what `_path` says
    paths: Records
    #: stages that differ, and which of them each rank has
    stages: tuple[Layers, ...]
    stage: Places
    #: which pipeline each rank is of, and where the ranks of each pipeline start
    pipeline: Places
    starts: Places

    def most(self, values: Array) -> Array:
        """The largest value among the ranks of each pipeline."""
        return np.asarray(np.maximum.reduceat(values, self.starts, axis=-1))


def pipelines(block: Block, table: Table) -> PipelineArrays:
    """The pipelines of a block, one for each of its orders."""
    return _pipelines(table, block.mesh.pp, block.micro_batches, block.kernels.framework, block.orders)


@once
def _pipelines(
    table: Table, pp: int, micro_batches: int, framework: str, orders: tuple[PassOrder, ...]
) -> PipelineArrays:
    kinds = [(order, kind) for order in orders for kind in rank_kinds(table, pp, order)]
    beside = usual_step(table, framework).framework.p2p_overlap
    stage, stages = distinct(kind.stage for _, kind in kinds)
    pipeline, _ = distinct(order for order, _ in kinds)
    return PipelineArrays(
        ranks=records([_rank(pp, micro_batches, order, kind, beside) for order, kind in kinds]),
        paths=records([_path(pp, order, table.model.layers) for order in orders]),
        stages=stages,
        stage=stage,
        pipeline=pipeline,
        starts=np.searchsorted(pipeline, range(len(orders))),
    )


def _rank(pp: int, micro_batches: int, order: PassOrder, kind: RankKind, beside: bool) -> Row:
    """What a kind of rank holds, and what it does; transfers run `beside` passes or not."""
    schedule, m = schedules.get(order.schedule), micro_batches
    (layers, first, last), chunks = kind.stage, schedule.chunks_per_rank(order.vpp)
    waits = 0 if beside or schedule.v_shaped else m * (2 * chunks - first - last)
    fullest = kind.ranks if schedule.v_shaped else kind.ranks[:1]
    return {
        "layers": layers,
        "first": first,
        "last": last,
        # micro-batches whose activations the fullest of these ranks holds at once
        "live": max(in_flight(order.schedule, rank, pp, m, order.vpp) for rank in fullest),
        # transfers between stages on the way of `span`
        "hops": max(waits, kind.ranks[-1] * (1 if schedule.v_shaped else 2)),
        # what the rank reduces last has nothing to hide behind
        "exposed": first and schedule.ends_with_embedding,
        **_counts(kind, schedule, chunks, m, schedule.after_first_gradient(pp, m, order.vpp)),
    }


def _counts(
    kind: RankKind, schedule: schedules.Schedule, chunks: int, micro_batches: int, after: float | None
) -> Row:
    """Counts of a rank alone, after those ahead of it (`own`); from the first pass of the step to the last
    that has to follow its own (`span`); up to where the first of its gradients is complete, `after` passes
    before the last (`ready`); and of all its micro-batches (`work`).
    """
    (layers, first, last), ahead = kind.stage, kind.ranks[-1]
    one = forward(layers, first, last, chunks - first)
    one += backward(layers, first, last, chunks - last, chunks - first)
    own = forward(kind.before, ahead > 0, 0, max(0, ahead - 1)) + micro_batches * one
    ready = np.zeros(len(COLUMNS))  # nothing is known of it
    if after is not None:
        left = backward(after * -(-layers // chunks), first, last, after, after)
        ready = np.maximum(0.0, own - left)
    span = own + _behind(kind, schedule, chunks, micro_batches)
    return {"own": own, "span": span, "ready": ready, "work": micro_batches * one[: len(PIECES)]}


def _behind(kind: RankKind, schedule: schedules.Schedule, chunks: int, micro_batches: int) -> Array:
    """Counts of the ranks ahead, after the last pass of this one: what is known of it."""
    ahead = kind.ranks[-1]
    late = schedule.put_off(micro_batches, ahead)
    if schedule.v_shaped or late is None or not ahead:
        return counted()
    put_off = kind.top - kind.before - late * kind.stage.layers if late else 0
    # passes that put weights off do not scatter; those of this rank that come late do so meanwhile
    scatters = -late * chunks if schedule.splits else ahead - 1
    return backward(kind.before, 1, 0, ahead, scatters) + counted(layer_weight=put_off)


def _path(pp: int, order: PassOrder, layers: int) -> Row:
    """One micro-batch through all stages of a pipeline and back: counts, and transfers; and whether the ends
    of the model are on different ranks.
    """
    schedule = schedules.get(order.schedule)
    between = pp * schedule.chunks_per_rank(order.vpp) - 1
    scatters = 0 if schedule.splits else between
    counts = forward(layers, 1, 1, between) + backward(layers, 1, 1, between, scatters)
    counts -= counted(layer_weight=layers * schedule.splits)
    apart = pp > 1 and not schedule.v_shaped
    return {"counts": counts, "hops": 2 * (between - schedule.v_shaped), "apart": apart}


@dataclass(frozen=True)
class BlockSeconds:
    """What the plans of a block take their time from."""

    known: PipelineArrays
    framework: Framework
    #: (shapes, `PIECES`); (states, ranks of all pipelines); states
    passes: Records
    stages: Records
    states: Records
    #: which states copy activations to the host
    offloads: NDArray[np.bool_]
    #: by shape: from a stage to the next
    hop: Array

    @cached_property
    def device(self) -> Array:
        """Seconds of `COLUMNS` where the device is in the way: (shapes, states, `COLUMNS`)."""
        passes, contention = self.passes, self.framework.contention
        # collectives beside a layer slow it; those of the ends have nothing beside them
        slowed = {"layer.forward": contention, "layer.backward": contention, "layer.weight": contention}
        sent = self.states["pieces"] * [slowed.get(name, 1.0) for name in PIECES]
        # a layer waits for what of its copies neither it nor the host that issues it hides
        lack = np.maximum(0.0, passes["copying"] - np.maximum(passes["device"], passes["host"]))
        pieces = passes["device"][:, None] + sent + self.offloads[:, None] * lack[:, None]
        waits = (1 - contention) * self.states["waits"]
        return np.concatenate([pieces, np.broadcast_to(waits, (*pieces.shape[:2], len(WAITS)))], axis=-1)

    @cached_property
    def network(self) -> Array:
        """The same where the network is: (states, `COLUMNS`)."""
        return np.concatenate([self.states["pieces"], 0 * self.states["waits"]], axis=-1)

    def longest(self, counts: Array) -> Array:
        """Seconds of device or network, whichever takes longer, in some counts."""
        return largest(self.device @ counts.T, self.network @ counts.T)

    @property
    def alone(self) -> Array:
        """Of the reduction that has nothing to hide behind on the first rank of each pipeline."""
        tied = self.states["tied"][:, None] * self.known.paths["apart"]
        return np.asarray(self.states["last_reduce"][:, None] + tied)

    @property
    def reduced(self) -> Array:
        """Until all passes of each pipeline are done and their gradients are reduced: on the rank that is
        last, and for one micro-batch through all stages and back.
        """
        ranks, paths, alone = self.known.ranks, self.known.paths, self.alone
        # a host may issue a pass while its rank waits for another, so that hosts' times of several ranks do
        # not add up
        issued = (self.passes["host"] @ ranks["work"].T)[:, None]
        span = largest(self.longest(ranks["span"]) + self.hop * ranks["hops"], issued)
        own = largest(self.longest(ranks["own"]), issued)
        # reduced beside the last passes, or after them; the first rank is the last to be done
        begin = self.longest(ranks["ready"]) if self.framework.dp_overlap else own
        exposed = own + ranks["exposed"] * alone[:, self.known.pipeline]
        ends = self.known.most(largest(span, exposed, begin + self.stages["reduce"]))
        return largest(ends, self.longest(paths["counts"]) + self.hop * paths["hops"] + alone)

    @property
    def updated(self) -> Array:
        """After that, until the first pass of the next step."""
        regather = 0.0 if self.framework.dp_overlap else self.known.most(self.stages["regather"])
        first = self.states["first_gather"][:, None]
        return np.asarray(self.known.most(self.stages["update"]) + first + regather)

    @property
    def steady(self) -> Array:
        """Of the rank of each pipeline that computes least."""
        computed = self.passes["device"] @ self.known.ranks["work"].T
        return np.asarray(np.minimum.reduceat(computed, self.known.starts, axis=-1)[:, None])

    @staticmethod
    def of(block: Block, table: Table, states: tuple[StateOptions, ...]) -> BlockSeconds:
        known, fixed = pipelines(block, table), (block.mesh, block.kernels)
        hops = [hop_s(table, block.mesh, block.batch, block.kernels, shape.sp) for shape in block.shapes]
        return BlockSeconds(
            known=known,
            framework=usual_step(table, block.kernels.framework).framework,
            passes=pass_seconds(table, layer_parts(block), block.shapes),
            stages=of_parts(table, stage_s, fixed, states, known.stages)[:, known.stage],
            states=of_parts(table, state_s, fixed, states),
            offloads=np.array([state.offload is Offload.ACTIVATIONS for state in states]),
            hop=np.array(hops)[:, None, None],
        )


def bounds(block: Block, table: Table) -> Array:
    """Seconds that each plan of a block takes at least: (shapes, orders, states)."""
    # buckets and prefetching are not seen here
    where, states = alike(block.states, "bucket_bytes", "prefetch")
    seconds = BlockSeconds.of(block, table, states)
    framework = seconds.framework
    host = framework.step_s + max(0, block.micro_batches - 1) * framework.micro_batch_s
    # every rank waits for the slowest node, as long as the rank that computes least at least
    slowest = straggling(block.cluster) * seconds.steady
    found = seconds.reduced + seconds.updated + host + slowest
    return np.asarray(found[:, where].transpose(0, 2, 1))
