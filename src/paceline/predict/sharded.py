"""Parameters that are sharded over data-parallel ranks: gathered block by block ahead of each pass, gradients
scattered behind it; for layers of a transformer and for blocks of a captured module alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.sim.program import Label
from paceline.sim.work import END, Transfer
from paceline.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedBlock:
    """Parameters that are gathered together."""

    #: what makes them whole, and what reduces their gradients and leaves each rank its part
    gathers: tuple[Label, ...]
    scatters: tuple[Label, ...]
    #: places in a pass: where it first needs them, and where it has used them
    first: int = 0
    end: int = END


def transfers(
    plan: Plan, kind: str, root: ShardedBlock | None, blocks: Sequence[ShardedBlock]
) -> tuple[Transfer, ...]:
    """The collectives of one pass by release, given its blocks in the order in which it runs them, and what
    is in none of them, which stays whole through the forward and the backward pass.

    A block is gathered when there is memory for it: when the one before those gathered ahead is done.
    Gradients of blocks may be put off ("W"): these have their parameters still, and only scatter.
    """
    roots = [root] if root is not None else []
    out: list[Transfer] = []
    # of what may start at the same time, torch sends gradients first
    if kind in "BW":
        out += (Transfer(block.scatters, block.end) for block in blocks)
    if kind in "BI":
        out += (Transfer(block.scatters, END) for block in roots)
    if kind == "F":
        out += (Transfer(block.gathers, 0, block.first) for block in roots)
    if kind == "F" or (kind != "W" and plan.reshard):
        starts = [0] * plan.prefetch + [block.first for block in blocks]
        out += (Transfer(b.gathers, start, b.first) for start, b in zip(starts, blocks, strict=False))
    return tuple(sorted(out, key=lambda transfer: transfer.release))
