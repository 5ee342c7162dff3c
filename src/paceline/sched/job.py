"""A job: how much work, how fast at each size, how it may end; and the record that the scheduler keeps
of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import SpecError
from paceline.sched.speed import Speed

if TYPE_CHECKING:
    from paceline.sched.decision import Allocation
    from paceline.sched.ends import Ends

#: most devices of a job: sizes are listed one by one
MOST_DEVICES = 1_000_000
#: how a job can be over
OUTCOMES = ("completed", "killed", "failed", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job as it was submitted."""

    name: str
    #: seconds
    submit_s: float = 0.0
    #: work to success, in the unit that `speed` advances per second
    work: float
    speed: Speed
    #: devices asked for
    devices: int = 1
    #: the range of sizes it can run at; a rigid job leaves both as they are
    least: int = 0
    most: int = 0
    #: only powers of two inside the range
    powers_of_two: bool = False
    #: seconds from being given devices to the first step, at each start
    restart_s: float = 30.0
    #: seconds that it takes to write a checkpoint when it is stopped or moved
    checkpoint_s: float = 0.0
    #: seconds of training between checkpoints, which a failure throws back to; 0: it checkpoints all the time
    checkpoint_every_s: float = 0.0
    #: what is known beforehand of ends before success
    ends: Ends | None = None
    #: the share of the work at which it really ends, for a simulation; no policy reads it
    ends_at: float = 1.0
    outcome: str = "completed"
    #: higher first
    priority: int = 0
    #: whose quota it counts against
    tenant: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "least", self.least or self.devices)
        object.__setattr__(self, "most", self.most or self.devices)
        if not 1 <= self.least <= self.devices <= self.most:
            raise SpecError(
                f"job {self.name!r}: sizes must satisfy 1 <= least <= devices <= most, got {self.least},"
                f" {self.devices}, {self.most}"
            )
        if self.most > MOST_DEVICES:
            raise SpecError(f"job {self.name!r}: at most {MOST_DEVICES:,} devices, got {self.most}")
        if not (self.work > 0 and math.isfinite(self.work)):
            raise SpecError(f"job {self.name!r}: work must be above zero, got {self.work!r}")
        if not (0 <= self.restart_s < math.inf and 0 <= self.checkpoint_s < math.inf):
            raise SpecError(
                f"job {self.name!r}: restart_s and checkpoint_s must be finite and not negative, "
                f"got {self.restart_s!r} and {self.checkpoint_s!r}"
            )
        if not 0 < self.ends_at <= 1 or not math.isfinite(self.submit_s):
            raise SpecError(
                f"job {self.name!r}: ends_at must be in (0, 1] and submit_s finite, "
                f"got {self.ends_at!r} and {self.submit_s!r}"
            )
        if self.outcome not in OUTCOMES:
            raise SpecError(
                f"job {self.name!r}: outcome must be one of {', '.join(OUTCOMES)}, got {self.outcome!r}"
            )

    def __deepcopy__(self, memo: dict[int, object]) -> Job:
        """Itself: nothing of it changes, so copies of a cluster's state share it."""
        return self

    @property
    def elastic(self) -> bool:
        """Whether it can run at more than one size."""
        return self.least < self.most

    @property
    def succeeds(self) -> bool:
        """Whether it does all of its work, in a simulation."""
        return self.outcome == "completed"

    def sizes(self, limit: int) -> tuple[int, ...]:
        """The sizes it can run at, up to `limit` devices, from the smallest."""
        top = min(self.most, limit)
        if not self.powers_of_two:
            return tuple(range(self.least, top + 1))
        powers = [1 << i for i in range(top.bit_length()) if self.least <= 1 << i <= top]
        return tuple(sorted({*powers, *([self.devices] if self.devices <= top else [])}))


WAITING, RUNNING, OVER = "waiting", "running", "over"


class Active:
    """What the scheduler knows of a job that is not over.

    Policies read it; only the state machine writes it.
    """

    __slots__ = (
        "adaptive",
        "allocation",
        "attained_s",
        "counts",
        "devices",
        "done",
        "first_start_s",
        "index",
        "job",
        "kind",
        "outcome",
        "owes_s",
        "phase",
        "rate",
        "ready_s",
        "restarts",
        "since_s",
        "started_s",
        "status",
    )

    def __init__(self, job: Job, index: int) -> None:
        self.job = job
        #: order of submission
        self.index = index
        self.status = WAITING
        self.allocation: Allocation = ()
        self.counts: tuple[int, ...] = ()
        self.devices = 0
        self.kind = ""
        #: work done at `since_s`, when it was last known
        self.done = 0.0
        self.phase = 0
        self.since_s = job.submit_s
        #: believed work per second once it runs (at `ready_s`)
        self.rate = 0.0
        self.ready_s = 0.0
        #: seconds for the checkpoint of its last stop; counted at the start that follows, as if it wrote then
        self.owes_s = 0.0
        self.adaptive = False
        #: device-seconds had until `since_s`
        self.attained_s = 0.0
        self.started_s = math.nan
        self.first_start_s = math.nan
        self.restarts = 0
        #: how it ended, once it is over
        self.outcome = ""

    def __deepcopy__(self, memo: dict[int, object]) -> Active:
        """A record of its own; what the fields hold never changes."""
        new = Active.__new__(Active)
        for name in Active.__slots__:
            setattr(new, name, getattr(self, name))
        return new

    @property
    def name(self) -> str:
        return self.job.name

    def settle(self, now_s: float) -> None:
        """Brings what is counted up to now."""
        if self.status == RUNNING:
            self.attained_s += (now_s - self.since_s) * self.devices
            self.done = self.done_at(now_s)
        self.since_s = now_s

    def done_at(self, now_s: float) -> float:
        """Work done by now, as far as is known."""
        if self.status != RUNNING or now_s <= self.ready_s:
            return self.done
        return min(self.job.work, self.done + self.rate * (now_s - max(self.since_s, self.ready_s)))

    def attained_at(self, now_s: float) -> float:
        """Device-seconds had by now."""
        return self.attained_s + ((now_s - self.since_s) * self.devices if self.status == RUNNING else 0.0)

    def left_at(self, now_s: float) -> float:
        """Work to success that is left now."""
        return max(0.0, self.job.work - self.done_at(now_s))

    def seconds_left(self, now_s: float, devices: int, node_devices: int, adaptive: bool = False) -> float:
        """Seconds to success on so many devices, packed onto as few nodes as hold them, restarts left out."""
        return self.job.speed.seconds(self.left_at(now_s), self.phase, devices, node_devices, adaptive)
