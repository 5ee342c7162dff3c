"""The devices of a cluster, as a scheduler counts them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from paceline.errors import SpecError
from paceline.sched.decision import Allocation

_WRITTEN = re.compile(r"^\s*(\d+)\s*x\s*(\d+)\s*x\s*([A-Za-z][\w.-]*)\s*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """Nodes by number: devices of each, their kind, the rack (or pod) that it stands in."""

    devices: tuple[int, ...]
    kinds: tuple[str, ...]
    racks: tuple[int, ...]
    name: str = ""

    @staticmethod
    def parse(text: str) -> ClusterShape:
        """What a user writes: `64x4xv100`, `36x1xv100+36x1xk80` (nodes x devices x kind), a catalog name or a
        .toml file (see `Cluster`).
        """
        parts = [_WRITTEN.match(part) for part in text.split("+")]
        if all(parts):
            from paceline.catalog import devices

            groups = [(int(m[1]), int(m[2]), devices.get(m[3]).name) for m in parts if m]
            if any(nodes < 1 or each < 1 for nodes, each, _ in groups):
                raise SpecError(f"{text!r}: a cluster has at least one node and one device")
            return ClusterShape.of(groups, name=text)
        from paceline.catalog import clusters

        found = clusters.get(text)
        inner = [tier.domain for tier in found.tiers[:-1] if tier.domain and tier.domain > found.node_devices]
        return ClusterShape.of(
            [(count, found.node_devices, device.name) for device, count in found.devices if count],
            name=text,
            rack_nodes=inner[-1] // found.node_devices if inner else 0,
        )

    @staticmethod
    def of(groups: list[tuple[int, int, str]], *, name: str = "", rack_nodes: int = 0) -> ClusterShape:
        """From (nodes, devices each, kind); racks of `rack_nodes` nodes, or one rack."""
        devices = tuple(each for nodes, each, _ in groups for _ in range(nodes))
        kinds = tuple(kind for nodes, _, kind in groups for _ in range(nodes))
        racks = tuple(i // rack_nodes if rack_nodes else 0 for i in range(len(devices)))
        return ClusterShape(
            devices=devices,
            kinds=kinds,
            racks=racks,
            name=name or "+".join(f"{n}x{d}x{k}" for n, d, k in groups),
        )

    @property
    def total(self) -> int:
        """Devices of all nodes."""
        return sum(self.devices)


class Nodes:
    """Which devices are free.

    Nodes with the same number free stand in one heap, so that finding one does not depend on their number.
    """

    __slots__ = (
        "_heaps",
        "capacity",
        "distributed",
        "free",
        "free_total",
        "kinds",
        "node_devices",
        "racks",
        "shape",
        "total",
        "up",
    )

    def __init__(self, shape: ClusterShape) -> None:
        self.shape = shape
        self.capacity = shape.devices
        self.kinds = shape.kinds
        self.racks = shape.racks
        self.free = list(shape.devices)
        self.up = [True] * len(self.free)
        #: jobs on each node that also hold devices of another
        self.distributed = [0] * len(self.free)
        self.node_devices = max(shape.devices)
        #: free devices by kind, and devices of nodes that are up
        self.free_total = dict.fromkeys(shape.kinds, 0)
        self.total = dict(self.free_total)
        self._heaps: dict[str, list[list[int]]] = {
            kind: [[] for _ in range(self.node_devices + 1)] for kind in self.free_total
        }
        for node, count in enumerate(self.free):
            kind = shape.kinds[node]
            self.free_total[kind] += count
            self.total[kind] += count
            self._heaps[kind][count].append(node)

    @property
    def free_devices(self) -> int:
        """Free devices of all kinds."""
        return sum(self.free_total.values())

    @property
    def devices(self) -> int:
        """Devices of nodes that are up."""
        return sum(self.total.values())

    def kind_of(self, allocation: Allocation) -> str:
        """The kind of the devices of an allocation (of its first node)."""
        return self.kinds[allocation[0][0]]

    def _set(self, node: int, count: int) -> None:
        kind = self.kinds[node]
        self.free_total[kind] += count - self.free[node]
        self.free[node] = count
        heap = self._heaps[kind][count]
        heappush(heap, node)
        if len(heap) > 4 * len(self.free) + 64:  # old entries that nobody asked for
            heap[:] = sorted({n for n in heap if self.free[n] == count and self.up[n]})
            heapify(heap)

    def take(self, allocation: Allocation) -> None:
        """Gives devices to a job."""
        for node, count in allocation:
            if not 0 <= node < len(self.free) or count < 1 or self.free[node] < count or not self.up[node]:
                have = (
                    f"{self.free[node]} free"
                    if 0 <= node < len(self.free) and self.up[node]
                    else "no such node up"
                )
                raise SpecError(f"cannot take {count} devices of node {node}: {have}")
            self._set(node, self.free[node] - count)
            self.distributed[node] += len(allocation) > 1

    def give(self, allocation: Allocation) -> None:
        """Takes devices back from a job."""
        for node, count in allocation:
            self.distributed[node] -= len(allocation) > 1
            self._set(node, self.free[node] + count)

    def down(self, node: int) -> None:
        """A node whose devices were all given back disappears."""
        if self.up[node]:
            if self.free[node] != self.capacity[node]:
                raise SpecError(
                    f"node {node} went down while jobs hold devices of it; report these jobs as preempted"
                    " first"
                )
            self.up[node] = False
            self.free_total[self.kinds[node]] -= self.capacity[node]
            self.total[self.kinds[node]] -= self.capacity[node]

    def back(self, node: int) -> None:
        """A node returns, empty."""
        if not self.up[node]:
            self.up[node] = True
            self.total[self.kinds[node]] += self.capacity[node]
            self.free[node] = 0
            self._set(node, self.capacity[node])

    def _top(self, kind: str, count: int) -> int:
        """The first node with exactly `count` free, or -1."""
        heap = self._heaps[kind][count]
        while heap and (self.free[heap[0]] != count or not self.up[heap[0]]):
            heappop(heap)
        return heap[0] if heap else -1

    def widest(self, kind: str) -> tuple[int, int]:
        """(node, free devices) of the node with most free, the first of equals; (-1, 0) where none is
        free.
        """
        for count in range(self.node_devices, 0, -1):
            if (node := self._top(kind, count)) >= 0:
                return node, count
        return -1, 0

    def tightest(self, kind: str, needed: int) -> int:
        """The node with the fewest free devices that holds `needed`, the first of equals; -1 where none
        does.
        """
        for count in range(needed, self.node_devices + 1):
            if (node := self._top(kind, count)) >= 0:
                return node
        return -1

    def open(self, kind: str) -> Iterator[int]:
        """Nodes of a kind with free devices, by number."""
        return (
            node
            for node, count in enumerate(self.free)
            if count and self.up[node] and self.kinds[node] == kind
        )
