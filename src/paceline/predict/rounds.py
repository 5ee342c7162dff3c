"""Many micro-batches at the price of a few: once a pipeline is full, another round of them takes what the one
before it took.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from paceline.spec.plan import Plan

#: times as many micro-batches as stages, from which on all rounds of them are alike
ROUNDS = 3


class Simulated(Protocol):
    """A step that was simulated stage by stage."""

    def spent(self, rank: int) -> dict[str, float]:
        """Seconds of a stage by what they go to; all of them are the step's."""

    def freest(self) -> int:
        """The stage that waits least."""


def enough(plan: Plan) -> int:
    """Micro-batches that show how every further round goes; as many are left over in the last one as in the
    plan.
    """
    over = plan.micro_batches % plan.pp
    return max(ROUNDS, over + 1) * plan.pp + over


def folded(plan: Plan, at: Callable[[Plan], Simulated]) -> dict[str, float]:
    """Where the time of the stage that waits least goes, simulated with few micro-batches and with a round
    more.
    """
    few = enough(plan)
    if plan.micro_batches <= few + 2 * plan.pp:
        whole = at(plan)
        return whole.spent(whole.freest())
    less, more = (at(replace(plan, gbs=count * plan.dp * plan.mbs)) for count in (few, few + plan.pp))
    rank, times = more.freest(), (plan.micro_batches - few) / plan.pp
    one, other = less.spent(rank), more.spent(rank)
    return {
        name: one.get(name, 0.0) + times * (other.get(name, 0.0) - one.get(name, 0.0))
        for name in {**one, **other}
    }
