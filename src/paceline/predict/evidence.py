"""What the seconds of a step rest on, whatever it was made from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from paceline.cost.chip import Chip
from paceline.cost.curves import Curves
from paceline.cost.power import rule
from paceline.spec.cluster import Cluster
from paceline.spec.device import Device
from paceline.spec.prediction import Evidence

#: where a figure is from that a device's file does not give
ASSUMED = "no source; derived from the rest of the file"


def device_evidence(device: Device, chip: Chip, dtypes: Iterable[str], curves: Curves) -> Iterator[Evidence]:
    """Of operators that compute in some types: facts about the device, the curves of operators, and the clock
    that matrix units sustain.
    """
    yield from fact_evidence(device, ("memory.bandwidth", *(f"peak.{dtype}" for dtype in dtypes)))
    for path in chip.assumed:
        yield Evidence(what=f"{device.name} {path}", kind="guessed", source=ASSUMED)
    yield Evidence(what=f"operator curves: {curves.name}", kind="fitted", source=curves.source, share=1.0)
    limit = rule(device)
    if limit is not None:
        what = f"{device.name} power limit of matrix units"
        yield Evidence(what=what, kind=limit.kind, source=limit.source)


def network_evidence(cluster: Cluster) -> Iterator[Evidence]:
    """Of collectives: the rates of a cluster's networks."""
    rates = (path for path in cluster.facts if path.startswith("tier.") and path.endswith("bandwidth"))
    return fact_evidence(cluster, rates)


def fact_evidence(of: Device | Cluster, paths: Iterable[str]) -> Iterator[Evidence]:
    """Facts of a device or a cluster, those that its file has."""
    for path in paths:
        fact = of.facts.get(path)
        if fact is not None:
            yield Evidence(what=f"{of.name} {path}", kind=fact.kind, source=fact.source)
