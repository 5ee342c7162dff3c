"""A lower bound on the simulated time of every plan of a block, as one array.

A rank of a pipeline cannot start before the passes ahead of it, runs everything it holds for every
micro-batch, and is followed by the backward passes of the ranks before it. Passes take what their operators
take, what gathering their parameters takes, or what the host takes to issue them, whichever is longest. After
that the last bucket of gradients is reduced and parameters are updated. Each term is one that the simulation
cannot avoid, so the bound holds for it; where communication hides and stages are even it is close.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.plan.space import Block, Choice, distinct
from paceline.plan.table import Row, State, Table
from paceline.spec import schedules

Array = NDArray[np.float64]
#: seconds of a pass: layers, embedding and head, forward and backward, and of the layers' weight gradients;
#: and what a pass adds: the wait for its first gather unless the embedding (forward) or the head (backward)
#: runs meanwhile, and for its last scatter unless the embedding does
_LF, _LB, _EF, _EB, _HF, _HB, _LW, _FORWARD, _BACKWARD, _SCATTER = range(10)
_COLUMNS = 10
#: of these, what operators take
_WORK = slice(0, 6)


@dataclass(frozen=True, slots=True)
class Counts:
    """How often each of a pass' seconds is spent, one line per kind of rank, those of an order one after
    another.
    """

    #: from the first pass of the step to the last that has to follow a rank's own
    span: Array
    #: of the rank alone, after those ahead of it
    own: Array
    #: the same up to where the first of its gradients is complete; lines of which nothing is known are zero
    ready: Array
    #: of all micro-batches on the rank
    work: Array
    #: transfers between stages on the way of `span`
    hops: Array
    #: whether a line is the first rank's, and what it reduces last has nothing to hide behind
    first: NDArray[np.bool_]
    #: where each order's lines start
    starts: NDArray[np.int64]
    #: of each order, one micro-batch through all stages and back; and its transfers
    path: Array
    path_hops: Array


def counts(
    orders: Sequence[tuple[Choice, Sequence[Row]]], layers: int, pp: int, micro_batches: int, beside: bool
) -> Counts:
    """Counts of some orders of a model's `layers`; `beside` says whether transfers run beside passes."""
    lines: list[tuple[Any, ...]] = []
    starts, paths, hops = [], [], []
    for order, rows in orders:
        starts.append(len(lines))
        lines += [_line(order, row, rows[0].layers, pp, micro_batches, beside) for row in rows]
        chunks, path = pp * rows[0].chunks, np.ones(_COLUMNS)
        path[[_LF, _LB]] = layers
        path[_LW] = -layers if schedules.get(order["schedule"]).splits else 0
        path[[_FORWARD, _BACKWARD, _SCATTER]] = chunks - 1
        paths.append(path)
        hops.append(2 * (chunks - 1) - (2 if schedules.get(order["schedule"]).v_shaped else 0))
    span, own, ready, work, far, first = (np.array(column) for column in zip(*lines, strict=True))
    return Counts(span, own, ready, work, far, first, np.array(starts), np.array(paths), np.array(hops))


def _line(
    order: Choice, row: Row, top: int, pp: int, m: int, beside: bool
) -> tuple[Array, Array, Array, Array, int, bool]:
    """One line of `Counts`; `top` layers are the first rank's."""
    schedule = schedules.get(order["schedule"])
    one, ahead, tail, left = (np.zeros(_COLUMNS) for _ in range(4))
    one[[_LF, _LB]] = row.layers
    one[[_EF, _EB]], one[[_HF, _HB]] = row.first, row.last
    one[[_FORWARD, _BACKWARD, _SCATTER]] = (
        row.chunks - row.first,
        row.chunks - row.last,
        row.chunks - row.first,
    )
    if row.ahead:
        ahead[[_LF, _EF, _FORWARD]] = row.before, 1, row.ahead - 1
        tail[[_LB, _EB, _BACKWARD, _SCATTER]] = row.before, 1, row.ahead, row.ahead - 1
    late = schedule.put_off(m, row.ahead)
    if schedule.v_shaped or late is None:
        tail[:] = 0.0
    elif late and row.ahead:
        tail[_LW] = top - row.before - late * row.layers
    many = schedule.after_first_gradient(pp, m, int(order["vpp"]))
    own, ready = ahead + m * one, np.zeros(_COLUMNS)
    if many is not None:
        left[_LB] = many * -(-row.layers // row.chunks)
        left[[_EB, _HB]], left[[_BACKWARD, _SCATTER]] = one[[_EB, _HB]], many
        ready = np.maximum(0.0, own - left)
    waits = 0 if beside or schedule.v_shaped else m * (2 * row.chunks - row.first - row.last)
    hops = max(waits, row.ahead * (1 if schedule.v_shaped else 2)) if pp > 1 else 0
    return own + tail, own, ready, m * one, hops, row.ahead == 0 and schedule.ends_with_embedding


def passes(
    pieces: Array, copies: Array, states: Sequence[State], kinds: Sequence[Choice], contention: float
) -> Array:
    """Seconds of `Counts`' columns when passes are bound by device, network or host: (3, shapes, states,
    columns).
    """
    out = np.zeros((3, len(pieces), len(states), _COLUMNS))
    device, host = pieces[:, 0], pieces[:, 1]
    out[0, :, :, : _LW + 1], out[2, :, :, : _LW + 1] = device[:, None], host[:, None]
    out[2, :, :, _LW] = out[2, :, :, _LB]  # who issues weight gradients late is not known
    for u, (state, kind) in enumerate(zip(states, kinds, strict=True)):
        # a layer waits for what of its copies neither it nor the host that issues it hides
        if kind["offload"] == "activations":
            out[0, :, u, : _LB + 1] += np.maximum(
                0.0, copies[:, None] - np.maximum(device, host)[:, : _LB + 1]
            )
        back = state.gather_s if kind.get("reshard", True) else 0.0
        sent = np.array(
            [
                state.gather_s,
                back + state.scatter_s,
                *np.ravel([*zip(state.ends_gather_s, state.ends_scatter_s, strict=True)]),
            ]
        )
        out[1, :, u, _WORK], out[1, :, u, _LW] = sent, sent[_LB]
        # what is beside operators slows them; the ends', the first gather and the last scatter of a pass are
        # beside nothing
        slowed = sent * np.array([contention, contention, 1, 1, 1, 1])
        out[0, :, u, _WORK] += slowed
        out[0, :, u, _FORWARD:] = (1 - contention) * np.array([state.gather_s, back, state.scatter_s])
    return out


def bounds(block: Block, table: Table) -> Array:
    """Seconds that each plan of a block takes at least: (shapes, orders, states)."""
    pieces = np.stack([table.pieces(block, shape) for shape in block.shapes])
    # buckets and prefetching are not seen here
    where, kinds = distinct(block.states, ("sharding", "shard", "reshard", "offload"))
    step = table.step(block, block.shapes[0])
    f, mesh, m = step.framework, block.mesh, block.micro_batches
    rows = [table.rows(block, order) for order in block.orders]
    known = table.once(
        (
            "counts",
            mesh.pp,
            m,
            f.p2p_overlap,
            tuple((order["schedule"], order["vpp"]) for order in block.orders),
        ),
        lambda: counts(
            [*zip(block.orders, rows, strict=True)], table.model.layers, mesh.pp, m, f.p2p_overlap
        ),
    )
    kept = table.stacked(block, kinds)
    spent = passes(pieces, table.copying(block), kept.first, kinds, f.contention)
    hop = table.hops(block)[:, None, None]
    per_line = np.repeat(np.arange(len(rows)), [len(found) for found in rows])
    once, last, early, update = kept.tied_s, kept.last_reduce_s, kept.first_gather_s, kept.update_s
    # a host may issue a pass while its rank waits for another, so that hosts' times of several ranks do not
    # add up
    issued, spent = spent[2] @ known.work.T, spent[:2]
    span = np.maximum((spent @ known.span.T).max(axis=0) + hop * known.hops, issued)
    own = np.maximum((spent @ known.own.T).max(axis=0), issued)
    # reduced beside the last passes, or after them; the first rank is the last to be done
    begin = (spent @ known.ready.T).max(axis=0) if f.dp_overlap else own
    tail = np.where(known.first, (last + once)[:, per_line], 0.0)
    ends = np.maximum(np.maximum(span, own + tail), begin + kept.reduce_s)
    path = (spent @ known.path.T).max(axis=0) + hop * known.path_hops + last + once
    longest = np.maximum(np.maximum.reduceat(ends, known.starts, axis=-1), path)
    after = update + (0.0 if f.dp_overlap else np.maximum.reduceat(kept.regather_s, known.starts, axis=-1))
    # every rank waits for the slowest node, as long as the rank that computes least at least
    steady = np.minimum.reduceat(pieces[:, 0, _WORK] @ known.work[:, _WORK].T, known.starts, axis=-1)[:, None]
    found = longest + after + early + f.step_s + max(0, m - 1) * f.micro_batch_s + step.straggling * steady
    return np.asarray(found[:, where].transpose(0, 2, 1))
