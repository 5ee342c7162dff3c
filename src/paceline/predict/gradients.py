"""Gradients and parameters of data-parallel ranks: in what pieces they are exchanged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from paceline.cost.operators import times
from paceline.cost.pack import PackedOps, pack_ops
from paceline.cost.transformer import adam_ops
from paceline.predict.layer import Held, Layer
from paceline.sim.work import Exchange
from paceline.spec import schedules
from paceline.spec.framework import Framework
from paceline.spec.plan import Plan
from paceline.spec.vocabulary import Sharding
from paceline.spec.workload import ITEMSIZE
from paceline.sync.way import BucketRule

#: frameworks that leave gradients to torch's DDP; the others put them together as Megatron does
TORCH_BUCKETS = ("torch", "torch-compile", "torch-compile-2024", "llm-foundry")


@dataclass(frozen=True)
class Gradients(Layer):
    """What keeps the copies and the parts of a model on many ranks together."""

    def unshard(self, parameters: float) -> list[Exchange]:
        """What makes sharded parameters whole."""
        return [("all_gather", parameters * ITEMSIZE[self.shape.dtype], "shard")]

    def scatter(self, parameters: float) -> list[Exchange]:
        """What reduces their gradients and leaves each rank its part."""
        if self.plan.adapters:
            return []
        size = parameters * self.gradient_bytes
        return [("reduce_scatter", size, "shard"), ("all_reduce", size / self.mesh.shards, "replicas")]

    # -- pieces ------------------------------------------------------------------------------------

    @property
    def timing(self) -> BucketRule:
        """Gradients are reduced in buckets as the plan says, else by torch's or Megatron's rule; all at once
        where nothing overlaps.
        """
        early, said = self.framework.dp_overlap, self.plan.bucket_bytes != Plan.bucket_bytes
        torch = self.framework.name in TORCH_BUCKETS and not said
        size = max(40e6, 1e6 * self.plan.dp * self.plan.cp) * self.gradient_bytes
        if torch or said:
            size = self.plan.bucket_bytes if said else 25 * 2.0**20
        return BucketRule(
            bucket_bytes=size if early else math.inf,
            first_bytes=2.0**20 if torch else None,
            early=early,
            gathers_early=early,
        )

    def tensors(self, kind: str) -> list[tuple[float, bool]]:
        """Parameters on one rank of the tensors of a piece, in the order in which a forward pass uses them,
        and whether they are experts'.
        """
        m, tp = self.model, self.plan.tp
        norm = [m.hidden / tp] * (2 if m.norm == "layer" else 1)
        if kind != "layer":
            both = self.plan.pp == 1 or self.ends(0) == (True, True)
            first = self.end_parameters(True, False)
            rest = self.end_parameters(both, True) - sum(norm) - (first if both else 0.0)
            table = m.vocab * m.hidden / tp
            found = (
                [table, *filter(None, [first - table])]
                if kind == "embedding"
                else [*norm, *filter(None, [rest])]
            )
            return [(count, False) for count in found]

        def linear(inputs: int, outputs: int) -> list[float]:
            return [inputs * outputs / tp, *[outputs / tp] * m.bias]

        def feed(width: int) -> list[float]:
            return [*linear(m.hidden, width) * (2 if m.gated else 1), *linear(width, m.hidden)]

        apart = (
            [*linear(m.hidden, m.q_size), *linear(m.hidden, m.kv_size) * 2]
            if m.gated
            else linear(m.hidden, m.q_size + 2 * m.kv_size)
        )
        attention = [m.attention_parameters / tp] if m.kv_rank else [*apart, *linear(m.q_size, m.hidden)]
        mixed = (
            [m.hidden * m.experts / tp, *(feed(m.shared_ffn) if m.shared_ffn else [])]
            if m.experts
            else feed(m.ffn)
        )
        experts = [count * tp for count in feed(m.ffn)] * (m.experts // self.plan.ep)
        return [
            *((count, False) for count in (*norm, *attention, *norm, *mixed)),
            *((count, True) for count in experts),
        ]

    def exchanges(self, dense: float, experts: float) -> tuple[list[Exchange], list[Exchange]]:
        """What reduces the gradients of so many parameters in full, and gathers them after the update."""
        low = ITEMSIZE[self.shape.dtype]
        zero = self.plan.sharding in (Sharding.ZERO1, Sharding.ZERO2)
        counts = [(axis, count) for axis, count in (("dp", dense), ("expert-dp", experts)) if count]
        reduces = [
            ("reduce_scatter" if zero else "all_reduce", count * self.gradient_bytes, axis)
            for axis, count in counts
        ]
        return reduces, [("all_gather", count * low, axis) for axis, count in counts] if zero else []

    @property
    def hop(self) -> list[Exchange]:
        """What takes an activation from one stage of the pipeline to the next."""
        part = self.plan.tp if self.plan.sp or self.framework.p2p_scattered else 1
        whole: list[Exchange] = (
            [("all_gather", self.shape.wide_bytes, "tp")] if part > 1 and not self.plan.sp else []
        )
        return [("send_recv", self.shape.wide_bytes / part, "pp"), *whole]

    @property
    def tied(self) -> list[Exchange]:
        """What keeps the two copies of an embedding equal that both ends of a pipeline hold."""
        p, m = self.plan, self.model
        if (
            not (
                m.tied
                and p.pp > 1
                and self.framework.tied_allreduce
                and not schedules.get(p.schedule).v_shaped
            )
            or p.adapters
        ):
            return []
        return [("all_reduce", m.vocab * m.hidden / p.tp * self.gradient_bytes, "ends")]

    @property
    def update_s(self) -> float:
        """Seconds of the update, on the stage with the most parameters."""
        return self.update(max(self.updated(stage) for stage in self.held()))

    def updated(self, stage: Held) -> float:
        """Parameters of a stage that one rank updates; fewer ranks hold the same experts than hold the same
        of everything else.
        """
        if self.plan.sharding.whole:
            return self.parameters(stage) * self.way.update_share(self.mesh.replicas)
        experts = stage.layers * self.expert_parameters()
        dense = self.parameters(stage) - experts
        return dense / self.mesh.shards + experts / self.mesh.group("expert-dp").size

    def update(self, parameters: float) -> float:
        """Seconds of the update of a rank's share of a stage's parameters."""
        p, count = self.plan, int(parameters)
        if p.adapters or not count:
            return 0.0
        seconds = float(
            times(_adam(count, self.shape.dtype, self.framework), self.chip, self.curves).seconds.sum()
        )
        if p.offload == "optimizer":
            moved = count * (self.gradient_bytes + ITEMSIZE[self.shape.dtype])
            seconds = max(seconds, moved / self.host_Bps)
        return seconds


@lru_cache(maxsize=1024)
def _adam(parameters: int, dtype: str, framework: Framework) -> PackedOps:
    return pack_ops(adam_ops(parameters, dtype, framework))
