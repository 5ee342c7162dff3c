"""Where a job of a given size goes. Each strategy takes free devices of one kind and returns an allocation,
or None where they do not suffice.

`widest`       the node with most free devices first, as the Tiresias and Optimus simulators of the Pollux
artifact place `consolidate`  one node that it fits tightly; else whole nodes, and a tight one for the rest
`spread`       one device at a time, where most are free `quiet`        as `consolidate`, but off nodes whose
network another distributed job uses, where that is possible `topology`     as `consolidate`, inside the rack
that it fits tightly; else over as few racks as can be
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from paceline.errors import UnknownName
from paceline.sched.decision import Allocation
from paceline.sched.nodes import Nodes

Strategy = Callable[[Nodes, int, str], Allocation | None]


def widest(nodes: Nodes, devices: int, kind: str) -> Allocation | None:
    if nodes.free_total[kind] < devices:
        return None
    if (node := nodes.widest(kind))[1] >= devices:
        return ((node[0], devices),)
    return _gather(nodes, devices, kind, tight=False)


def consolidate(nodes: Nodes, devices: int, kind: str) -> Allocation | None:
    if nodes.free_total[kind] < devices:
        return None
    if devices <= nodes.node_devices and (node := nodes.tightest(kind, devices)) >= 0:
        return ((node, devices),)
    return _gather(nodes, devices, kind, tight=True)


def _gather(nodes: Nodes, devices: int, kind: str, tight: bool) -> Allocation:
    """Several nodes, widest first; `tight`: the last one the tightest that holds the rest."""
    chosen: list[tuple[int, int]] = []
    try:
        while devices:
            last = nodes.tightest(kind, devices) if tight and devices <= nodes.node_devices else -1
            node, free = (last, devices) if last >= 0 else nodes.widest(kind)
            count = min(free, devices)
            nodes.take(((node, count),))
            chosen.append((node, count))
            devices -= count
    finally:
        for pair in chosen:
            nodes.give((pair,))
    return tuple(chosen)


def spread(nodes: Nodes, devices: int, kind: str) -> Allocation | None:
    if nodes.free_total[kind] < devices:
        return None
    chosen: Counter[int] = Counter()
    for _ in range(devices):
        node, _free = nodes.widest(kind)
        nodes.take(((node, 1),))
        chosen[node] += 1
    allocation = tuple(chosen.items())
    for pair in allocation:
        nodes.give(((pair[0], 1),) * pair[1])
    return allocation


def quiet(nodes: Nodes, devices: int, kind: str) -> Allocation | None:
    found = consolidate(nodes, devices, kind)
    if found is None or len(found) == 1:
        return found
    return _first(
        nodes, sorted(nodes.open(kind), key=lambda n: (nodes.distributed[n] > 0, -nodes.free[n], n)), devices
    )


def topology(nodes: Nodes, devices: int, kind: str) -> Allocation | None:
    found = consolidate(nodes, devices, kind)
    if found is None or len(found) == 1:
        return found
    free: Counter[int] = Counter()
    for node in nodes.open(kind):
        free[nodes.racks[node]] += nodes.free[node]
    holding = [rack for rack in free if free[rack] >= devices]
    racks = (
        [min(holding, key=lambda r: (free[r], r))] if holding else sorted(free, key=lambda r: (-free[r], r))
    )
    order = {rack: i for i, rack in enumerate(racks)}
    inside = [node for node in nodes.open(kind) if nodes.racks[node] in order]
    return _first(nodes, sorted(inside, key=lambda n: (order[nodes.racks[n]], -nodes.free[n], n)), devices)


def _first(nodes: Nodes, order: Iterable[int], devices: int) -> Allocation:
    """The free devices of nodes in that order, until there are enough."""
    chosen: list[tuple[int, int]] = []
    for node in order:
        count = min(devices, nodes.free[node])
        chosen.append((node, count))
        devices -= count
        if not devices:
            break
    return tuple(chosen)


STRATEGIES: dict[str, Strategy] = {
    "widest": widest,
    "consolidate": consolidate,
    "spread": spread,
    "quiet": quiet,
    "topology": topology,
}


def get(name: str) -> Strategy:
    """The strategy of that name."""
    if name not in STRATEGIES:
        raise UnknownName("placement", name, STRATEGIES, f"allowed: {', '.join(STRATEGIES)}")
    return STRATEGIES[name]
