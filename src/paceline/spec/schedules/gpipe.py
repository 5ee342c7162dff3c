"""All forward passes, then all backward passes; with several chunks per rank, breadth first."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.spec.schedules.schedule import Action, Schedule


class GPipe(Schedule):
    """Huang et al., GPipe, NeurIPS 2019."""

    name = "gpipe"
    torch = "GPipe"

    def actions(self, rank: int, pp: int, micro_batches: int, vpp: int = 1) -> Iterator[Action]:
        return (Action(rank, kind, i) for kind in "FB" for i in range(micro_batches))

    def in_flight(self, rank: int, pp: int, micro_batches: int, vpp: int) -> float:
        return float(micro_batches)


class LoopedBFS(Schedule):
    """Lamy-Poirier, Breadth-First Pipeline Parallelism, 2022."""

    name = "looped-bfs"
    chunked = True
    torch = "LoopedBFS"

    def actions(self, rank: int, pp: int, micro_batches: int, vpp: int = 1) -> Iterator[Action]:
        chunks = self.chunks_of(rank, pp, vpp)
        yield from (Action(chunk, "F", i) for chunk in chunks for i in range(micro_batches))
        yield from (
            Action(chunk, "B", i) for chunk in reversed(chunks) for i in reversed(range(micro_batches))
        )

    def after_first_gradient(self, pp: int, micro_batches: int, vpp: int) -> int:
        return 1 + (vpp - 1) * micro_batches

    def in_flight(self, rank: int, pp: int, micro_batches: int, vpp: int) -> float:
        return float(micro_batches)
