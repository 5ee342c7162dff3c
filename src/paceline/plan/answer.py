"""The outcome of a search: plans best first, the term in which each lost, the front over several objectives,
and what was left out for which reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan
from paceline.spec.planned import Planned, Ranked
from paceline.spec.prediction import DistributedPrediction


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was simulated, best first, and how many plans were not."""

    tried: tuple[Ranked, ...]
    space: int
    by_memory: int
    by_bound: int
    undecided: int
    #: no plan is better than the first of `tried` by more than this share of it
    gap: float
    elapsed_s: float
    #: the plan that comes nearest to fitting, and the bytes of a device that it leaves
    nearest: tuple[Plan, Cluster, float] | None = None
    interrupted: bool

    def planned(self, shown: Sequence[Ranked], top: int, pareto: Sequence[str], **more: Any) -> Planned:
        """The answer, with the best of what is shown."""
        return Planned(
            space=self.space,
            by_memory=self.by_memory,
            by_bound=self.by_bound,
            by_evaluation=len(self.tried),
            undecided=self.undecided,
            gap_pct=100 * self.gap,
            elapsed_s=self.elapsed_s,
            interrupted=self.interrupted,
            top=tuple(shown[:top]),
            measured=best_measured(shown),
            pareto=front(self.tried, pareto),
            **more,
        )


def explained(tried: Iterable[Ranked]) -> tuple[Ranked, ...]:
    """Plans in the order of their values, all but the first with why they lost."""
    ranked = sorted(tried, key=lambda one: one.value)
    best = [one.prediction for one in ranked[:1]]
    lost = (replace(one, lost=why(one.prediction, *best)) for one in ranked[1:])
    return (*ranked[:1], *lost)


def why(loser: DistributedPrediction, winner: DistributedPrediction) -> str:
    """The one term of the breakdown in which a plan loses most."""
    per = winner.batch / loser.batch  # where batches differ, per sample
    ours, theirs = ({part.name: part.seconds for part in p.breakdown} for p in (winner, loser))
    more = {name: theirs.get(name, 0.0) * per - ours.get(name, 0.0) for name in {*ours, *theirs}}
    term = max(more, key=lambda name: more[name])
    return f"{term} +{_time(more[term])}" if more[term] > 1e-4 * winner.step_s else "the same within 0.01 %"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def best_measured(found: Sequence[Ranked]) -> Ranked | None:
    """The best plan of features that were all measured, where the first, the winner, has one that was not."""
    best = next((ranked for ranked in found if not ranked.unmeasured), None)
    return None if best is found[0] else best


def distinct(found: Sequence[Ranked]) -> list[Ranked]:
    """Of plans with the same time that differ in a size only (buckets, prefetching), the first."""
    first: dict[tuple[str, float, Plan], Ranked] = {}
    for ranked in found:
        plain = replace(ranked.plan, bucket_bytes=Plan.bucket_bytes, prefetch=Plan.prefetch)
        first.setdefault((ranked.cluster.name, round(ranked.value, 9), plain), ranked)
    return list(first.values())


def front(found: Sequence[Ranked], axes: Sequence[str]) -> tuple[Ranked, ...]:
    """The plans that no other beats in every one of some axes (`AXES`), in the order of the first."""
    points = [(tuple(AXES[axis](ranked) for axis in axes), ranked) for ranked in found if axes]
    kept: list[tuple[tuple[float, ...], Ranked]] = []
    for point, ranked in sorted(points, key=lambda pair: pair[0]):
        if not any(all(a <= b for a, b in zip(other, point, strict=True)) for other, _ in kept):
            kept.append((point, ranked))
    return tuple(ranked for _, ranked in kept)


#: what a front may be drawn over: seconds and dollars of a step, joules, bytes of a device, devices
AXES: dict[str, Callable[[Ranked], float]] = {
    "time": lambda r: r.prediction.step_s,
    "cost": lambda r: r.cost or 0.0,
    "energy": lambda r: r.prediction.energy_j or 0.0,
    "memory": lambda r: float(r.prediction.peak_bytes),
    "gpus": lambda r: float(r.prediction.devices),
}
