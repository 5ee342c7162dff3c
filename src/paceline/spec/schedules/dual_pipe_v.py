"""DualPipeV: two chunks on each rank; in the middle each forward pass is paired with the backward pass of
another micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from paceline.errors import PlanError
from paceline.spec.schedules.schedule import Action, Schedule
from paceline.spec.vocabulary import PassKind


class DualPipeV(Schedule):
    """DeepSeek-AI, DualPipe, 2025, cut in half to a V (Sea AI Lab)."""

    name = "dualpipev"
    v_shaped = True
    splits = True
    torch = "DualPipeV"
    ends_with_embedding = True

    def actions(self, rank: int, pp: int, micro_batches: int, vpp: int = 1) -> Iterable[Action]:
        least = self.least_micro_batches(pp, vpp, in_torch=False)
        if micro_batches < least:
            raise PlanError(
                f"dualpipev needs at least 2 x pp {pp} = {least} micro-batches, but there are {micro_batches}"
            )
        return _Dual(rank, pp, micro_batches).actions()

    def least_micro_batches(self, pp: int, vpp: int, in_torch: bool) -> int:
        return 2 * pp


class _Dual:
    """The passes of one rank as they are written down."""

    def __init__(self, rank: int, pp: int, micro_batches: int) -> None:
        self.rank, self.pp, self.count = rank, pp, micro_batches
        self.chunks = (rank, 2 * pp - 1 - rank)
        self.done = {(which, kind): 0 for which in (0, 1) for kind in "FB"}
        self.late: deque[Action] = deque()
        self.out: list[Action] = []

    def run(self, which: int, kind: str) -> None:
        counter = which, "F" if kind == PassKind.FORWARD else "B"
        self.out.append(Action(self.chunks[which], kind, self.done[counter]))
        self.done[counter] += 1
        if kind == PassKind.INPUT:
            self.late.append(self.out[-1]._replace(kind="W"))

    def weight(self) -> None:
        if self.late:
            self.out.append(self.late.popleft())

    def actions(self) -> list[Action]:
        rank, after = self.rank, self.pp - self.rank - 1
        for _ in range(2 * after):
            self.run(0, "F")
        for _ in range(rank + 1):
            self.run(0, "F")
            self.run(1, "F")
        for _ in range(after):
            self.run(1, "I")
            self.weight()
            self.run(1, "F")
        for _ in range(self.count - 2 * self.pp + rank + 1):
            for forward, backward in ((0, 1), (1, 0)):
                self.run(forward, "F")
                self.run(backward, "B")
        for _ in range(after):
            self.run(1, "B")
            self.run(1, "F")
            self.run(0, "B")
        split = False
        for i in range(rank + 1):
            for which, odd in ((1, 1), (0, 0)):  # the second half of these put their weight gradients off
                split = split or (i == (rank + 1) // 2 and rank % 2 == odd)
                self.run(which, "I" if split else "B")
        for _ in range(after):
            self.weight()
            self.run(0, "I" if split else "B")
        for _ in range(rank + 1):
            self.weight()
        return self.out
