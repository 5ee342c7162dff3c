"""Over what range of bandwidth, memory and batch a winner stays the winner, among the plans that came
near.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from paceline.errors import PacelineError
from paceline.plan.answer import plain
from paceline.predict.simulated import predict
from paceline.spec.planned import Range, Ranked
from paceline.spec.transformer import Transformer

#: plans that are compared, and factors that are tried, each way
RIVALS, FACTORS = 2, (1.5, 4.0)
#: less is not worth another plan
NOTABLE = 0.005
#: changes one quantity of where and what a plan runs by a factor
_Change = Callable[[Ranked, float], Ranked]


def ranges(model: Transformer, found: Sequence[Ranked]) -> tuple[Range, ...]:
    """Of the network, of a node's own links, and of the batch; memory by how much of it the winner needs."""
    best = found[0]
    # of each kind the best, which comes last
    kinds = {plain(one.plan): one for one in reversed(found) if one.cluster == best.cluster}
    del kinds[plain(best.plan)]
    plans = [best, *sorted(kinds.values(), key=lambda one: one.value)[:RIVALS]]
    memory = best.prediction.memory
    needed = memory.peak_bytes / memory.available_bytes
    out = [_range(what, model, plans, change) for what, change in _changes(best)]
    return (*out, Range(what="memory of a device", low=needed, high=None, below="it does not fit"))


def _changes(best: Ranked) -> Iterator[tuple[str, _Change]]:
    outermost = len(best.cluster.tiers) - 1
    if outermost > 0:
        yield "network bandwidth", partial(_faster, outermost)
    if outermost >= 0:
        yield "bandwidth inside a node", partial(_faster, 0)
    yield "global batch", _larger


def _faster(tier: int, ranked: Ranked, factor: float) -> Ranked:
    tiers = list(ranked.cluster.tiers)
    tiers[tier] = tiers[tier].sped_up(factor)
    return replace(ranked, cluster=replace(ranked.cluster, tiers=tuple(tiers)))


def _larger(ranked: Ranked, factor: float) -> Ranked:
    return replace(ranked, plan=replace(ranked.plan, gbs=max(1, round(ranked.plan.gbs * factor))))


def _range(what: str, model: Transformer, plans: Sequence[Ranked], change: _Change) -> Range:
    low, below = _end(model, plans, change, (1 / factor for factor in FACTORS))
    high, above = _end(model, plans, change, FACTORS)
    return Range(what=what, low=low, high=high, below=below, above=above)


def _end(
    model: Transformer, plans: Sequence[Ranked], change: _Change, factors: Iterable[float]
) -> tuple[float | None, str]:
    """The first factor at which the first plan does not win, and the plan that does."""
    for factor in factors:
        own, *others = (_seconds(model, ranked, change, factor) for ranked in plans)
        fastest = min(others, default=math.inf)
        if own < math.inf and fastest < own * (1 - NOTABLE):
            return factor, str(plans[1 + others.index(fastest)].plan)
        if own == math.inf and change is not _larger:  # another batch may divide
            break
    return None, ""


def _seconds(model: Transformer, ranked: Ranked, change: _Change, factor: float) -> float:
    """Seconds of a step after a change; infinite where it cannot run, or nothing has such a size."""
    try:
        changed = change(ranked, factor)
        found = predict(model, changed.cluster, changed.plan)
    except PacelineError:
        return math.inf
    return found.step_s if found.fit.fits else math.inf
