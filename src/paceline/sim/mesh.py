"""Where the ranks of a plan sit on a cluster, and what they take to send to one another.

Ranks are numbered with the tensor-parallel ones innermost, then context, data and pipeline, as Megatron,
DeepSpeed and torchtitan number them, so that a stride says which network a group uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from paceline.cost.collectives import collective_s, share_links
from paceline.sim.program import Label
from paceline.sim.work import TRANSFERS, Exchange
from paceline.spec import schedules
from paceline.spec.cluster import Cluster, Group
from paceline.spec.plan import Plan

#: networks of machines whose cores send by MPI
SUPERCOMPUTERS = ("aries", "slingshot", "omnipath")


def _as_they_are(op: str, size: float, axis: str, group: Group) -> float:
    return size


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of a resolved plan."""

    plan: Plan
    cluster: Cluster
    #: data-parallel ranks that average every step; 0: all of them
    island: int = 0
    #: bytes of a collective (operation, bytes, axis) over a group, as the framework sends them
    sent_bytes: Callable[[str, float, str, Group], float] = _as_they_are
    _labels: dict[tuple[Exchange, str], Label] = field(default_factory=dict, compare=False)

    @property
    def library(self) -> str:
        """What carries collectives."""
        if self.cluster.device.kind != "cpu":
            return "nccl"
        return "mpi" if any(tier.kind in SUPERCOMPUTERS for tier in self.cluster.tiers) else "gloo"

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters and average every step."""
        return (self.island or self.plan.dp) * self.plan.cp

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks of the model that a stage of the pipeline holds."""
        schedule = schedules.get(self.plan.schedule)
        return tuple(schedule.chunks_of(rank, self.plan.pp, schedule.chunks_per_rank(self.plan.vpp)))

    @property
    def shards(self) -> int:
        """Ranks among which what is sharded is spread."""
        return self.plan.shard or self.plan.dp * self.plan.cp

    def group(self, axis: str) -> Group:
        """Where the ranks of a mesh axis sit; `dp` is every rank that holds the same parameters, `pp` two
        neighbours of a pipeline, `ends` its first and last stage.
        """
        p, inner = self.plan, self.plan.tp * self.plan.cp
        two, stage, shards = 2 if p.pp > 1 else 1, inner * p.dp, self.shards
        size, stride = {
            "tp": (p.tp, 1),
            "cp": (p.cp, p.tp),
            "dp": (self.replicas, p.tp),
            "ep": (p.ep, 1),
            "pp": (two, stage),
            "ends": (two, stage * max(1, p.pp - 1)),
            "shard": (shards, p.tp),
            "replicas": (p.dp * p.cp // shards, p.tp * shards),
            "expert-dp": (max(1, stage // p.ep), p.ep),
        }[axis]
        return self.cluster.group(size, stride)

    def send(self, op: str, size: float, axis: str) -> float:
        """Seconds of a collective over a mesh axis."""
        group = self.group(axis)
        if group.size == 1 or size <= 0:
            return 0.0
        sent = self.sent_bytes(op, size, axis, group)
        return collective_s(op, sent, group, self.cluster, self.library)

    def total(self, exchanges: Iterable[Exchange]) -> float:
        """Seconds of collectives one after another."""
        return sum(self.send(*exchange) for exchange in exchanges)

    def label(self, exchange: Exchange, part: str) -> Label:
        """A collective as a task; transfers between stages of a pipeline leave the device alone."""
        if (exchange, part) not in self._labels:
            op, size, axis = exchange
            label = Label(op, part, self.send(*exchange), op, size, axis, crowds=part != TRANSFERS)
            self._labels[exchange, part] = label
        return self._labels[exchange, part]

    def labels(self, exchanges: Iterable[Exchange], part: str) -> tuple[Label, ...]:
        """Collectives one after another as tasks."""
        return tuple(self.label(exchange, part) for exchange in exchanges)

    def share(self, axes: tuple[str, ...]) -> Sequence[float]:
        """The pace of collectives over several axes at once, each as a share of its pace alone; groups beside
        them send at the same time.
        """
        groups = [self._near(self.group(axis)) for axis in axes]
        beside = [
            (i, replace(group, base=base))
            for i, group in enumerate(groups)
            for base in range(min(group.stride, self.cluster.node_devices))
        ]
        together = share_links([group for _, group in beside], self.cluster)
        out = []
        for i in range(len(groups)):
            mine = [n for n, (j, _) in enumerate(beside) if j == i]
            alone = share_links([beside[n][1] for n in mine], self.cluster)
            out.append(min(1.0, float((together[mine] / alone).min())))
        return out

    def _near(self, group: Group) -> Group:
        """A part of a group that shows on which links it is: two domains of the outermost tier but one."""
        cluster = self.cluster
        inner = cluster.domain(len(cluster.tiers) - 2) if len(cluster.tiers) > 1 else 1
        return cluster.group(min(group.size, max(2, 2 * inner // group.stride)), group.stride)
