"""Where a captured step can be cut into stages: what runs on either side of each place, and what passes
through it.

A place to cut lies between two modules of the forward pass where one activation and nothing else passes, or
at the edge of a repeated block. Places follow from which operator reads what another wrote, so any module has
them, and a skip connection or a table of positions that all blocks share is seen for what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.spec.vocabulary import Phase
from paceline.spec.workload import Op, Workload

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CutPlace:
    """A place to cut: the first operator behind it (numbered over the written-out step), and the bytes that
    pass.
    """

    operator: int
    bytes: float


def written_out(workload: Workload) -> list[tuple[int, Op]]:
    """Every operator that runs, with its entry in the workload's order."""
    return [(entry, op) for entry, index in enumerate(workload.order) for op in workload.segments[index].ops]


def places(workload: Workload) -> list[CutPlace]:
    """All places to cut the forward pass at, in order."""
    forward = [
        (i, entry, op) for i, (entry, op) in enumerate(written_out(workload)) if op.phase == Phase.FORWARD
    ]
    count, passing = _passing(
        [op for _, _, op in forward], {p.name.rpartition(".")[0] for p in workload.parameters}
    )
    out = []
    for k in range(len(forward) - 1):
        (_, entry, op), (i, after, other) = forward[k], forward[k + 1]
        edge = entry != after and any(workload.segments[workload.order[e]].path for e in (entry, after))
        if count[k] and (edge or (count[k] == 1 and op.module != other.module)):
            out.append(CutPlace(i, float(passing[k])))
    return out


def _passing(ops: Sequence[Op], owners: set[str]) -> tuple[NDArray[np.int64], Array]:
    """How many activations, and bytes of them, pass behind each operator to a later one.

    An activation is what a module that owns parameters computed, or what was computed from another
    activation; what is neither (masks, tables of positions) every stage can make for itself.
    """
    count, size = np.zeros(len(ops) + 1, dtype=np.int64), np.zeros(len(ops) + 1)
    # tensor -> operator that wrote it, the last that read it, bytes
    made: dict[int, tuple[int, int, int]] = {}

    def close(tensor: int) -> None:
        start, last, held = made.pop(tensor)
        if last > start:
            count[start] += 1
            count[last] -= 1
            size[start] += held
            size[last] -= held

    for i, op in enumerate(ops):
        active = op.module in owners or any(access.tensor in made for access in op.reads)
        for access in op.reads:
            if access.tensor in made:
                start, _, held = made[access.tensor]
                made[access.tensor] = start, i, held
        for access in op.writes:
            if access.tensor in made:
                close(access.tensor)
            if active:
                made[access.tensor] = i, i, access.bytes
    for tensor in list(made):
        close(tensor)
    return np.cumsum(count)[:-1], np.cumsum(size)[:-1]


def backward_places(
    workload: Workload, cut: Sequence[int], visits: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> NDArray[np.int64]:
    """The chunk of every operator of the step, given the first operators of all chunks but the first.

    `visits` pairs entries of the forward pass with those of the backward pass that undo them. An operator of
    the backward pass belongs with the forward operators of its module; one of no module with what ran before
    it. The update belongs to no chunk (-1).
    """
    ops = written_out(workload)
    chunk = np.full(len(ops), -1, dtype=np.int64)
    forward = [i for i, (_, op) in enumerate(ops) if op.phase == Phase.FORWARD]
    chunk[forward] = np.searchsorted(np.array(cut), np.array(forward), side="right")
    pair = {entry: n for n, (_, undone) in enumerate(visits) for entry in undone}
    homes: list[dict[str, int]] = [{} for _ in visits]
    of_entry = {entry: n for n, (done, _) in enumerate(visits) for entry in done}
    for i in forward:
        entry, op = ops[i]
        if entry in of_entry:
            homes[of_entry[entry]][op.module] = int(chunk[i])
    at = len(cut)
    for i, (entry, op) in enumerate(ops):
        if op.phase in (Phase.BACKWARD, Phase.RECOMPUTE):
            home = homes[pair[entry]] if entry in pair else {}
            found = home.get(op.module) if op.module else None
            if found is None and home and op.module:  # fused with another, or the sum of two branches
                found = max(
                    (
                        c
                        for module, c in home.items()
                        if op.module.startswith(module) or module.startswith(op.module)
                    ),
                    default=None,
                )
            at = min(at, at if found is None else found)
            chunk[i] = at
    return chunk


def balanced(weights: Array, cuts: int) -> list[int]:
    """Which of the places between parts to cut at (as many as `cuts`), so that the heaviest chunk is as light
    as can be.

    `weights` are the seconds of the parts between all places; the k-th place is behind the k-th part.
    """
    total = np.concatenate([[0.0], np.cumsum(weights)])
    parts = len(weights)
    best = total[1:].copy()  # of the first j + 1 parts in one chunk
    choice = []
    for k in range(1, cuts + 1):
        now, where = np.full(parts, np.inf), np.zeros(parts, dtype=np.int64)
        for j in range(k, parts):
            heaviest = np.maximum(best[k - 1 : j], total[j + 1] - total[k : j + 1])
            where[j] = k - 1 + int(heaviest.argmin())
            now[j] = heaviest.min()
        best = now
        choice.append(where)
    out, j = [], parts - 1
    for where in reversed(choice):
        j = int(where[j])
        out.append(j)
    return out[::-1]
