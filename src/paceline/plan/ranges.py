"""Over what range of bandwidth, memory and batch a winner stays the winner, among the plans that came
near.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.errors import PacelineError
from paceline.predict.simulated import predict
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan
from paceline.spec.planned import Range, Ranked
from paceline.spec.transformer import Transformer

#: plans that are compared, and factors that are tried, each way
RIVALS, FACTORS = 2, (1.5, 4.0)
#: less is not worth another plan
NOTABLE = 0.005
_Changed = Callable[[Cluster, Plan, float], tuple[Cluster, Plan]]


def ranges(model: Transformer, found: Sequence[Ranked]) -> tuple[Range, ...]:
    """Of the network, of a node's own links, and of the batch; memory by how much of it the winner needs."""
    best = found[0]
    others = {
        _kind(ranked): ranked
        for ranked in reversed(found)
        if ranked.cluster == best.cluster and _kind(ranked) != _kind(best)
    }
    rivals = sorted(others.values(), key=lambda ranked: ranked.value)[:RIVALS]
    out = []
    if len(best.cluster.tiers) > 1:
        out.append(_range("network bandwidth", model, best, rivals, lambda c, p, x: (_faster(c, -1, x), p)))
    if best.cluster.tiers:
        out.append(
            _range("bandwidth inside a node", model, best, rivals, lambda c, p, x: (_faster(c, 0, x), p))
        )
    out.append(
        _range(
            "global batch", model, best, rivals, lambda c, p, x: (c, replace(p, gbs=max(1, round(p.gbs * x))))
        )
    )
    memory = best.prediction.memory
    out.append(
        Range(
            what="memory of a device",
            low=memory.peak_bytes / memory.available_bytes,
            high=None,
            below="it does not fit",
        )
    )
    return tuple(out)


def _kind(ranked: Ranked) -> str:
    """A plan without sizes that hardly matter."""
    return str(replace(ranked.plan, bucket_bytes=Plan.bucket_bytes, prefetch=Plan.prefetch))


def _faster(cluster: Cluster, tier: int, factor: float) -> Cluster:
    changed = cluster.tiers[tier]
    changed = replace(
        changed,
        bandwidth_Bps=changed.bandwidth_Bps * factor,
        node_bandwidth_Bps=changed.node_bandwidth_Bps and changed.node_bandwidth_Bps * factor,
    )
    place = tier % len(cluster.tiers)
    return replace(cluster, tiers=(*cluster.tiers[:place], changed, *cluster.tiers[place + 1 :]))


def _range(what: str, model: Transformer, best: Ranked, rivals: Sequence[Ranked], change: _Changed) -> Range:
    ends: list[tuple[float | None, str]] = []
    for up in (False, True):
        end: tuple[float | None, str] = None, ""
        for factor in FACTORS:
            x = factor if up else 1 / factor
            own = _seconds(model, best, x, change)
            if own is None:
                if what != "global batch":
                    break
                continue  # that batch does not divide
            times = [
                (seconds, rival)
                for rival in rivals
                if (seconds := _seconds(model, rival, x, change)) is not None
            ]
            faster = [pair for pair in times if pair[0] < own * (1 - NOTABLE)]
            if faster:
                end = x, str(min(faster, key=lambda pair: pair[0])[1].plan)
                break
        ends.append(end)
    return Range(what=what, low=ends[0][0], high=ends[1][0], below=ends[0][1], above=ends[1][1])


def _seconds(model: Transformer, ranked: Ranked, factor: float, change: _Changed) -> float | None:
    """Seconds of a step under a change; None where it cannot run."""
    try:
        found = predict(model, *change(ranked.cluster, ranked.plan, factor))
    except PacelineError:
        return None
    return found.step_s if found.fit.fits else None
