"""What is asked of a search: where, with which words, and what is to be small."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import SpecError, meant
from paceline.spec.cluster import Cluster
from paceline.spec.planned import Ranked

#: what a search tells about itself: what it does, how much is done of how much, and the best value so far
Progress = Callable[[str, int, int, float], None]
#: what a second of a step is worth on a cluster; not a number where a device has no price or power
OBJECTIVES: dict[str, Callable[[Cluster], float]] = {
    "time": lambda c: 1.0,
    "cost": lambda c: c.device_count * (c.device.price_per_s or math.nan),
    "energy": lambda c: c.device_count * (c.device.tdp_w or math.nan),
}
#: objective -> what a device lacks for it, and how else to give it
_LACKS = {"cost": ("price", "give --price, such as --price 2.5USD/h, "), "energy": ("power", "")}
#: what a front may be drawn over: seconds and dollars of a step, joules, bytes of a device, devices
AXES: dict[str, Callable[[Ranked], float]] = {
    "time": lambda r: r.prediction.step_s,
    "cost": lambda r: r.cost or 0.0,
    "energy": lambda r: r.prediction.energy_j or 0.0,
    "memory": lambda r: float(r.prediction.peak_bytes),
    "gpus": lambda r: float(r.prediction.devices),
}


def silent(*_: object) -> None:
    """A progress that shows nothing."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of a search, besides the model."""

    #: clusters to choose from
    where: Sequence[Cluster]
    #: samples of a step, and tokens of a sample
    gbs: int | None = None
    seq: int | None = None
    objective: str = "time"
    #: words as a plan has them
    fix: Sequence[str] = ()
    forbid: Sequence[str] = ()
    allow: Sequence[str] = ()
    #: tokens of the whole job, and seconds that it may take
    tokens: float | None = None
    deadline_s: float | None = None
    #: plans to show, and the axes of a front
    top: int = 10
    pareto: Sequence[str] = ()
    #: simulations at most
    most: int | None = None
    processes: int | None = None
    progress: Progress = silent

    def __post_init__(self) -> None:
        """Refuses what a front cannot be drawn over, and money and energy where they are not known."""
        for axis in self.pareto:
            if axis not in AXES:
                raise SpecError(f"--pareto: unknown {axis!r}; {meant(axis, AXES)}")
            if axis in OBJECTIVES:
                goal(axis, self.where, flag_of="--pareto")


@dataclass(frozen=True, slots=True)
class Goal:
    """What a plan is worth: seconds of a step times a factor of its cluster; and the longest step that is
    allowed.
    """

    factor: Callable[[Cluster], float]
    most_s: float = math.inf


def goal(
    objective: str, where: Sequence[Cluster], most_s: float = math.inf, *, flag_of: str = "objective"
) -> Goal:
    """What is to be small; SpecError, naming the flag, where a device has no price or power to count by."""
    if objective not in OBJECTIVES:
        raise SpecError(f"unknown objective {objective!r}; {meant(objective, OBJECTIVES)}")
    factor = OBJECTIVES[objective]
    for device in (cluster.device.name for cluster in where if math.isnan(factor(cluster))):
        fact, flag = _LACKS[objective]
        how = f'{flag}add it to a device file (like = "{device}") or leave {objective} out'
        raise SpecError(f"{flag_of} {objective}: {device} has no {fact}; {how}")
    return Goal(factor, most_s)
