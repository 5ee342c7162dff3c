"""Simulates plans, the most promising first, until the best is settled or the budget is spent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError
from paceline.plan.answer import best_measured, explained, front
from paceline.plan.request import Progress, Request
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan
from paceline.spec.planned import Planned, Ranked

#: plans that are simulated at most
MOST = 256
#: relative differences below this are not worth another simulation
SETTLED = 1e-3
#: plans that are simulated before the best time is looked at again
BATCH = 8
#: what a simulation tells of a plan: None where it does not fit, an error where it cannot run
Outcome = Ranked | PacelineError | None


@dataclass(kw_only=True)
class Trials:
    """Plans that are simulated, by their places in the order of their bounds, and what came of it."""

    #: plans of the space, those without a place too
    plans: int
    #: the least value that each plan may have, in order
    lows: NDArray[np.float64]
    #: what a simulation is told of a plan
    task: Callable[[int], Any]
    simulate: Callable[[Iterable[Any]], Iterable[Outcome]]
    #: whether plans have only features that were ever measured
    measured: Callable[[], NDArray[np.bool_]]
    #: simulations, and seconds of a step, at most
    most: int
    most_s: float = math.inf
    tell: Progress
    #: the plan that comes nearest to fitting, and the bytes of a device that it leaves
    nearest: tuple[Cluster, Plan, float] | None = None
    begun: float = field(default_factory=time.monotonic)
    #: what was simulated; best first at the end
    tried: list[Ranked] = field(default_factory=list)
    refused: list[PacelineError] = field(default_factory=list)
    #: plans that were simulated, those that miss the deadline too; and those that do not fit
    count: int = 0
    tight: int = 0
    interrupted: bool = False

    def __post_init__(self) -> None:
        self._open = np.ones(len(self.lows), dtype=bool)

    def run(self) -> None:
        """Ctrl-C ends it where a plan was simulated.

        Where the best has a feature that was never measured, what is left of the budget, and a little kept
        for it, goes to the best plan that has none.
        """
        try:
            kept = min(BATCH, self.most // 8) if self.most < len(self.lows) else 0
            self._until(self.most - kept, measured=False)
            self._until(self.most, measured=self._best() < self._best(measured=True))
        except KeyboardInterrupt:
            if not self.tried:
                raise
            self.interrupted = True
        self.tried = explained(self.tried)

    def planned(self, asked: Request, shown: Sequence[Ranked], **more: Any) -> Planned:
        """The answer, with the best of what is shown."""
        return Planned(
            objective=asked.objective,
            space=self.space,
            by_memory=self.by_memory,
            by_bound=self.by_bound,
            by_evaluation=len(self.tried),
            undecided=self.undecided,
            gap_pct=100 * self.gap,
            elapsed_s=time.monotonic() - self.begun,
            interrupted=self.interrupted,
            top=tuple(shown[: asked.top]),
            measured=best_measured(shown),
            pareto=front(self.tried, asked.pareto),
            **more,
        )

    @property
    def space(self) -> int:
        """Plans that can run."""
        return self.plans - len(self.refused)

    @property
    def by_memory(self) -> int:
        """Plans that do not fit."""
        return self.plans - len(self.lows) + self.tight

    @property
    def by_bound(self) -> int:
        """Plans that were not simulated, because they cannot be better."""
        return int(np.count_nonzero(self._open)) - self.undecided

    @property
    def undecided(self) -> int:
        """Plans that were not simulated and may be better than the best."""
        return int(np.count_nonzero(self.lows[self._open] < self._best() * (1 - SETTLED)))

    @property
    def gap(self) -> float:
        """No plan is better than the best by more than this share of it."""
        best = self._best()
        return 1 - float(self.lows[self._open].min(initial=best)) / best if self.tried else 0.0

    def _best(self, measured: bool = False) -> float:
        """The best value, or that of measured features; infinite before there is one."""
        values = (one.value for one in self.tried if not (measured and one.unmeasured))
        return min(values, default=math.inf)

    def _until(self, most: int, *, measured: bool) -> None:
        """Simulates until the best plan, or the best of measured features, is settled, or so many plans were
        simulated.
        """
        among = self.measured() if measured else np.ones_like(self._open)
        while self.count < most:
            stop = np.searchsorted(self.lows, self._best(measured) * (1 - SETTLED))
            chosen = np.flatnonzero(among[:stop] & self._open[:stop])[: min(BATCH, most - self.count)]
            if not len(chosen):
                return
            for i, outcome in zip(chosen, self.simulate([self.task(i) for i in chosen]), strict=True):
                self._open[i] = False
                self._add(outcome)
            self.tell("simulating", self.count, self.most, self._best())

    def _add(self, outcome: Outcome) -> None:
        if isinstance(outcome, PacelineError):
            self.refused.append(outcome)
        elif outcome is None:
            self.tight += 1
        else:
            self.count += 1
            self.tried += [outcome] * (outcome.prediction.step_s <= self.most_s)
