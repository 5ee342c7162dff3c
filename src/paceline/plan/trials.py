"""Simulates plans, the most promising first, until the best is settled or the budget is spent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError
from paceline.plan.answer import Found, explained
from paceline.spec.planned import Ranked

#: plans that are simulated at most
MOST = 256
#: relative differences below this are not worth another simulation
SETTLED = 1e-3
#: plans that are simulated before the best time is looked at again
BATCH = 8
#: what a search tells about itself: what it does, how much is done of how much, and the best value so far
Progress = Callable[[str, int, int, float], None]
#: what a simulation tells of a plan: None where it does not fit, an error where it cannot run
Outcome = Ranked | PacelineError | None


def silent(*_: object) -> None:
    """A progress that shows nothing."""


@dataclass(kw_only=True)
class Trials:
    """Plans that are simulated, by their places in the order of their bounds."""

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
            self._until(self.most, measured=any(one.unmeasured for one in explained(self.tried)[:1]))
        except KeyboardInterrupt:
            if not self.tried:
                raise
            self.interrupted = True

    def found(self, begun: float, **more: Any) -> Found:
        """The outcome, with what more is known of the space."""
        best, left = self._best(), self.lows[self._open]
        undecided = int(np.count_nonzero(left < best * (1 - SETTLED)))
        return Found(
            tried=explained(self.tried),
            by_bound=len(left) - undecided,
            undecided=undecided,
            gap=1 - float(left.min(initial=best)) / best if self.tried else 0.0,
            elapsed_s=time.monotonic() - begun,
            interrupted=self.interrupted,
            **more,
        )

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
