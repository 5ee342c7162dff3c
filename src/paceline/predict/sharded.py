"""Parameters that are sharded over data-parallel ranks: gathered block by block ahead of each pass, gradients
scattered behind it; for layers of a transformer and for blocks of a captured module alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
) -> Iterator[Transfer]:
    """The collectives of one pass, given its blocks in the order in which it runs them, and what is in none
    of them, which stays whole through the forward and the backward pass.

    A block is gathered when there is memory for it: when the one before those gathered ahead is done. Parts
    of a pass that were put off ("W") have their parameters still, and only scatter.
    """
    if root is not None and kind == "F":
        yield Transfer(root.gathers, 0, root.first)
    if kind == "F" or (kind != "W" and plan.reshard):
        for turn, block in enumerate(blocks):
            ahead = turn - plan.prefetch
            yield Transfer(block.gathers, blocks[ahead].first if ahead >= 0 else 0, block.first)
    if kind in "BW":
        yield from (Transfer(block.scatters, block.end if kind == "B" else END) for block in blocks)
        if root is not None:
            yield Transfer(root.scatters, END)
