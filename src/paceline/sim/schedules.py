"""What follows from a pipeline's schedule: the order in which passes can run, and what each waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from paceline.errors import PlanError
from paceline.spec import schedules
from paceline.spec.schedules import Action, Schedule
from paceline.spec.vocabulary import PassKind


def actions(schedule: str, rank: int, pp: int, micro_batches: int, vpp: int = 1) -> list[Action]:
    """What a rank runs, in order."""
    return list(schedules.get(schedule).actions(rank, pp, micro_batches, vpp))


def kinds(schedule: str) -> str:
    """Kinds of passes that its ranks run."""
    return "FBIW" if schedules.get(schedule).splits else "FB"


def sources(action: Action, chunks: int) -> list[tuple[int, str, int]]:
    """What of another chunk a pass needs: (chunk, F or B, micro-batch)."""
    neighbour = action.chunk - 1 if action.kind == PassKind.FORWARD else action.chunk + 1
    return (
        [(neighbour, action.passes, action.micro_batch)]
        if action.kind != PassKind.WEIGHT and 0 <= neighbour < chunks
        else []
    )


def in_order(ranks: Sequence[Sequence[Action]], chunks: int) -> Iterator[tuple[int, Action]]:
    """All ranks' actions, each after what it needs: (rank, action)."""
    done: set[tuple[int, str, int]] = set()
    places = [0] * len(ranks)
    while any(place < len(mine) for place, mine in zip(places, ranks, strict=True)):
        before = len(done)
        for rank, mine in enumerate(ranks):
            while places[rank] < len(mine) and done.issuperset(sources(mine[places[rank]], chunks)):
                action = mine[places[rank]]
                yield rank, action
                done.add(
                    (
                        action.chunk,
                        action.kind if action.kind == PassKind.WEIGHT else action.passes,
                        action.micro_batch,
                    )
                )
                places[rank] += 1
        if len(done) == before:
            raise PlanError("the pipeline's ranks wait for one another")


def in_flight(schedule: str, index: int, pp: int, micro_batches: int, vpp: int = 1) -> float:
    """Micro-batches whose activations a rank of a pipeline holds at once; parts of one where it holds several
    chunks.

    Activations are held until the weights' gradients are done, which some schedules put off.
    """
    if pp == 1:
        return 1.0
    order = schedules.get(schedule)
    known = order.in_flight(index, pp, micro_batches, vpp)
    if known is not None:
        return known
    few = min(micro_batches, 4 * pp)
    found = _walked(order, index, pp, few, vpp)
    steady = few == micro_batches or found == _walked(order, index, pp, min(micro_batches, 2 * few), vpp)
    return found if steady else _walked(order, index, pp, micro_batches, vpp)


@lru_cache(maxsize=65536)
def _walked(schedule: Schedule, index: int, pp: int, micro_batches: int, vpp: int) -> float:
    """`in_flight`, counted along a rank's actions."""
    chunks = schedule.chunks_per_rank(vpp)
    return most_live(schedule.actions(index, pp, micro_batches, vpp), [1] * pp * chunks) / chunks


def most_live(order: Iterable[Action], sizes: Sequence[float]) -> float:
    """The most activations at once along a rank's actions, which leave so many in each chunk of the model."""
    live = most = 0.0
    for action in order:
        live += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0) * sizes[action.chunk]
        most = max(most, live)
    return most
