"""What follows from a pipeline's schedule: the order in which passes can run, and how long ranks wait for one
another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from paceline.errors import PlanError
from paceline.spec import schedules
from paceline.spec.schedules import Action, Schedule


def actions(schedule: str, rank: int, pp: int, micro_batches: int, vpp: int = 1) -> list[Action]:
    """What a rank runs, in order."""
    return list(schedules.get(schedule).actions(rank, pp, micro_batches, vpp))


def span_s(
    schedule: str,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    hop_s: float,
    overlap: bool,
) -> float:
    """Seconds of GPipe or 1F1B from each stage's passes and the transfers between stages, which may `overlap`
    passes.

    In 1F1B, a stage's two passes and the transfers to and from the one behind it follow from each other, so
    that overlap does not help.
    """
    pp = len(forward)
    if schedule == "gpipe" and overlap:
        return 2 * hop_s * (pp - 1) + sum(
            sum(way) + (micro_batches - 1) * max(way) for way in (forward, backward)
        )
    f = [seconds + hop_s * (i < pp - 1) for i, seconds in enumerate(forward)]
    b = [seconds + hop_s * (i < pp - 1 or not overlap) for i, seconds in enumerate(backward)]
    if schedule == "gpipe":
        return sum(sum(way) + (micro_batches - 1) * max(way) for way in (f, b))
    most = 0.0
    for i in range(pp):
        # a stage runs as many forward passes ahead as there are stages behind it, and has as many backward
        # passes left after the last one; with no more micro-batches than that, it waits once for those behind
        # it, else twice
        ahead, behind = min(pp - 1 - i, micro_batches - 1), sum(f[i + 1 :]) + sum(b[i + 1 :])
        idle = max(0.0, behind - ahead * f[i]), max(0.0, behind - ahead * b[i])
        most = max(
            most,
            sum(f[:i])
            + sum(b[:i])
            + micro_batches * (f[i] + b[i])
            + (sum(idle) if micro_batches > pp - i else max(idle)),
        )
    return most


def bubble_s(
    schedule: str,
    pp: int,
    micro_batches: int,
    vpp: int,
    passes: tuple[float, float, float],
    head: tuple[float, float],
    hop_s: float,
    overlap: bool,
) -> float:
    """Seconds for which the busiest rank of a pipeline waits or sends.

    `passes` are seconds forward, backward, and of the latter what a schedule may put off, the same for all
    chunks; `head` is what the last one takes more.
    """
    unit = passes[0] + passes[1]
    if unit <= 0:
        return 0.0
    # ratios decide; rounded, equal ones are recognised
    shape = (round(seconds / unit, 6) for seconds in (passes[0], min(passes[2], 0.95 * passes[1]), *head))
    few, hop = min(micro_batches, 4 * pp + micro_batches % pp), float(f"{hop_s / unit:.5e}")
    return unit * _bubble(schedules.get(schedule), pp, few, vpp, *shape, hop, overlap)


@lru_cache(maxsize=65536)
def _bubble(
    schedule: Schedule,
    pp: int,
    micro_batches: int,
    vpp: int,
    forward: float,
    weight: float,
    head_forward: float,
    head_backward: float,
    hop: float,
    overlap: bool,
) -> float:
    """Waiting time of a pipeline by walking through its actions; more micro-batches than a few times its
    length do not change it.
    """
    spent = {"F": forward, "B": 1 - forward, "I": 1 - forward - weight, "W": weight}
    head = {"F": head_forward, "B": head_backward, "I": head_backward, "W": 0.0}
    ends: dict[tuple[int, str, int], float] = {}
    clock, last = [0.0] * pp, pp * vpp - 1
    ranks = [list(schedule.actions(rank, pp, micro_batches, vpp)) for rank in range(pp)]
    for rank, action in in_order(ranks, last + 1):
        ready = max((ends[source] for source in sources(action, last + 1)), default=0.0)
        took = spent[action.kind] + (head[action.kind] if action.chunk == last else 0.0)
        clock[rank] = max(clock[rank], ready) + max(0.0, took)
        if action.kind == "W":
            continue
        target = action.chunk + (1 if action.kind == "F" else -1)
        sends = hop if 0 <= target <= last and schedule.rank_of(target, pp) != rank else 0.0
        ends[action.chunk, action.passes, action.micro_batch] = clock[rank] + sends
        clock[rank] += 0.0 if overlap else sends
    return max(clock) - micro_batches * (vpp + max(0.0, head_forward + head_backward))


def sources(action: Action, chunks: int) -> list[tuple[int, str, int]]:
    """What of another chunk a pass needs: (chunk, F or B, micro-batch)."""
    neighbour = action.chunk - 1 if action.kind == "F" else action.chunk + 1
    return (
        [(neighbour, action.passes, action.micro_batch)]
        if action.kind != "W" and 0 <= neighbour < chunks
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
                    (action.chunk, action.kind if action.kind == "W" else action.passes, action.micro_batch)
                )
                places[rank] += 1
        if len(done) == before:
            raise PlanError("the pipeline's ranks wait for one another")
