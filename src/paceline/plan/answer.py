"""Plans best first, the term in which each lost, and the front over several objectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from paceline.plan.request import AXES
from paceline.spec.plan import Plan
from paceline.spec.planned import Ranked
from paceline.spec.prediction import DistributedPrediction


def explained(tried: Iterable[Ranked]) -> list[Ranked]:
    """Plans in the order of their values, all but the first with why they lost."""
    ranked = sorted(tried, key=lambda one: one.value)
    lost = [replace(one, lost=why(one.prediction, ranked[0].prediction)) for one in ranked[1:]]
    return ranked[:1] + lost


def why(loser: DistributedPrediction, winner: DistributedPrediction) -> str:
    """The one term of the breakdown in which a plan loses most."""
    per = winner.batch / loser.batch  # where batches differ, per sample
    ours, theirs = ({part.name: part.seconds for part in p.breakdown} for p in (winner, loser))
    more = {name: theirs.get(name, 0.0) * per - ours.get(name, 0.0) for name in ours | theirs}
    seconds, term = max((seconds, term) for term, seconds in more.items())
    if seconds <= 1e-4 * winner.step_s:
        return "the same within 0.01 %"
    return f"{term} +{seconds:.2f} s" if seconds >= 1 else f"{term} +{1e3 * seconds:.1f} ms"


def best_measured(found: Sequence[Ranked]) -> Ranked | None:
    """The best plan of features that were all measured, where the first, the winner, has one that was not."""
    best = next((ranked for ranked in found if not ranked.unmeasured), None)
    return None if best is found[0] else best


def plain(plan: Plan) -> Plan:
    """A plan with the usual sizes of what hardly matters: buckets and prefetching."""
    return replace(plan, bucket_bytes=Plan.bucket_bytes, prefetch=Plan.prefetch)


def distinct(found: Sequence[Ranked]) -> list[Ranked]:
    """Of plans with the same time that are the same but for what hardly matters, the first."""
    first: dict[tuple[str, float, Plan], Ranked] = {}
    for ranked in found:
        first.setdefault((ranked.cluster.name, round(ranked.value, 9), plain(ranked.plan)), ranked)
    return list(first.values())


def front(found: Sequence[Ranked], axes: Sequence[str]) -> tuple[Ranked, ...]:
    """The plans that no other beats in every one of some axes (`AXES`), in the order of the first."""
    points = [(tuple(AXES[axis](ranked) for axis in axes), ranked) for ranked in found if axes]
    kept: list[tuple[tuple[float, ...], Ranked]] = []
    for point, ranked in sorted(points, key=lambda pair: pair[0]):
        if not any(all(a <= b for a, b in zip(other, point, strict=True)) for other, _ in kept):
            kept.append((point, ranked))
    return tuple(ranked for _, ranked in kept)
