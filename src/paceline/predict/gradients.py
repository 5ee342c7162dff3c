"""What the ranks of a transformer exchange around its layers: gradients and parameters of data-parallel
ranks, activations between stages; and in what pieces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from paceline.cost.tape import Shape
from paceline.predict import sharded
from paceline.predict.stages import RankParts
from paceline.sim.mesh import Mesh
from paceline.sim.work import Exchange
from paceline.spec.framework import Framework
from paceline.spec.plan import Plan
from paceline.spec.vocabulary import Sharding, StateKeeper
from paceline.spec.workload import ITEMSIZE
from paceline.sync.way import BucketRule


@dataclass(frozen=True)
class Exchanges:
    """Collectives of a plan around a transformer's layers: operation, bytes, mesh axis."""

    parts: RankParts
    mesh: Mesh
    framework: Framework
    shape: Shape

    @cached_property
    def plan(self) -> Plan:
        return self.mesh.plan

    @cached_property
    def parameter_bytes(self) -> int:
        """Of one parameter, as it is used and gathered."""
        return ITEMSIZE[self.shape.dtype]

    @cached_property
    def gradient_bytes(self) -> int:
        """Of one parameter, as it is reduced."""
        return 4 if self.framework.reduce_fp32 else self.parameter_bytes

    # -- data-parallel ranks -----------------------------------------------------------------------

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded, and gathered layer by layer."""
        return self.plan.sharding.shards_parameters

    @property
    def replicated(self) -> bool:
        """Whether whole gradients are reduced once per step."""
        return self.mesh.replicas > 1 and not self.sharded and not self.plan.adapters

    @property
    def buckets(self) -> BucketRule:
        """Gradients are reduced in buckets as the plan says, or where it does not by Megatron's rule under a
        framework that is built on it; all at once where nothing overlaps.
        """
        early, plan, size = self.framework.dp_overlap, self.plan, self.plan.bucket_bytes
        torch = self.framework.state is StateKeeper.TORCH
        if size == Plan.bucket_bytes and not torch:
            size = max(40e6, 1e6 * plan.dp * plan.cp) * self.gradient_bytes
        return BucketRule(
            bucket_bytes=size if early else math.inf,
            first_bytes=plan.relax.defaults.first_bucket_bytes if torch else None,
            early=early,
            gathers_early=early,
        )

    def unshard(self, parameters: float) -> list[Exchange]:
        """What makes sharded parameters whole."""
        return sharded.gather(parameters * self.parameter_bytes)

    def scatter(self, parameters: float) -> list[Exchange]:
        """What reduces their gradients and leaves each rank its part."""
        if self.plan.adapters:
            return []
        return sharded.scatter(parameters * self.gradient_bytes, self.mesh.shards)

    def whole(self, dense: float, experts: float) -> tuple[list[Exchange], list[Exchange]]:
        """What reduces the gradients of so many parameters in full, and gathers them after the update."""
        zero = self.plan.sharding in (Sharding.ZERO1, Sharding.ZERO2)
        op = "reduce_scatter" if zero else "all_reduce"
        counts = [(axis, count) for axis, count in (("dp", dense), ("expert-dp", experts)) if count]
        gathers = [("all_gather", count * self.parameter_bytes, axis) for axis, count in counts]
        return [(op, count * self.gradient_bytes, axis) for axis, count in counts], gathers if zero else []

    # -- stages of the pipeline --------------------------------------------------------------------

    @property
    def hop(self) -> list[Exchange]:
        """What takes an activation from one stage of the pipeline to the next."""
        p, wide = self.plan, self.shape.wide_bytes
        part = p.tp if p.sp or self.framework.p2p_scattered else 1
        whole = [("all_gather", wide, "tp")] if part > 1 and not p.sp else []
        return [("send_recv", wide / part, "pp"), *whole]

    @property
    def tied(self) -> list[Exchange]:
        """What keeps the two copies of an embedding equal that both ends of a pipeline hold."""
        copied = self.parts.model.tied and not self.parts.ends_together
        if not copied or not self.framework.tied_allreduce or self.plan.adapters:
            return []
        return [("all_reduce", self.parts.table * self.gradient_bytes, "ends")]
