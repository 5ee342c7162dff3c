"""ZB-V: two chunks on each rank, whose passes fill each other's bubbles."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.spec.schedules.schedule import Action, Schedule


class ZeroBubbleV(Schedule):
    """Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024: ZB-V."""

    name = "zb-v"
    v_shaped = True
    splits = True
    torch = "ZBVZeroBubble"
    ends_with_embedding = True

    def actions(self, rank: int, pp: int, micro_batches: int, vpp: int = 1) -> Iterator[Action]:
        whole = _actions(rank, pp, max(2 * pp - 1, micro_batches))
        return (action for action in whole if action.micro_batch < micro_batches)


def _actions(rank: int, pp: int, micro_batches: int) -> Iterator[Action]:
    chunks = (rank, 2 * pp - 1 - rank)
    done = {(which, kind): 0 for which in (0, 1) for kind in "FIW"}

    def run(which: int, kinds: str) -> Iterator[Action]:
        for kind in kinds:
            yield Action(chunks[which], kind, done[which, kind])
            done[which, kind] += 1

    for _ in range(2 * (pp - rank) - 1):
        yield from run(0, "F")
    for _ in range(rank):
        yield from run(1, "F")
        yield from run(0, "F")
    for _ in range(pp - rank):
        yield from run(1, "FIW")
    while done[1, "F"] < done[0, "F"] or done[0, "F"] < micro_batches:
        if done[0, "F"] < micro_batches:
            yield from run(0, "F")
        yield from run(0, "IW")
        yield from run(1, "FIW")
    for _ in range(rank):
        yield from run(0, "I")
        yield from run(1, "I")
    for _ in range(pp - rank):
        yield from run(0, "IW")
    for which in (1, 0):
        while done[which, "W"] < done[which, "I"]:
            yield from run(which, "W")
