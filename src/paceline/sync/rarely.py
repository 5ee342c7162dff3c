"""Replicas that exchange now and then, through servers, or with neighbours only: from the step of a replica
by itself.

    local SGD, DiLoCo   steps alone, and one average of the parameters in a period
    ps-backup           every step through servers; the slowest few are not waited for
    ps-async, easgd     workers and servers as a closed queueing network: a worker computes, sends, is served,
                        receives
    ps-bounded          the same, and nobody runs ahead of the slowest by more than a bound
    gossip              parameters to the neighbours of a ring, beside computation
    hogwild             updates into shared memory, without locks

`step_s` of the answer is the time in which every replica has done one step; throughput follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.cost.collectives import collective_s
from paceline.errors import PlanError
from paceline.queueing.mva import Station, solve
from paceline.queueing.order_statistics import slowest_normal
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan
from paceline.spec.prediction import DistributedPrediction, Evidence
from paceline.spec.synchronisation import Relaxation
from paceline.spec.vocabulary import Mode
from paceline.sync.accuracy import accuracy
from paceline.sync.servers import Servers, neighbour_s, servers
from paceline.sync.way import Way, averaged

#: share of computation that a device loses while it sends and receives beside it
CONTENTION = 0.1
#: of what is sent while passes go on, the share of the layer that nothing is left to hide
LAST_SHARE = 0.05
#: arrivals of many workers are as random as Poisson's, service is constant: Kingman's (1 + 0) / 2
VARIABILITY = 0.5
#: what exchanges are called in a breakdown
AVERAGING, SERVERS, WAITING, NEIGHBOURS, OUTER = (
    "parameter averaging",
    "parameter servers",
    "stragglers",
    "neighbour exchange",
    "outer optimizer",
)
#: bytes of one element of what is exchanged where replicas keep parameters in fp32
MASTER_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A replica by itself: its step, and what one of its devices holds. Bytes."""

    #: one step of all replicas, none of which communicates with another; of an island where these average
    #: every step
    alone: DistributedPrediction
    cluster: Cluster
    plan: Plan
    library: str
    #: data-parallel replicas, the devices of each, and the distance in ranks from one device to its copies
    replicas: int
    width: int = 1
    stride: int = 1
    #: parameters of one device
    parameters: float
    #: bytes of one gradient element on the wire
    gradient_bytes: float

    @property
    def forward_s(self) -> float:
        """Of one micro-batch."""
        return max(stage.forward_s for stage in self.alone.stages)

    @property
    def backward_s(self) -> float:
        return max(stage.backward_s for stage in self.alone.stages)

    @property
    def master_bytes(self) -> float:
        return self.parameters * MASTER_BYTES

    def average_s(self, size: float, islands: int) -> float:
        """Seconds to average `size` bytes of each of `islands` groups of replicas."""
        group = self.cluster.group(islands, self.stride * (self.replicas // islands))
        return collective_s("all_reduce", size, group, self.cluster, self.library)


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """What a mode adds to a replica's step: seconds by name, the share of work that counts, memory, and
    remarks.
    """

    seconds: Mapping[str, float]
    #: of the samples computed, those whose gradients are used
    used: float = 1.0
    #: bytes that a device holds besides
    more_bytes: float = 0.0
    remarks: tuple[Evidence, ...] = ()


def periodic(replica: Replica) -> Added:
    """Local SGD and DiLoCo: an average once in a period; DiLoCo's outer step has a momentum and a copy of the
    parameters.
    """
    relax = replica.plan.relax
    islands = replica.replicas // island(replica.plan, replica.cluster, replica.replicas)
    seconds = {AVERAGING: replica.average_s(replica.master_bytes, islands) / relax.every}
    # read and write parameters; and the copy, the momentum, their difference
    moved = 3 if relax.mode is Mode.LOCAL_SGD else 6
    seconds[OUTER] = moved * replica.master_bytes / replica.cluster.device.memory_bandwidth_Bps / relax.every
    more = 2 * replica.master_bytes if relax.mode is Mode.DILOCO else 0.0
    what = f"{islands} islands average {relax.every} steps apart"
    return Added(
        seconds=seconds, more_bytes=more, remarks=(Evidence(what=what, kind="declared", source="the plan"),)
    )


def island(plan: Plan, cluster: Cluster, replicas: int) -> int:
    """Replicas that average every step: what the plan says, else a node of DiLoCo and one device of local
    SGD.
    """
    usual = (
        math.gcd(replicas, cluster.node_devices)
        if plan.relax.mode is Mode.DILOCO and cluster.nodes > 1
        else 1
    )
    size = plan.relax.island or usual
    if replicas % size:
        raise PlanError(f"plan cannot run: islands of {size} replicas do not divide the {replicas} there are")
    return size


def synchronous(replica: Replica) -> Added:
    """Every step through servers, without the slowest; what the last backward and the first forward pass hide
    is not added.
    """
    found = _servers(replica)
    size = replica.parameters * replica.gradient_bytes
    senders = replica.replicas * replica.width
    push = found.way_s(size, senders) + found.sum_s(size, senders)
    pull = found.way_s(size, senders)
    exposed = max(push - replica.backward_s, push * LAST_SHARE) + max(
        pull - replica.forward_s, pull * LAST_SHARE
    )
    waiting, used = straggling(replica)
    return Added(seconds={SERVERS: exposed, WAITING: waiting}, used=used, remarks=_hosts(found))


def straggling(replica: Replica) -> tuple[float, float]:
    """Seconds that a synchronous step waits for the slowest worker it counts, and the share of workers that
    it counts.
    """
    cv, count, spare = replica.cluster.straggler_cv, replica.replicas, replica.plan.relax.backup
    if spare >= count:
        raise PlanError(f"plan cannot run: backup {spare}, but there are {count} workers")
    late = max(0.0, slowest_normal(count, spare))
    return replica.alone.step_s * cv * late, (count - spare) / count


def asynchronous(replica: Replica) -> Added:
    """Workers that wait for servers only: mean value analysis of the closed network they form."""
    relax, found = replica.plan.relax, _servers(replica)
    size = replica.master_bytes if relax.mode is Mode.EASGD else replica.parameters * replica.gradient_bytes
    local = relax.every * replica.alone.step_s
    think = local + 2 * (found.latency_s + size / found.worker_Bps)
    whole = size * replica.width
    demands = {
        "in": whole / found.server_Bps,
        "update": found.sum_s(whole, 1),
        "out": whole / found.server_Bps,
    }
    stations = [
        Station(name="worker", demand_s=think, servers=0),
        *(Station(name=name, demand_s=seconds) for name, seconds in demands.items()),
    ]
    curve = solve(stations, replica.replicas, variability=VARIABILITY if replica.replicas > 1 else 0.0)
    cycle = replica.replicas / float(curve.throughput[-1])
    seconds = {SERVERS: (cycle - local) / relax.every}
    if relax.mode is Mode.PS_BOUNDED:
        bound = max(1, relax.staleness)
        # over a window of so many steps the slowest worker is late by less per step
        seconds[WAITING] = (
            replica.alone.step_s
            * replica.cluster.straggler_cv
            * slowest_normal(replica.replicas)
            / math.sqrt(bound + 1)
        )
    late = (
        f"gradients are late by {replica.replicas - 1} updates on average"
        if relax.mode is not Mode.EASGD
        else f"centre met every {relax.every} steps"
    )
    busy = float(curve.utilisation[-1].max())
    remarks = (
        Evidence(
            what=f"{late}; servers are {100 * busy:.0f} % busy", kind="derived", source="mean value analysis"
        ),
        *_hosts(found),
    )
    return Added(
        seconds=seconds, more_bytes=replica.master_bytes if relax.mode is Mode.EASGD else 0.0, remarks=remarks
    )


def gossip(replica: Replica) -> Added:
    """Parameters to both neighbours of a ring beside the step; what takes longer than the step is
    waited for.
    """
    if replica.plan.tp * replica.plan.pp > 1:
        raise PlanError(
            "plan cannot run: gossip is modelled between whole replicas on one device each (tp 1, pp 1)"
        )
    if replica.replicas == 1:
        return Added(seconds={})
    sent = neighbour_s(replica.cluster, replica.master_bytes) / replica.plan.relax.every
    beside = min(sent, replica.alone.step_s)
    return Added(
        seconds={NEIGHBOURS: max(0.0, sent - replica.alone.step_s) + CONTENTION * beside},
        more_bytes=2 * replica.master_bytes,
        remarks=(
            Evidence(
                what="each replica averages with its two neighbours in a ring",
                kind="declared",
                source="the plan",
            ),
        ),
    )


def hogwild(replica: Replica) -> Added:
    """Gradients added into one copy in the host's memory without locks, and read from there."""
    if replica.cluster.nodes > 1:
        raise PlanError(
            f"plan cannot run: hogwild shares the memory of one node, but {replica.cluster.name} has"
            f" {replica.cluster.nodes}"
        )
    size, device = replica.parameters * MASTER_BYTES, replica.cluster.device
    # the copy is read, and read and written again, by all workers through the same memory
    if device.kind == "cpu":
        seconds = 3 * size * replica.replicas / device.memory_bandwidth_Bps
    else:
        found = servers(replica.cluster, replica.replicas)
        seconds = 2 * found.way_s(size, replica.replicas) + found.sum_s(size, replica.replicas)
    what = "one copy in the host's memory, no locks"
    return Added(
        seconds={SERVERS: seconds}, remarks=(Evidence(what=what, kind="declared", source="the plan"),)
    )


#: what each way adds to the step of a replica
ADDED = {
    "local-sgd": periodic,
    "diloco": periodic,
    "ps-backup": synchronous,
    "ps-async": asynchronous,
    "ps-bounded": asynchronous,
    "easgd": asynchronous,
    "gossip": gossip,
    "hogwild": hogwild,
}


def _servers(replica: Replica) -> Servers:
    return servers(replica.cluster, replica.replicas * replica.width, replica.plan.relax.servers)


def _hosts(found: Servers) -> tuple[Evidence, ...]:
    what = f"{found.count} parameter server{'s' if found.count > 1 else ''}, {found.workers} workers"
    return (Evidence(what=what, kind="declared", source="the plan"),)


def alone(relax: Relaxation) -> Way:
    """Ranks that average every step within their island only, or not at all."""
    return Way(
        messages=averaged, accuracy=accuracy(relax), island=_island if relax.mode.averages_rarely else _none
    )


def _island(plan: Plan, cluster: Cluster) -> int:
    return island(plan, cluster, plan.dp)


def _none(plan: Plan, cluster: Cluster) -> int:
    return 1
