"""Replicas that exchange now and then, through servers, or with neighbours only: from the step of a replica
by itself.

    local SGD, DiLoCo   steps alone, and one average of the parameters in a period
    ps-sync, ps-backup  every step through servers; the slowest few are not waited for
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
from dataclasses import dataclass, replace
from statistics import NormalDist

from paceline.cost.collectives import collective_s, sigma
from paceline.cost.memory import with_more
from paceline.errors import PlanError
from paceline.predict.distributed import Step
from paceline.predict.interval import Z90, around
from paceline.predict.parallel import Ranks, slowest_of
from paceline.predict.way import Way
from paceline.queueing.mva import Station, solve
from paceline.sim.overlap import Transfer
from paceline.spec.cluster import Cluster, Group
from paceline.spec.plan import Plan
from paceline.spec.prediction import DistributedPrediction, Evidence, Fit, Part, Stage
from paceline.spec.synchronisation import Relaxation
from paceline.spec.vocabulary import Mode
from paceline.sync.accuracy import accuracy
from paceline.sync.servers import Servers, neighbour_s, servers

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


def predict(replica: Replica) -> DistributedPrediction:
    """The step of a replica with what its mode adds."""
    mode = replica.plan.relax.mode
    return answer(replica, _MODES[mode](replica))


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
    """Every step through servers; what the last backward and the first forward pass hide is not added."""
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
    # expected order statistics of a normal (Blom)
    place = (count - spare - 0.375) / (count + 0.25)
    late = max(0.0, NormalDist().inv_cdf(place)) if count > 1 else 0.0
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
            * slowest_of(replica.replicas)
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


_MODES = {
    "local-sgd": periodic,
    "diloco": periodic,
    "ps-sync": synchronous,
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


def answer(replica: Replica, more: Added) -> DistributedPrediction:
    """The prediction of a replica by itself with an exchange added."""
    alone, relax = replica.alone, replica.plan.relax
    own, added = _seconds(replica, more)
    step = sum(own.values()) + sum(added.values())
    sent = sum(seconds for name, seconds in added.items() if name not in (WAITING, OUTER))
    low, high = around(step, _sigma(replica, sent / step))
    ratio, exposed = alone.step_s / step * more.used, alone.exposed_s + sent
    stages = tuple(_with(stage, more.more_bytes) for stage in alone.stages)
    fullest = max((stage.memory for stage in stages), key=lambda memory: memory.peak_bytes)
    return replace(
        alone,
        plan=str(replica.plan),
        step_s=step,
        step_s_low=low,
        step_s_high=high,
        throughput=alone.throughput * ratio,
        mfu=alone.mfu * ratio,
        hfu=alone.hfu * alone.step_s / step,
        exposed_s=exposed,
        bound_by="communication" if exposed > 0.5 * step else alone.bound_by,
        breakdown=_breakdown(alone, own, added, step),
        stages=stages,
        fit=Fit(
            fits=fullest.fits, needed_bytes=fullest.reserved_bytes, available_bytes=fullest.available_bytes
        ),
        provenance=(*alone.provenance, *more.remarks),
        accuracy=accuracy(relax),
        energy_j=None if alone.energy_j is None else alone.energy_j * step / alone.step_s,
        cost_per_unit=None if alone.cost_per_unit is None else alone.cost_per_unit / ratio,
    )


def _seconds(replica: Replica, more: Added) -> tuple[dict[str, float], dict[str, float]]:
    """Where the time of a replica goes by itself, and what the exchange adds."""
    relax = replica.plan.relax
    added = {name: seconds for name, seconds in more.seconds.items() if seconds > 0}
    own = {part.name: part.seconds for part in replica.alone.breakdown}
    late = own.pop(WAITING, 0.0)
    # over the steps of a period, workers are late by less per step
    if late and relax.mode.averages_rarely:
        added[WAITING] = late / math.sqrt(relax.every)
    return own, added


def _sigma(replica: Replica, sent: float) -> float:
    """Standard deviation of the logarithm of a step, a share of which goes to what is sent."""
    alone, network = replica.alone, 0.0
    if replica.replicas > 1:
        group = replica.cluster.group(replica.replicas, replica.stride)
        network = float(sigma(1e7, group, replica.cluster, replica.library))
    own = math.log(alone.step_s_high / alone.step_s) / Z90
    return math.hypot((1 - sent) * own, sent * network)


def _breakdown(
    alone: DistributedPrediction, own: Mapping[str, float], added: Mapping[str, float], step: float
) -> tuple[Part, ...]:
    """The replica's parts and those that were added, largest first."""
    kinds = {WAITING: "bubble", OUTER: "memory"}
    listed = [replace(part, share=part.seconds / step) for part in alone.breakdown if part.name in own]
    for name, seconds in added.items():
        bound = kinds.get(name, "communication")
        listed.append(
            Part(name=name, seconds=seconds, share=seconds / step, count=1, bound_by=bound, flops=0.0)
        )
    return tuple(sorted(listed, key=lambda part: -part.seconds))


def _with(stage: Stage, more: float) -> Stage:
    """A stage whose device holds more."""
    return replace(stage, memory=with_more(stage.memory, more))


class Alone(Way):
    """Ranks that average every step within their island only, or not at all."""

    def __init__(self, relax: Relaxation) -> None:
        self.relax = relax

    def replicas(self, ranks: Ranks) -> Group:
        periodic = self.relax.mode.averages_rarely
        return ranks.cluster.group(island(ranks.plan, ranks.cluster, ranks.plan.dp) if periodic else 1)

    def transfers(self, ranks: Ranks) -> list[Transfer]:
        return ranks.usual_transfers() if self.replicas(ranks).size > 1 else []

    def averages(self, step: Step) -> bool:
        return False
