"""What a pipeline schedule is: what each rank runs, in order, and the few facts about it that plans and
search need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

from paceline import extend
from paceline.errors import UnknownName

SCHEDULES: dict[str, Schedule] = {}


class Action(NamedTuple):
    """One pass of one micro-batch through one chunk.

    Kinds are those of torch: F forward, B backward, and, where a schedule puts weight gradients off, I for
    the gradients of inputs and W for those of weights.
    """

    chunk: int
    kind: str
    micro_batch: int

    @property
    def passes(self) -> str:
        """F or B: what the next chunk waits for."""
        return "F" if self.kind == "F" else "B"

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"


class Schedule(ABC):
    """The order in which the ranks of a pipeline run passes. A schedule is one file: this class, and
    `register`.

    Chunks are numbered along the model. Rank r holds r, r + pp, r + 2 pp, ...; in schedules shaped like a V,
    r and 2 pp - 1 - r, so that the first rank has both ends of the model.
    """

    #: the word of a plan
    name: ClassVar[str]
    #: two chunks on each rank, down the ranks and up again
    v_shaped: ClassVar[bool] = False
    #: any number of chunks on each rank; the others have one
    chunked: ClassVar[bool] = False
    #: gradients of weights are put off
    splits: ClassVar[bool] = False
    #: micro-batches go in equal rounds of about as many as there are ranks
    equal_rounds: ClassVar[bool] = False
    #: class of `torch.distributed.pipelining` that runs it, without "Schedule"; empty: torch runs `actions`
    torch: ClassVar[str] = ""
    #: `paceline.train.Pipeline` runs it
    trains: ClassVar[bool] = True

    @abstractmethod
    def actions(self, rank: int, pp: int, micro_batches: int, vpp: int = 1) -> Iterable[Action]:
        """What a rank runs, in order."""

    def least_micro_batches(self, pp: int, vpp: int, in_torch: bool) -> int:
        """Micro-batches that it needs at least; torch asks for more than Megatron."""
        return 1

    def in_flight(self, rank: int, pp: int, micro_batches: int, vpp: int) -> float | None:
        """Micro-batches whose activations a rank holds at once, where there is a formula; None: count along
        `actions`.
        """
        return None

    def put_off(self, micro_batches: int, ahead: int) -> int | None:
        """Micro-batches whose weight gradients a rank with so many ranks ahead of it puts off; None: not
        known.

        Only lower bounds of the search ask, which hold without an answer.
        """
        return None if self.splits else 0

    def after_first_gradient(self, pp: int, micro_batches: int, vpp: int) -> int | None:
        """Passes that a rank has left at most when the gradients of one of its chunks are complete.

        The pass that completes them counts. None: not known. Only lower bounds of the search ask, which hold
        without an answer.
        """
        return None if self.chunked or self.v_shaped else 1

    @property
    def ends_with_embedding(self) -> bool:
        """Whether the first rank ends with a pass through the first chunk, so with the embedding's gradient.

        True of every schedule that puts nothing off: a later chunk's backward pass has the first's behind it.
        """
        return not self.splits or not (self.chunked or self.v_shaped)

    # -- where chunks are --------------------------------------------------------------------------

    def chunks_per_rank(self, vpp: int) -> int:
        """Chunks that one rank holds."""
        return 2 if self.v_shaped else vpp

    def chunks_of(self, rank: int, pp: int, vpp: int) -> tuple[int, ...]:
        """The chunks of a rank, in the order of the model."""
        return (rank, 2 * pp - 1 - rank) if self.v_shaped else tuple(range(rank, pp * vpp, pp))

    def rank_of(self, chunk: int, pp: int) -> int:
        """The rank that holds a chunk."""
        return 2 * pp - 1 - chunk if self.v_shaped and chunk >= pp else chunk % pp


def register(schedule: Schedule) -> Schedule:
    """Makes a schedule known by its name: to plans, predictions, the search and training."""
    known = {name: type(other) for name, other in SCHEDULES.items()}
    extend.claim("schedule", schedule.name, type(schedule), known)
    SCHEDULES[schedule.name] = schedule
    return schedule


def get(name: str) -> Schedule:
    """The schedule called `name`; without a name, one forward and one backward pass in turn."""
    if not name:
        return SCHEDULES["1f1b"]
    if name not in SCHEDULES:
        raise UnknownName("pipeline schedule", name, SCHEDULES, f"known: {', '.join(SCHEDULES)}")
    return SCHEDULES[name]
