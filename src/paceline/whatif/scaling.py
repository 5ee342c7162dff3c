"""Scaling curves: throughput against nodes, beside the ideal and a naive line, and where another node stops
paying.

    ideal    the first point's throughput per device, times devices
    naive    computation of the first point and an all-reduce of all gradients at the line rate of the
             network, one after the other
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from paceline.spec.whatif import Point, Scaling

#: another node pays as long as it brings at least this share of what the first ones brought each
PAYS = 0.5


def scaling(points: Sequence[Point], kind: str) -> Scaling | None:
    """The scaling curve of points at different numbers of nodes; None where there is but one."""
    pairs = sorted(
        ((point, point.prediction) for point in points if point.prediction is not None),
        key=lambda pair: pair[1].devices,
    )
    found = [prediction for _, prediction in pairs]
    if len(found) < 2:
        return None
    first = found[0]
    alone = (first.step_s - first.exposed_s) / first.batch * first.devices  # seconds per sample of a device
    naive = [p.throughput * p.step_s / (alone * p.batch / p.devices + point.line_s) for point, p in pairs]
    each = first.throughput / first.devices
    ideal = [each * p.devices for p in found]
    marginal = [
        (b.throughput - a.throughput) / max(1, b.devices - a.devices) / each for a, b in pairwise(found)
    ]
    stop = next((found[i].devices for i, gain in enumerate(marginal) if gain < PAYS), None)
    return Scaling(
        unit=first.unit,
        kind=kind,
        devices=tuple(p.devices for p in found),
        throughput=tuple(p.throughput for p in found),
        low=tuple(p.throughput * p.step_s / p.step_s_high for p in found),
        high=tuple(p.throughput * p.step_s / p.step_s_low for p in found),
        ideal=tuple(ideal),
        naive=tuple(naive),
        efficiency=tuple(p.throughput / i for p, i in zip(found, ideal, strict=True)),
        marginal=tuple(marginal),
        pays_to=stop,
    )
