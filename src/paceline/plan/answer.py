"""Comparisons of plans: the term in which one lost, and the front over several objectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.spec.planned import Ranked
from paceline.spec.prediction import DistributedPrediction


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
    if not found[0].unmeasured:
        return None
    return next((ranked for ranked in found if not ranked.unmeasured), None)


def distinct(found: Sequence[Ranked]) -> list[Ranked]:
    """Of plans with the same time that differ in a size only (buckets, prefetching), the first."""
    seen = set()
    out = []
    for ranked in found:
        key = (
            ranked.cluster.name,
            round(ranked.value, 9),
            str(replace(ranked.plan, bucket_bytes=1.0, prefetch=1)),
        )
        if key not in seen:
            seen.add(key)
            out.append(ranked)
    return out


def front(found: Sequence[Ranked], axes: Sequence[str]) -> tuple[Ranked, ...]:
    """The plans that no other beats in every one of some axes (`AXES`), in the order of the first."""
    points = [(tuple(AXES[axis](ranked) for axis in axes), ranked) for ranked in found]
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
