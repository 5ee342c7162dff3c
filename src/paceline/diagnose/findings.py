"""What a diagnosis is made of: findings with evidence, and the account of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.diagnose.activity import CAUSES, Share
from paceline.diagnose.groups import TITLES

#: findings that are shown as what to change
TOP = 5


@dataclass(frozen=True, slots=True)
class TracePlace:
    """Where in the trace: seconds from its first event."""

    start_s: float
    end_s: float
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that costs time in each step."""

    kind: str
    title: str
    #: of a step, if it were gone altogether; two findings may claim the same second
    saves_s: float
    #: how that was estimated
    basis: str
    advice: str
    evidence: tuple[str, ...] = ()
    places: tuple[TracePlace, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """One rank of a job: seconds of its step, of its computation, and of waiting for others in"
    " collectives."""

    rank: int
    step_s: float
    compute_s: float
    waits_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A measured step: what it spends its time on, and what to change. Seconds."""

    paths: tuple[str, ...]
    #: as the driver names it; empty for a trace of the host alone
    device: str
    #: the device of the catalog whose peaks the roofline rests on; empty where it is not known
    peaks_of: str
    #: the rank that is accounted for; ranks that were read, and of the job
    rank: int
    ranks: tuple[RankTime, ...]
    world: int
    step_s: float
    steps: int
    found_by: str
    busy_s: float
    kernel_s: float
    kernels: int
    shares: tuple[Share, ...]
    #: time without work, by cause
    idle: Mapping[str, float]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    findings: tuple[Finding, ...]
    #: what to know when reading it
    notes: tuple[str, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def top(self) -> tuple[Finding, ...]:
        """What to change first."""
        return self.findings[:TOP]

    @property
    def accounted(self) -> float:
        """The share of the step whose cause is known."""
        unknown = sum(share.seconds for share in self.shares if share.group == "other")
        return 1 - unknown / self.step_s

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        data = asdict(self)
        data["shares"] = [{**asdict(share), "title": title(share.group)} for share in self.shares]
        data["idle"] = {
            cause: {"seconds": seconds, "title": CAUSES[cause]} for cause, seconds in self.idle.items()
        }
        return {**data, "accounted": self.accounted}

    def __rich__(self) -> Any:
        from paceline.report.diagnosis import diagnosis_view

        return diagnosis_view(self)


def title(group: str) -> str:
    """A group as people know it."""
    from paceline.cost.expanded import TITLES as KINDS

    return TITLES.get(group) or KINDS.get(group, group)
