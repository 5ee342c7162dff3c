"""Over what range of bandwidth, memory and batch a winner stays the winner, among the plans that came
near.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from paceline.errors import PacelineError
from paceline.predict.simulated import predict
from paceline.spec.plan import Plan
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
    alike = [ranked for ranked in found if ranked.cluster == best.cluster]
    # of each kind the best, which comes last
    kinds = {_kind(ranked): ranked for ranked in reversed(alike) if _kind(ranked) != _kind(best)}
    plans = [best, *sorted(kinds.values(), key=lambda ranked: ranked.value)[:RIVALS]]
    memory = best.prediction.memory
    needed = memory.peak_bytes / memory.available_bytes
    return (
        *(_range(what, model, plans, change) for what, change in _changes(best)),
        Range(what="memory of a device", low=needed, high=None, below="it does not fit"),
    )


def _kind(ranked: Ranked) -> str:
    """A plan without sizes that hardly matter."""
    return str(replace(ranked.plan, bucket_bytes=Plan.bucket_bytes, prefetch=Plan.prefetch))


def _changes(best: Ranked) -> Iterator[tuple[str, _Change]]:
    tiers = best.cluster.tiers
    if len(tiers) > 1:
        yield "network bandwidth", lambda ranked, x: _faster(ranked, len(tiers) - 1, x)
    if tiers:
        yield "bandwidth inside a node", lambda ranked, x: _faster(ranked, 0, x)
    yield "global batch", _larger


def _faster(ranked: Ranked, tier: int, factor: float) -> Ranked:
    tiers = list(ranked.cluster.tiers)
    link = tiers[tier]
    tiers[tier] = replace(
        link,
        bandwidth_Bps=link.bandwidth_Bps * factor,
        node_bandwidth_Bps=link.node_bandwidth_Bps and link.node_bandwidth_Bps * factor,
    )
    return replace(ranked, cluster=replace(ranked.cluster, tiers=tuple(tiers)))


def _larger(ranked: Ranked, factor: float) -> Ranked:
    return replace(ranked, plan=replace(ranked.plan, gbs=max(1, round(ranked.plan.gbs * factor))))


def _range(what: str, model: Transformer, plans: Sequence[Ranked], change: _Change) -> Range:
    low, below = _end(model, plans, change, [1 / factor for factor in FACTORS])
    high, above = _end(model, plans, change, FACTORS)
    return Range(what=what, low=low, high=high, below=below, above=above)


def _end(
    model: Transformer, plans: Sequence[Ranked], change: _Change, factors: Sequence[float]
) -> tuple[float | None, str]:
    """The first factor at which the first plan does not win, and the plan that does."""
    for factor in factors:
        times = ((_seconds(model, ranked, change, factor), ranked) for ranked in plans)
        own, _ = next(times)
        if own < math.inf:
            fastest, winner = min(times, key=lambda pair: pair[0], default=(own, plans[0]))
            if fastest < own * (1 - NOTABLE):
                return factor, str(winner.plan)
        elif change is not _larger:  # another batch may divide
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
