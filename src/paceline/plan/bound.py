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

from paceline.plan.space import Block, PassOrder
from paceline.plan.table import (
    PIECES,
    WAITS,
    Array,
    Rank,
    RankKind,
    Records,
    Table,
    alike,
    distinct,
    hop_s,
    once,
    pass_seconds,
    rank_kinds,
    records,
    stage_seconds,
    usual_step,
)
from paceline.predict.layer import Layers
from paceline.predict.memory import in_flight
from paceline.spec import schedules
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
    stage: NDArray[np.int64]
    #: which pipeline each rank is of, and where the ranks of each pipeline start
    pipeline: NDArray[np.int64]
    starts: NDArray[np.int64]

    def most(self, values: Array) -> Array:
        """The largest value among the ranks of each pipeline."""
        return np.maximum.reduceat(values, self.starts, axis=-1)


def pipelines(block: Block, table: Table) -> PipelineArrays:
    """The pipelines of a block, one for each of its orders."""
    return _pipelines(table, block.mesh.pp, block.micro_batches, block.kernels.framework, block.orders)


@once
def _pipelines(
    table: Table, pp: int, micro_batches: int, framework: str, orders: tuple[PassOrder, ...]
) -> PipelineArrays:
    kinds = [rank_kinds(table, pp, order) for order in orders]
    beside = usual_step(table, framework).framework.p2p_overlap
    each = list(zip(orders, kinds, strict=True))
    ranks = [
        _rank(pp, micro_batches, order, kind, alike[0].stage.layers, beside)
        for order, alike in each
        for kind in alike
    ]
    stage, stages = distinct(kind.stage for alike in kinds for kind in alike)
    pipeline = np.repeat(np.arange(len(kinds)), [len(alike) for alike in kinds])
    return PipelineArrays(
        ranks=records(ranks),
        paths=records([_path(pp, order, alike, table.model.layers) for order, alike in each]),
        stages=stages,
        stage=stage,
        pipeline=pipeline,
        starts=np.searchsorted(pipeline, np.arange(len(kinds))),
    )


def _rank(
    pp: int, micro_batches: int, order: PassOrder, kind: RankKind, top: int, beside: bool
) -> Mapping[str, Any]:
    """What a kind of rank holds, and counts of what it does; `top` layers are the first rank's, and transfers
    run `beside` passes or not.
    """
    schedule, m, vpp = schedules.get(order.schedule), micro_batches, order.vpp
    (layers, first, last), chunks, ahead = kind.stage, kind.chunks, kind.ranks[-1]
    one = forward(layers, first, last, chunks - first)
    one += backward(layers, first, last, chunks - last, chunks - first)
    own = forward(kind.before, ahead > 0, 0, max(0, ahead - 1)) + m * one
    waits = 0 if beside or schedule.v_shaped else m * (2 * chunks - first - last)
    fullest = kind.ranks if schedule.v_shaped else kind.ranks[:1]
    return {
        "layers": layers,
        "first": first,
        "last": last,
        # micro-batches whose activations the fullest of these ranks holds at once
        "live": max(in_flight(order.schedule, rank, pp, m, vpp) for rank in fullest),
        # from the first pass of the step to the last that has to follow a rank's own, with its transfers
        "span": own + _behind(kind, schedule, top, m),
        "hops": max(waits, ahead * (1 if schedule.v_shaped else 2)),
        # of the rank alone, after those ahead of it; and up to where the first of its gradients is complete
        "own": own,
        "ready": np.maximum(0.0, own - _left(kind, schedule.after_first_gradient(pp, m, vpp))),
        # of all micro-batches on the rank
        "work": m * one[: len(PIECES)],
        # what the rank reduces last has nothing to hide behind
        "exposed": first and schedule.ends_with_embedding,
    }


def _behind(kind: RankKind, schedule: schedules.Schedule, top: int, micro_batches: int) -> Array:
    """Counts of the ranks ahead, after the last pass of this one: what is known of it."""
    ahead = kind.ranks[-1]
    late = schedule.put_off(micro_batches, ahead)
    if schedule.v_shaped or late is None or not ahead:
        return counted()
    put_off = top - kind.before - late * kind.stage.layers if late else 0
    return backward(kind.before, 1, 0, ahead, ahead - 1) + counted(layer_weight=put_off)


def _left(kind: RankKind, passes: float | None) -> Array:
    """Counts of so many passes through a chunk, the last of a rank: at most."""
    if passes is None:
        return np.full(len(COLUMNS), np.inf)
    layers, first, last = kind.stage
    return backward(passes * -(-layers // kind.chunks), first, last, passes, passes)


def _path(pp: int, order: PassOrder, ranks: Sequence[RankKind], layers: int) -> Mapping[str, Any]:
    """One micro-batch through all stages of a pipeline and back: counts, and transfers; and whether the ends
    of the model are on different ranks.
    """
    schedule, between = schedules.get(order.schedule), pp * ranks[0].chunks - 1
    counts = forward(layers, 1, 1, between) + backward(layers, 1, 1, between, between)
    counts -= counted(layer_weight=layers * schedule.splits)
    return {"counts": counts, "hops": 2 * (between - schedule.v_shaped), "apart": not ranks[0].stage.last}


class Spent(NamedTuple):
    """Seconds of `COLUMNS`, by shape and state, where the device or the network is in the way."""

    device: Array
    network: Array

    def longest(self, counts: Array) -> Array:
        """Seconds of device or network, whichever takes longer, in some counts."""
        return np.maximum(self.device @ counts.T, self.network @ counts.T)


def spent(passes: Records, states: Records, offloads: Array, contention: float) -> Spent:
    """Seconds of some shapes and states; `offloads` says which states copy activations to the host."""
    # collectives beside a layer slow it; those of the ends have nothing beside them
    slowed = {"layer.forward": contention, "layer.backward": contention, "layer.weight": 0.0}
    sent = states["pieces"] * [slowed.get(name, 1.0) for name in PIECES]
    # a layer waits for what of its copies neither it nor the host that issues it hides
    lack = np.maximum(0.0, passes["copying"] - np.maximum(passes["device"], passes["host"]))
    pieces = (passes["device"])[:, None] + sent + offloads[:, None] * lack[:, None]
    waits = np.broadcast_to((1 - contention) * states["waits"], (*pieces.shape[:2], len(WAITS)))
    return Spent(
        np.concatenate([pieces, waits], axis=-1),
        np.concatenate([states["pieces"], np.zeros_like(states["waits"])], axis=-1),
    )


def bounds(block: Block, table: Table) -> Array:
    """Seconds that each plan of a block takes at least: (shapes, orders, states)."""
    known, step = pipelines(block, table), table.sized(block.plan(0))
    ranks, paths, framework = known.ranks, known.paths, step.framework
    # buckets and prefetching are not seen here
    where, states = alike(block.states, "bucket_bytes", "prefetch")
    of_stages, of_state = stage_seconds(table, block.mesh, block.kernels, states, known.stages)
    of_ranks = of_stages[:, known.stage]
    passes = pass_seconds(table, Rank.of(block), block.shapes)
    offloads = np.array([state.offload is Offload.ACTIVATIONS for state in states])
    longest = spent(passes, of_state, offloads, framework.contention).longest
    hops = [hop_s(table, block.mesh, block.batch, block.kernels, shape.sp) for shape in block.shapes]
    hop = np.array(hops)[:, None, None]
    # a host may issue a pass while its rank waits for another, so that hosts' times of several ranks do not
    # add up
    issued = (passes["host"] @ ranks["work"].T)[:, None]
    span = np.maximum(longest(ranks["span"]) + hop * ranks["hops"], issued)
    own = np.maximum(longest(ranks["own"]), issued)
    # reduced beside the last passes, or after them; the first rank is the last to be done
    reduced = (longest(ranks["ready"]) if framework.dp_overlap else own) + of_ranks["reduce"]
    alone = of_state["last_reduce"][:, None] + of_state["tied"][:, None] * paths["apart"]
    ends = np.maximum(np.maximum(span, own + ranks["exposed"] * alone[:, known.pipeline]), reduced)
    path = longest(paths["counts"]) + hop * paths["hops"] + alone
    after = known.most(of_ranks["update"]) + of_state["first_gather"][:, None]
    if not framework.dp_overlap:
        after = after + known.most(of_ranks["regather"])
    # every rank waits for the slowest node, as long as the rank that computes least at least
    steady = np.minimum.reduceat(passes["device"] @ ranks["work"].T, known.starts, axis=-1)[:, None]
    host = framework.step_s + max(0, block.micro_batches - 1) * framework.micro_batch_s
    found = np.maximum(known.most(ends), path) + after + host + step.straggling * steady
    return np.asarray(found[:, where].transpose(0, 2, 1))
