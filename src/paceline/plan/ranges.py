"""Over what range of bandwidth, memory and batch a winner stays the winner, among the plans that came near."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.errors import PacelineError
from paceline.predict.distributed import predict
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan
from paceline.spec.planned import Range, Ranked
from paceline.spec.transformer import Transformer

#: plans that are compared, and factors that are tried, each way
RIVALS, FACTORS = 8, (1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
#: less is not worth another plan
NOTABLE = 0.005
_Changed = Callable[[Cluster, Plan, float], tuple[Cluster, Plan]]


def ranges(model: Transformer, found: Sequence[Ranked]) -> tuple[Range, ...]:
    """Of the network, of a node's own links, and of the batch; memory by how much of it the winner needs."""
    best, rivals = found[0], [ranked for ranked in found[1:] if ranked.cluster == found[0].cluster][:RIVALS]
    out = []
    if len(best.cluster.tiers) > 1:
        out.append(_range("network bandwidth", model, best, rivals, lambda c, p, x: (_faster(c, -1, x), p)))
    if best.cluster.tiers:
        out.append(_range("bandwidth inside a node", model, best, rivals, lambda c, p, x: (_faster(c, 0, x), p)))
    out.append(_range("global batch", model, best, rivals, lambda c, p, x: (c, replace(p, gbs=max(1, round(p.gbs * x))))))
    memory = best.prediction.memory
    out.append(Range(what="memory of a device", low=memory.peak_bytes / memory.available_bytes, high=None, below="it does not fit"))
    return tuple(out)


def _faster(cluster: Cluster, tier: int, factor: float) -> Cluster:
    changed = cluster.tiers[tier]
    changed = replace(changed, bandwidth_Bps=changed.bandwidth_Bps * factor,
                      node_bandwidth_Bps=changed.node_bandwidth_Bps and changed.node_bandwidth_Bps * factor)
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
            times = [(seconds, rival) for rival in rivals if (seconds := _seconds(model, rival, x, change)) is not None]
            faster = [pair for pair in times if pair[0] < own * (1 - NOTABLE)]
            if faster:
                end = x, str(min(faster, key=lambda pair: pair[0])[1].plan)
                break
        ends.append(end)
    return Range(what=what, low=ends[0][0], high=ends[1][0], below=ends[0][1], above=ends[1][1])


def _seconds(model: Transformer, ranked: Ranked, factor: float, change: _Changed) -> float | None:
    """Seconds of a step under a change, in closed form, put right by how far that is from the simulation without the change."""
    try:
        now = predict(model, ranked.cluster, ranked.plan).step_s
        found = predict(model, *change(ranked.cluster, ranked.plan, factor))
        return found.step_s * ranked.prediction.step_s / now if found.fit.fits else None
    except PacelineError:
        return None
