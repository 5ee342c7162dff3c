"""Parameters that are sharded over data-parallel ranks: gathered block by block ahead of each pass, gradients
scattered behind it; for layers of a transformer and for blocks of a captured module alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.sim.mesh import Mesh
from paceline.sim.work import END, GATHERS, Exchange, Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedBlock:
    """Parameters that are gathered together."""

    #: bytes of the parameters as they are gathered, and of their gradients as they are reduced
    gathered: float
    scattered: float
    #: places in a pass: where it first needs them, and where it has used them
    first: int = 0
    end: int = END

    def gather(self, mesh: Mesh, release: int) -> Transfer:
        return Transfer(mesh.labels(gather(self.gathered), GATHERS), release, self.first)

    def scatter(self, mesh: Mesh, release: int, reduction: str) -> Transfer:
        return Transfer(mesh.labels(scatter(self.scattered, mesh.shards), reduction), release)


def gather(size: float) -> list[Exchange]:
    """What makes sharded parameters of so many bytes whole."""
    return [("all_gather", size, "shard")]


def scatter(size: float, shards: int) -> list[Exchange]:
    """What reduces their gradients and leaves each rank its part."""
    return [("reduce_scatter", size, "shard"), ("all_reduce", size / shards, "replicas")]


def transfers(
    mesh: Mesh, kind: str, root: ShardedBlock | None, blocks: Sequence[ShardedBlock], reduction: str
) -> tuple[Transfer, ...]:
    """The collectives of one pass by release, given its blocks in the order in which it runs them, and what
    is in none of them, which stays whole through the forward and the backward pass; `reduction` is the line
    of the breakdown that gradients belong to.

    A block is gathered when there is memory for it: when the one before those gathered ahead is done.
    Gradients of blocks may be put off ("W"): these have their parameters still, and only scatter.
    """
    out: list[Transfer] = []
    # of what may start at the same time, torch sends gradients first
    if kind in "BW":
        out += (block.scatter(mesh, block.end, reduction) for block in blocks)
    if kind in "BI" and root is not None:
        out.append(root.scatter(mesh, END, reduction))
    if kind == "F" and root is not None:
        out.append(root.gather(mesh, 0))
    if kind == "F" or (kind != "W" and mesh.plan.reshard):
        starts = [0] * mesh.plan.prefetch + [block.first for block in blocks]
        out += (block.gather(mesh, start) for start, block in zip(starts, blocks, strict=False))
    return tuple(sorted(out, key=lambda transfer: transfer.release))
