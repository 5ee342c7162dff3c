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
from paceline.sim.mesh import Mesh
from paceline.spec.cluster import Cluster, Group
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
    mesh: Mesh
    #: parameters of one device
    parameters: float
    #: bytes of one gradient element on the wire
    gradient_bytes: float

    @property
    def cluster(self) -> Cluster:
        return self.mesh.cluster

    @property
    def plan(self) -> Plan:
        return self.mesh.plan

    @property
    def replicas(self) -> int:
        return self.plan.dp

    @property
    def width(self) -> int:
        """Devices of a replica."""
        return self.plan.tp * self.plan.pp

    def group(self, islands: int) -> Group:
        """A device and its copies in so many groups of replicas."""
        p = self.plan
        return self.cluster.group(islands, p.tp * p.cp * (p.dp // islands))

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

    @property
    def gradients_bytes(self) -> float:
        return self.parameters * self.gradient_bytes

    @property
    def servers(self) -> Servers:
        return servers(self.cluster, self.replicas * self.width, self.plan.relax.servers)

    def average_s(self, size: float, islands: int) -> float:
        """Seconds to average `size` bytes of each of `islands` groups of replicas."""
        return collective_s("all_reduce", size, self.group(islands), self.cluster, self.mesh.library)


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
    relax, outer, size = replica.plan.relax, replica.plan.relax.mode is Mode.DILOCO, replica.master_bytes
    islands = replica.replicas // island(replica.plan, replica.cluster, replica.replicas)
    # read and write parameters; and the copy, the momentum, their difference
    moved = (6 if outer else 3) * size / replica.cluster.device.memory_bandwidth_Bps
    seconds = {AVERAGING: replica.average_s(size, islands) / relax.every, OUTER: moved / relax.every}
    remark = _declared(f"{islands} islands average {relax.every} steps apart")
    return Added(seconds=seconds, more_bytes=2 * size if outer else 0.0, remarks=(remark,))


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
    found, size, senders = replica.servers, replica.gradients_bytes, replica.replicas * replica.width
    pull = found.way_s(size, senders)
    push = pull + found.sum_s(size, senders)
    hidden = ((push, replica.backward_s), (pull, replica.forward_s))
    exposed = sum(max(sent - passes, sent * LAST_SHARE) for sent, passes in hidden)
    waiting, used = straggling(replica)
    return Added(seconds={SERVERS: exposed, WAITING: waiting}, used=used, remarks=(_hosts(found),))


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
    """Workers that wait for servers only."""
    relax, found, alone_s = replica.plan.relax, replica.servers, replica.alone.step_s
    elastic, local = relax.mode is Mode.EASGD, relax.every * alone_s
    size = replica.master_bytes if elastic else replica.gradients_bytes
    cycle, busy = _cycle(replica, found, local, size)
    seconds = {SERVERS: (cycle - local) / relax.every}
    if relax.mode is Mode.PS_BOUNDED:
        # over a window of so many steps the slowest worker is late by less per step
        late = replica.cluster.straggler_cv * slowest_normal(replica.replicas)
        seconds[WAITING] = alone_s * late / math.sqrt(1 + max(1, relax.staleness))
    meets = f"centre met every {relax.every} steps"
    if not elastic:
        meets = f"gradients are late by {replica.replicas - 1} updates on average"
    remarks = _solved(f"{meets}; servers are {100 * busy:.0f} % busy"), _hosts(found)
    return Added(seconds=seconds, more_bytes=elastic * size, remarks=remarks)


def _cycle(replica: Replica, found: Servers, local: float, size: float) -> tuple[float, float]:
    """Seconds from one exchange of a worker to the next, and the share of them in which the busiest part of
    the servers works: mean value analysis of the closed network that both form.

    A worker computes for `local` seconds, and then sends and receives `size` bytes on each of its devices.
    """
    whole = size * replica.width
    way_s = whole / found.server_Bps
    think = Station(
        name="worker", demand_s=local + 2 * (found.latency_s + size / found.worker_Bps), servers=0
    )
    demands = {"in": way_s, "update": found.sum_s(whole, 1), "out": way_s}
    stations = [think, *(Station(name=name, demand_s=seconds) for name, seconds in demands.items())]
    curve = solve(stations, replica.replicas, variability=VARIABILITY if replica.replicas > 1 else 0.0)
    return replica.replicas / float(curve.throughput[-1]), float(curve.utilisation[-1].max())


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
    alone_s, size = replica.alone.step_s, replica.master_bytes
    sent = neighbour_s(replica.cluster, size) / replica.plan.relax.every
    return Added(
        seconds={NEIGHBOURS: max(0.0, sent - alone_s) + CONTENTION * min(sent, alone_s)},
        more_bytes=2 * size,
        remarks=(_declared("each replica averages with its two neighbours in a ring"),),
    )


def hogwild(replica: Replica) -> Added:
    """Gradients added into one copy in the host's memory without locks, and read from there."""
    if replica.cluster.nodes > 1:
        raise PlanError(
            f"plan cannot run: hogwild shares the memory of one node, but {replica.cluster.name} has"
            f" {replica.cluster.nodes}"
        )
    size, workers, device = replica.master_bytes, replica.replicas, replica.cluster.device
    # the copy is read, and read and written again, by all workers through the same memory
    seconds = 3 * size * workers / device.memory_bandwidth_Bps
    if device.kind != "cpu":
        found = servers(replica.cluster, workers)
        seconds = 2 * found.way_s(size, workers) + found.sum_s(size, workers)
    return Added(seconds={SERVERS: seconds}, remarks=(_declared("one copy in the host's memory, no locks"),))


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


def _hosts(found: Servers) -> Evidence:
    plural = "s" if found.count > 1 else ""
    return _declared(f"{found.count} parameter server{plural}, {found.workers} workers")


def _solved(what: str) -> Evidence:
    return Evidence(what=what, kind="derived", source="mean value analysis")


def _declared(what: str) -> Evidence:
    return Evidence(what=what, kind="declared", source="the plan")


def alone(relax: Relaxation) -> Way:
    """Ranks that average every step within their island only, or not at all."""
    return Way(
        messages=averaged, accuracy=accuracy(relax), island=_island if relax.mode.averages_rarely else _none
    )


def _island(plan: Plan, cluster: Cluster) -> int:
    return island(plan, cluster, plan.dp)


def _none(plan: Plan, cluster: Cluster) -> int:
    return 1
