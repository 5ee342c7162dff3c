"""Forward passes until the first backward pass can start, then one of each in turn."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.spec.schedules.schedule import Action, Schedule


def round_of(micro_batches: int, pp: int) -> int:
    """Micro-batches of one round; a round that is not full comes last: torch refuses it, Megatron runs it."""
    return micro_batches // max(1, micro_batches // pp)


class OneForwardOneBackward(Schedule):
    """Narayanan et al., PipeDream, SOSP 2019, with the flush of Megatron-LM."""

    name = "1f1b"
    torch = "1F1B"

    def actions(self, rank: int, pp: int, micro_batches: int, vpp: int = 1) -> Iterator[Action]:
        each, chunks = round_of(micro_batches, pp), self.chunks_of(rank, pp, vpp)
        rounds = [range(start, min(start + each, micro_batches)) for start in range(0, micro_batches, each)]
        ahead = [Action(chunk, "F", i) for batch in rounds for chunk in chunks for i in batch]
        undo = [
            Action(chunk, "I" if self.splits else "B", i)
            for batch in rounds
            for chunk in reversed(chunks)
            for i in batch
        ]
        warm = min(self._warm(pp - 1 - rank, each, vpp), len(ahead))
        yield from ahead[:warm]
        for i, action in enumerate(undo):
            yield from ahead[warm + i : warm + i + 1]
            yield action
            if self.splits and i >= rank:
                yield undo[i - rank]._replace(kind="W")
        if self.splits:
            yield from (action._replace(kind="W") for action in undo[max(0, len(undo) - rank) :])

    def _warm(self, behind: int, each: int, vpp: int) -> int:
        """Forward passes ahead of the first backward pass: one for each rank behind."""
        return (vpp - 1) * each + behind

    def least_micro_batches(self, pp: int, vpp: int, in_torch: bool) -> int:
        return pp if in_torch else 1

    def in_flight(self, rank: int, pp: int, micro_batches: int, vpp: int) -> float:
        return float(min(micro_batches, pp - rank))


class Interleaved(OneForwardOneBackward):
    """Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021."""

    name = "interleaved"
    chunked = True
    equal_rounds = True
    torch = "Interleaved1F1B"

    def _warm(self, behind: int, each: int, vpp: int) -> int:
        """A rank with several chunks waits for two passes of each rank behind it."""
        return (vpp - 1) * each + 2 * behind

    def least_micro_batches(self, pp: int, vpp: int, in_torch: bool) -> int:
        return pp if vpp > 1 else 1

    def after_first_gradient(self, pp: int, micro_batches: int, vpp: int) -> int:
        each = round_of(micro_batches, pp)
        last_round = micro_batches % each or each
        return 1 + (vpp - 1) * last_round

    def in_flight(self, rank: int, pp: int, micro_batches: int, vpp: int) -> float:
        return min(micro_batches, ((vpp - 1) * round_of(micro_batches, pp) + 2 * (pp - 1 - rank) + 1) / vpp)


class ZeroBubbleH1(OneForwardOneBackward):
    """Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024: ZB-H1."""

    name = "zb-h1"
    splits = True
    equal_rounds = True
    torch = "InterleavedZeroBubble"
    trains = False

    def least_micro_batches(self, pp: int, vpp: int, in_torch: bool) -> int:
        return 1

    def in_flight(self, rank: int, pp: int, micro_batches: int, vpp: int) -> float:
        # as many weight gradients are put off as there are ranks before this one
        return float(min(micro_batches, pp))

    def put_off(self, micro_batches: int, ahead: int) -> int:
        return min(micro_batches, ahead + 1)
