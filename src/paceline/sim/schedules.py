"""Pipeline schedules: what each rank of a pipeline runs, in order.

The same lists that the classes of `torch.distributed.pipelining` hold (a test compares them), written out here so that
a prediction needs no torch. An action is (chunk, kind, micro-batch); kinds are those of torch: F forward, B backward,
and, where a schedule puts weight gradients off, I for the inputs' gradients and W for the weights'.

Chunks are numbered along the model. Rank r holds r, r + pp, r + 2 pp, ...; in the schedules shaped like a V, r and
2 pp - 1 - r, so that the first rank has both ends of the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from paceline.errors import PlanError
from paceline.spec.plan import V_SHAPED as V_SHAPED

#: schedules that split the backward pass
SPLIT = ("zb-h1", *V_SHAPED)


class Action(NamedTuple):
    """One pass of one micro-batch through one chunk."""

    chunk: int
    kind: str
    micro_batch: int

    @property
    def passes(self) -> str:
        """F or B: what the next chunk waits for."""
        return "F" if self.kind == "F" else "B"

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"


def chunks_per_rank(schedule: str, vpp: int) -> int:
    """Chunks that one rank holds."""
    return 2 if schedule in V_SHAPED else vpp


def chunks_of(schedule: str, rank: int, pp: int, vpp: int) -> tuple[int, ...]:
    """The chunks of a rank, in the order of the model."""
    return (rank, 2 * pp - 1 - rank) if schedule in V_SHAPED else tuple(range(rank, pp * vpp, pp))


def rank_of(schedule: str, chunk: int, pp: int) -> int:
    """The rank that holds a chunk."""
    return 2 * pp - 1 - chunk if schedule in V_SHAPED and chunk >= pp else chunk % pp


def actions(schedule: str, rank: int, pp: int, micro_batches: int, vpp: int = 1) -> list[Action]:
    """What a rank runs, in order."""
    if schedule == "gpipe":
        return [Action(rank, kind, i) for kind in "FB" for i in range(micro_batches)]
    if schedule == "looped-bfs":
        chunks = chunks_of(schedule, rank, pp, vpp)
        ahead = [Action(chunk, "F", i) for chunk in chunks for i in range(micro_batches)]
        return ahead + [Action(chunk, "B", i) for chunk in reversed(chunks) for i in reversed(range(micro_batches))]
    if schedule == "zb-v":
        return [action for action in _zero_bubble_v(rank, pp, max(2 * pp - 1, micro_batches)) if action.micro_batch < micro_batches]
    if schedule == "dualpipev":
        if micro_batches < 2 * pp:
            raise PlanError(f"dualpipev needs at least 2 x pp {pp} = {2 * pp} micro-batches, but there are {micro_batches}")
        return _Dual(rank, pp, micro_batches).actions()
    if schedule in ("1f1b", "interleaved", "zb-h1") or (pp == 1 and not schedule):  # no pipeline, no schedule
        return list(_one_forward_one_backward(schedule, rank, pp, micro_batches, vpp))
    raise PlanError(f"no such pipeline schedule: {schedule!r}")


def span_s(schedule: str, micro_batches: int, forward: Sequence[float], backward: Sequence[float], hop_s: float, overlap: bool) -> float:
    """Seconds of GPipe or 1F1B from each stage's passes and the transfers between stages, which may `overlap` passes.

    In 1F1B, a stage's two passes and the transfers to and from the one behind it follow from each other, so that overlap does not help.
    """
    pp = len(forward)
    if schedule == "gpipe" and overlap:
        return 2 * hop_s * (pp - 1) + sum(sum(way) + (micro_batches - 1) * max(way) for way in (forward, backward))
    f = [seconds + hop_s * (i < pp - 1) for i, seconds in enumerate(forward)]
    b = [seconds + hop_s * (i < pp - 1 or not overlap) for i, seconds in enumerate(backward)]
    if schedule == "gpipe":
        return sum(sum(way) + (micro_batches - 1) * max(way) for way in (f, b))
    most = 0.0
    for i in range(pp):
        # a stage runs as many forward passes ahead as there are stages behind it, and has as many backward passes left after the last one;
        # with no more micro-batches than that, it waits once for those behind it, else twice
        ahead, behind = min(pp - 1 - i, micro_batches - 1), sum(f[i + 1 :]) + sum(b[i + 1 :])
        idle = max(0.0, behind - ahead * f[i]), max(0.0, behind - ahead * b[i])
        most = max(most, sum(f[:i]) + sum(b[:i]) + micro_batches * (f[i] + b[i]) + (sum(idle) if micro_batches > pp - i else max(idle)))
    return most


def bubble_s(
    schedule: str, pp: int, micro_batches: int, vpp: int, passes: tuple[float, float, float], head: tuple[float, float], hop_s: float, overlap: bool,
) -> float:
    """Seconds for which the busiest rank of a pipeline waits or sends.

    `passes` are seconds forward, backward, and of the latter what a schedule may put off, the same for all chunks; `head` is what the last one
    takes more.
    """
    unit = passes[0] + passes[1]
    if unit <= 0:
        return 0.0
    # ratios decide; rounded, equal ones are recognised
    shape = (round(seconds / unit, 6) for seconds in (passes[0], min(passes[2], 0.95 * passes[1]), *head))
    return unit * _bubble(schedule, pp, min(micro_batches, 4 * pp + micro_batches % pp), vpp, *shape, float(f"{hop_s / unit:.5e}"), overlap)


@lru_cache(maxsize=65536)
def _bubble(
    schedule: str, pp: int, micro_batches: int, vpp: int, forward: float, weight: float, head_forward: float, head_backward: float, hop: float,
    overlap: bool,
) -> float:
    """Waiting time of a pipeline by walking through its actions; more micro-batches than a few times its length do not change it."""
    spent = {"F": forward, "B": 1 - forward, "I": 1 - forward - weight, "W": weight}
    head = {"F": head_forward, "B": head_backward, "I": head_backward, "W": 0.0}
    ends: dict[tuple[int, str, int], float] = {}
    clock, last = [0.0] * pp, pp * vpp - 1
    for rank, action in in_order([actions(schedule, rank, pp, micro_batches, vpp) for rank in range(pp)], last + 1):
        ready = max((ends[source] for source in sources(action, last + 1)), default=0.0)
        took = spent[action.kind] + (head[action.kind] if action.chunk == last else 0.0)
        clock[rank] = max(clock[rank], ready) + max(0.0, took)
        if action.kind == "W":
            continue
        target = action.chunk + (1 if action.kind == "F" else -1)
        sends = hop if 0 <= target <= last and rank_of(schedule, target, pp) != rank else 0.0
        ends[action.chunk, action.passes, action.micro_batch] = clock[rank] + sends
        clock[rank] += 0.0 if overlap else sends
    return max(clock) - micro_batches * (vpp + max(0.0, head_forward + head_backward))


def sources(action: Action, chunks: int) -> list[tuple[int, str, int]]:
    """What of another chunk a pass needs: (chunk, F or B, micro-batch)."""
    neighbour = action.chunk - 1 if action.kind == "F" else action.chunk + 1
    return [(neighbour, action.passes, action.micro_batch)] if action.kind != "W" and 0 <= neighbour < chunks else []


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
                done.add((action.chunk, action.kind if action.kind == "W" else action.passes, action.micro_batch))
                places[rank] += 1
        if len(done) == before:
            raise PlanError("the pipeline's ranks wait for one another")


def _one_forward_one_backward(schedule: str, rank: int, pp: int, micro_batches: int, vpp: int) -> Iterator[Action]:
    """Forward passes until the first backward pass can start, then one of each in turn.

    Micro-batches go through the chunks of a rank in rounds of about `pp`. A round that is not full comes last; torch
    refuses it, Megatron runs it.
    """
    each = micro_batches // max(1, micro_batches // pp)
    chunks = chunks_of(schedule, rank, pp, vpp)
    rounds = [range(start, min(start + each, micro_batches)) for start in range(0, micro_batches, each)]
    ahead = [Action(chunk, "F", i) for batch in rounds for chunk in chunks for i in batch]
    back = "I" if schedule == "zb-h1" else "B"
    undo = [Action(chunk, back, i) for batch in rounds for chunk in reversed(chunks) for i in batch]
    late = pp - 1 - rank
    # a rank with several chunks waits for two passes per rank behind it; one chunk waits for one
    warm = min((vpp - 1) * each + late * (2 if schedule == "interleaved" else 1), len(ahead))
    yield from ahead[:warm]
    for i, action in enumerate(undo):
        yield from ahead[warm + i : warm + i + 1]
        yield action
        if back == "I" and i >= rank:
            yield undo[i - rank]._replace(kind="W")
    if back == "I":
        yield from (action._replace(kind="W") for action in undo[max(0, len(undo) - rank) :])


def _zero_bubble_v(rank: int, pp: int, micro_batches: int) -> Iterator[Action]:
    """ZB-V: the two chunks' passes fill each other's bubbles."""
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


class _Dual:
    """DualPipeV: in the middle each forward pass is paired with the backward pass of another micro-batch."""

    def __init__(self, rank: int, pp: int, micro_batches: int) -> None:
        self.rank, self.pp, self.count = rank, pp, micro_batches
        self.chunks = (rank, 2 * pp - 1 - rank)
        self.done = {(which, kind): 0 for which in (0, 1) for kind in "FB"}
        self.late: deque[Action] = deque()
        self.out: list[Action] = []

    def run(self, which: int, kind: str) -> None:
        counter = which, "F" if kind == "F" else "B"
        self.out.append(Action(self.chunks[which], kind, self.done[counter]))
        self.done[counter] += 1
        if kind == "I":
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
