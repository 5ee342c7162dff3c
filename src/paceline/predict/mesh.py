"""Where the ranks of a plan sit on a cluster, and what they take to send to one another.

Ranks are numbered with the tensor-parallel ones innermost, then context, data and pipeline, as Megatron,
DeepSpeed and torchtitan number them, so that a stride says which network a group uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.cost.collectives import collective_s, share_links
from paceline.sim.program import Label
from paceline.sim.work import TRANSFERS, Exchange
from paceline.spec.cluster import Cluster, Group
from paceline.spec.plan import Plan

#: networks of machines whose cores send by MPI
SUPERCOMPUTERS = ("aries", "slingshot", "omnipath")


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of a resolved plan."""

    plan: Plan
    cluster: Cluster
    #: data-parallel ranks that average every step; 0: all of them
    island: int = 0

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
        return collective_s(op, size, group, self.cluster, self.library)

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


def labelled(exchange: Exchange, part: str, seconds: float) -> Label:
    """A collective as a task; transfers between stages of a pipeline leave the device alone."""
    op, size, axis = exchange
    return Label(op, part, seconds, op, size, axis, crowds=part != TRANSFERS)
