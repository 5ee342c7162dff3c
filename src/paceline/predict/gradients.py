"""Gradients and parameters of data-parallel ranks: in what pieces they are exchanged, and what of that is
exposed, in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from paceline.cost.operators import times
from paceline.cost.pack import PackedOps, pack_ops
from paceline.cost.transformer import adam_ops
from paceline.predict.layer import Held, Layer, Pass
from paceline.sim.program import buckets
from paceline.spec import schedules
from paceline.spec.framework import Framework
from paceline.spec.plan import Plan
from paceline.spec.workload import ITEMSIZE

#: frameworks that leave gradients to torch's DDP; the others put them together as Megatron does
TORCH_BUCKETS = ("torch", "torch-compile", "torch-compile-2024", "llm-foundry")
#: a collective that is still to be timed: operation, bytes, mesh axis
Exchange = tuple[str, float, str]


@dataclass(frozen=True, slots=True)
class StageTime:
    """What one stage does for one micro-batch."""

    layers: int
    first: bool
    last: bool
    forward: Pass
    backward: Pass
    recompute: Pass
    #: seconds that gathering and scattering sharded parameters adds to a micro-batch
    gather_forward_s: float
    gather_backward_s: float
    #: seconds of weight gradients in the backward pass
    weight_s: float

    @property
    def forward_s(self) -> float:
        return self.forward.beside(self.gather_forward_s)

    @property
    def backward_s(self) -> float:
        return self.backward.plus(self.recompute).beside(self.gather_backward_s)


@dataclass(frozen=True)
class Gradients(Layer):
    """What keeps the copies and the parts of a model on many ranks together."""

    def total(self, exchanges: Sequence[Exchange]) -> float:
        """Seconds of collectives one after another."""
        return sum(self.send(*exchange) for exchange in exchanges)

    def gathers(self) -> tuple[float, float]:
        """Seconds to gather one layer's sharded parameters, and to reduce and scatter its gradients."""
        if not self.sharded:
            return 0.0, 0.0
        layer = self.layer_parameters()
        return self.total(self.unshard(layer)), self.total(self.scatter(layer))

    def unshard(self, parameters: float) -> list[Exchange]:
        """What makes sharded parameters whole."""
        return [("all_gather", parameters * ITEMSIZE[self.shape.dtype], "shard")]

    def scatter(self, parameters: float) -> list[Exchange]:
        """What reduces their gradients and leaves each rank its part."""
        if self.plan.adapters:
            return []
        size, share = parameters * self.gradient_bytes, self.plan.shard or self.plan.dp * self.plan.cp
        return [("reduce_scatter", size, "shard"), ("all_reduce", size / share, "replicas")]

    # -- exposed -----------------------------------------------------------------------------------

    def data_parallel(self, stages: list[StageTime]) -> tuple[float, float]:
        """Exposed seconds of reducing gradients and of gathering parameters after the update."""
        reduce_s = gather_s = 0.0
        if self.replicated:
            reduce_s, gather_s = (
                self.overlapped(stages) if self.framework.dp_overlap else self.afterwards(stages)
            )
        elif self.sharded:
            # the ends are gathered and scattered outside the layers, before and after everything else
            end = max(self.end_parameters(stage.first, stage.last) for stage in stages)
            reduce_s, gather_s = (
                self.plan.micro_batches * self.total(found)
                for found in (self.scatter(end), self.unshard(end))
            )
        return reduce_s + self.total(self.tied), gather_s

    def afterwards(self, stages: list[StageTime]) -> tuple[float, float]:
        """The same where nothing hides it; later stages finish earlier, and reduce while the first ones still
        work.
        """
        reduce_s = gather_s = waited = 0.0
        for stage in stages:
            reduces, gathers = self.reduction(stage)
            reduce_s, gather_s = max(reduce_s, reduces - waited), max(gather_s, gathers)
            waited += stage.backward_s / self.plan.vpp
        return reduce_s, gather_s

    def overlapped(self, stages: list[StageTime]) -> tuple[float, float]:
        """The same bucket by bucket beside the last backward and the first forward pass.

        What hides slows these passes down, on every stage that they go through one after another. The bucket
        that is ready last, with the embedding, does not hide, nor does the first that a forward pass needs.
        """
        p, slow = self.plan, self.framework.contention
        schedule = schedules.get(p.schedule)
        each, split = schedule.chunks_per_rank(p.vpp), schedule.splits
        many = 1 + (each - 1) * p.pp  # passes through one chunk from when another's gradients are complete
        reduce_s = gather_s = late = 0.0
        for i in reversed(range(len(stages))):
            stage, ahead = stages[i], stages[:i]
            reduces, gathers = self.reduction(stage)
            size = self.parameters(stage)
            bucket = min(1.0, self.bucket / size)
            end = max(bucket, self.end_parameters(True, False) / size) if stage.first else bucket
            # where weights' gradients are put off, all stages end with them
            last = (stage.weight_s if split else stage.backward_s) / each
            waited = 0.0 if split else sum(other.backward_s for other in ahead) / each
            hidden = max(
                0.0,
                min(reduces * (1 - end), last * ((1 + many) / 2 if split else many - bucket) / (1 - slow)),
            )
            reduce_s = max(reduce_s, late + slow * hidden + reduces - hidden - waited)
            late += 0.0 if split else slow * min(hidden, last / (1 - slow))
            left = max(0.0, gathers - sum(other.forward_s for other in ahead) / each)
            hidden = min(left, gathers * (1 - end), stage.forward_s / each * many / (1 - slow))
            gather_s += slow * hidden if i else max(0.0, gathers - (1 - slow) * hidden)
        return max(reduce_s, late), gather_s

    # -- pieces ------------------------------------------------------------------------------------

    @property
    def bucket_bytes(self) -> float:
        """Gradients that are reduced at once: what the plan says, else torch's or Megatron's rule; all of
        them where nothing overlaps.
        """
        if not self.framework.dp_overlap:
            return math.inf
        if self.plan.bucket_bytes != Plan.bucket_bytes:
            return self.plan.bucket_bytes
        if self.framework.name in TORCH_BUCKETS:
            return 25 * 2.0**20
        return max(40e6, 1e6 * self.plan.dp * self.plan.cp) * self.gradient_bytes

    @property
    def first_bucket_bytes(self) -> float | None:
        """Of the bucket that is ready first: torch's is small, unless a size is given."""
        return (
            2.0**20
            if self.framework.name in TORCH_BUCKETS and self.plan.bucket_bytes == Plan.bucket_bytes
            else None
        )

    def reduction(self, stage: StageTime) -> tuple[float, float]:
        """Seconds to reduce a stage's gradients over the ranks that share them, and to gather what each has
        updated.
        """
        experts, dense = (
            stage.layers * self.expert_parameters(),
            stage.layers * (self.layer_parameters() - self.expert_parameters()),
        )
        end = self.end_parameters(stage.first, stage.last)
        if dense + experts + end <= self.bucket:
            whole = self.exchanges(dense + end, experts)
            return self.total(whole[0]), self.total(whole[1])
        if end < self.bucket:  # the ends are in a bucket with layers, or large tensors by themselves
            share, end = 1 + end / max(1.0, dense + experts), 0.0
        else:
            share = 1.0
        reduces, gathers = (self.total(found) for found in self.exchanges(end, 0.0))
        return reduces + share * stage.layers * self.layer_reduction[
            0
        ], gathers + share * stage.layers * self.layer_reduction[1]

    @cached_property
    def layer_buckets(self) -> list[tuple[float, bool]]:
        """Buckets of several layers in a row, as parameters and whether they are experts'; tensors are not
        cut.
        """
        out = []
        for experts in (False, True):
            sizes = [count for count, own in self.tensors("layer") if own == experts] * self._in_a_row
            out += [
                (sum(sizes[i] for i in bucket), experts)
                for bucket in buckets(sizes, self.bucket_bytes / self.gradient_bytes)
            ]
        return out

    @property
    def _in_a_row(self) -> int:
        return math.ceil(
            min(self.model.layers, 1 + 4 * self.bucket_bytes / self.gradient_bytes / self.layer_parameters())
        )

    @cached_property
    def bucket(self) -> float:
        """Parameters of one bucket, on average."""
        return max(
            sum(count for count, _ in self.layer_buckets) / len(self.layer_buckets),
            min(1e15, self.bucket_bytes / self.gradient_bytes),
        )

    @cached_property
    def layer_reduction(self) -> tuple[float, float]:
        """Seconds to reduce the gradients of a layer, and to gather its parameters, in their buckets."""
        found = [
            self.exchanges(0.0 if experts else count, count if experts else 0.0)
            for count, experts in self.layer_buckets
        ]
        reduces, gathers = (sum(self.total(pair[way]) for pair in found) / self._in_a_row for way in (0, 1))
        return reduces, gathers

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
        """What reduces the gradients of so many parameters, and gathers them after the update."""
        return self.way.exchanges(self, dense, experts)  # type: ignore[arg-type]

    def usual_exchanges(self, dense: float, experts: float) -> tuple[list[Exchange], list[Exchange]]:
        """The same where gradients are averaged in full."""
        low = ITEMSIZE[self.shape.dtype]
        zero = self.plan.sharding in ("zero1", "zero2")
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

    def optimizer(self, stages: list[StageTime]) -> float:
        """Seconds of the update, on the stage with the most parameters."""
        return self.update(max(self.updated(stage) for stage in stages))

    def updated(self, stage: Held) -> float:
        """Parameters of a stage that one rank updates; fewer ranks hold the same experts than hold the same
        of everything else.
        """
        p = self.plan
        if p.sharding not in ("zero1", "zero2", "fsdp", "hsdp"):
            return self.parameters(stage)
        experts = stage.layers * self.expert_parameters()
        return (self.parameters(stage) - experts) / (p.shard or p.dp * p.cp) + experts / self.group(
            "expert-dp"
        ).size

    def update(self, parameters: float) -> float:
        """Seconds of the update of a rank's share of a stage's parameters."""
        p = self.plan
        if p.adapters:
            return 0.0
        count = int(parameters)
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
