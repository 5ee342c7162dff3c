"""Exchanges with parameter servers, with an elastic centre, with neighbours, through shared memory: seconds
and rates.

Workers of a node share its network; servers are hosts with a node's network each (spread over the nodes
themselves where a plan names none). Within one node the server is the host, and the way to it the device's
own link.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.cost.collectives import constants
from paceline.cost.host_link import SUM_BPS, link_rate
from paceline.spec.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Hosts that keep the parameters, and the ways to them. Bytes per second, each way."""

    count: int
    workers: int
    #: of one worker's share of its way out, and of all servers together
    worker_Bps: float
    server_Bps: float
    #: at which all servers together add up what arrives
    sum_Bps: float
    #: seconds before the first byte
    latency_s: float

    def way_s(self, size: float, senders: int) -> float:
        """Seconds to bring `size` bytes of each of `senders` workers to the servers, or back, when all do so
        at once.
        """
        return self.latency_s + max(size / self.worker_Bps, senders * size / self.server_Bps)

    def sum_s(self, size: float, senders: int) -> float:
        """Seconds to add up, and apply, what `senders` workers have sent."""
        return senders * size / self.sum_Bps


def servers(cluster: Cluster, workers: int, count: int = 0) -> Servers:
    """The parameter servers of a cluster: `count` of them, or one beside each node's devices."""
    hosts = max(1, math.ceil(workers / cluster.node_devices))
    number = count or hosts
    here = min(workers, cluster.node_devices)
    if hosts == 1:
        link = link_rate(cluster.device, here)
        return Servers(
            count=1, workers=workers, worker_Bps=link, server_Bps=math.inf, sum_Bps=SUM_BPS, latency_s=20e-6
        )
    rate, latency = node_rate(cluster)
    # of what a node sends, the part for its own server stays
    away = 1 - 1 / hosts if not count else 1.0
    return Servers(
        count=number,
        workers=workers,
        worker_Bps=rate / here / away,
        server_Bps=number * rate / away,
        sum_Bps=number * SUM_BPS,
        latency_s=latency,
    )


def node_rate(cluster: Cluster) -> tuple[float, float]:
    """B/s of one node into the network, after losses of one sender and one receiver, and seconds of a hop."""
    tier = (
        next(tier for tier in reversed(cluster.tiers) if tier.network)
        if any(tier.network for tier in cluster.tiers)
        else cluster.tiers[-1]
    )
    known = constants("nccl")
    link = known.links.get(tier.kind, known.links["other"])
    line = tier.node_bandwidth_Bps or tier.bandwidth_Bps * cluster.node_devices
    # devices of a node send beside each other, so that together they reach what a ring does
    return min(
        line * max(link.share, link.p2p), link.cap_Bps * cluster.node_devices
    ) / tier.oversubscription, link.hop_s["simple"]


def neighbour_s(cluster: Cluster, size: float, neighbours: int = 2) -> float:
    """Seconds in which every device sends so many bytes to each of its neighbours in a ring, and receives as
    much.

    Of a ring over all devices only the two ends within a node have neighbours outside it.
    """
    tier = cluster.tiers[-1]
    known = constants("nccl")
    link = known.links.get(tier.kind, known.links["other"])
    rate = tier.bandwidth_Bps * link.p2p
    if cluster.nodes > 1:
        rate = min(rate, node_rate(cluster)[0])
    return neighbours * (link.hop_s["simple"] + size / rate)
