"""Memory of one device of a pipeline stage: what its framework keeps for a whole step, and what comes and
goes.

    kept        parameters, gradients, optimizer state: by how the framework holds them, and what
                data-parallel ranks share
    activations micro-batches in flight, times what a layer saves of one
    passing     logits and their gradient, a layer run again and its gradients, copies that an optimizer makes

The peak is the fuller of two moments: a backward pass, with all activations there, and the update, with none.
The caching allocator reserves more than that, because blocks of different sizes do not serve each other well;
what it reserves has to fit beside the context and the buffers of the communicators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.cost import memory as device_memory
from paceline.cost.transformer import backward_bytes, head_bytes, saved_bytes
from paceline.sim.schedules import in_flight
from paceline.spec.cluster import Cluster
from paceline.spec.framework import Framework
from paceline.spec.plan import SHARED, SPREAD, Plan
from paceline.spec.prediction import Memory
from paceline.spec.vocabulary import Offload, Precision, Recompute, Sharding

if TYPE_CHECKING:
    from paceline.predict.distributed import TransformerStep
    from paceline.predict.stages import RankParts, StageLayers

#: bytes of the two moments of Adam, and of a copy of a parameter in fp32
MOMENTS, MASTER = 8, 4
#: elements that DeepSpeed reduces or gathers at once
DEEPSPEED_BUCKET = 5e8
#: parameters that its ZeRO-3 has whole at once
DEEPSPEED_GATHERED = 1e9
#: activations that stay on the device while others go to the host, in layers: one that leaves and one that
#: comes
OFFLOADED_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes for a whole step, and of what is whole only for a while: gathered parameters, and in a backward
    pass gradients that are reduced.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float = 0.0
    reduced: float = 0.0


def stage_memory(step: TransformerStep, stage: StageLayers, index: int) -> Memory:
    """Bytes of one device of a stage, by kind, when most is live."""
    return StageBytes(step, stage).memory(index)


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one device of a pipeline stage."""

    step: TransformerStep
    stage: StageLayers

    @property
    def framework(self) -> Framework:
        return self.step.framework

    @property
    def parts(self) -> RankParts:
        return self.step.parts

    @cached_property
    def low(self) -> int:
        """Of a parameter as it is computed with."""
        return self.step.sent.parameter_bytes

    def memory(self, index: int) -> Memory:
        """What a device of the stage at `index` holds when most is live."""
        state, live, blocks = self.kept, self.activations(index), list(self.update_blocks())
        where, passing = self._fuller(state)
        taken, update = self.framework.slack * (live + passing), max(blocks, default=0.0)
        if live + passing < update:
            where, live, passing = "update", 0.0, update
        by_kind = self._by_kind(state, live, passing)
        peak = sum(by_kind.values())
        # flat buffers as large as a rank's part find no room among freed activations
        taken = taken + cached(blocks) if self.framework.state == "deepspeed" else max(taken, update)
        return Memory(
            peak_bytes=peak,
            reserved_bytes=int(peak - int(live) - int(passing) + taken),
            by_kind=by_kind,
            available_bytes=int(available_bytes(self.step)),
            peak_at=f"stage {index}, {where}",
        )

    def _by_kind(self, state: Kept, activations: float, temporary: float) -> dict[str, int]:
        sizes = {
            "parameters": state.parameters,
            "gradients": state.gradients,
            "optimizer": state.optimizer,
            "activations": activations,
            "temporary": temporary,
            "workspace": device_memory.workspace_bytes(self.step.cluster.device),
        }
        return {kind: int(size) for kind, size in sizes.items()}

    def _fuller(self, state: Kept) -> tuple[str, float]:
        """Where in a backward pass most comes and goes, and how much."""
        loss, layer = self.passing
        backward = layer + state.reduced
        where = "loss" if loss > backward else "backward"
        return where, max(loss, backward) + state.gathered + self.placeholders

    # -- what is kept ------------------------------------------------------------------------------

    @property
    def kept(self) -> Kept:
        """Parameters, gradients and optimizer state, with what the plan leaves out or keeps elsewhere."""
        step, plan, found = self.step, self.step.plan, self._by_framework()
        parameters, gradients, optimizer = found.parameters, found.gradients, found.optimizer
        fp8 = self.layers if plan.precision is Precision.FP8 else 0.0
        if plan.adapters:
            gradients = optimizer = 0.0
            # weights that nobody updates are kept in fp8 alone
            frozen = self.low * self.whole - (self.low - 1) * fp8 * self.framework.fp8_saved
            parameters = parameters if step.sent.sharded else frozen
        if plan.offload is Offload.OPTIMIZER:
            optimizer = offloaded(0.0, optimizer, step.cluster)
        encoders = step.way.state_bytes * self.whole
        return replace(
            found,
            parameters=parameters + self.framework.fp8_weights * fp8,
            gradients=gradients,
            optimizer=optimizer * step.way.update_share(step.mesh.replicas) + encoders,
        )

    @cached_property
    def whole(self) -> float:
        """Parameters of the stage on one rank, where nothing is sharded."""
        return self.parts.whole(self.stage)

    @property
    def layers(self) -> float:
        """Parameters of its layers."""
        return self.stage.layers * self.parts.layer

    @property
    def share(self) -> float:
        """Parameters of which a rank has the state where that is sharded."""
        mesh = self.step.mesh
        experts = min(mesh.shards, mesh.group("expert-dp").size)
        return self.parts.shared(self.stage, mesh.shards, experts)

    def _by_framework(self) -> Kept:
        """State as the framework holds it."""
        f, whole, low, kind = self.framework, self.whole, self.low, self.step.plan.sharding
        gradients = self.share if kind.shards_gradients else whole
        optimizer = whole if kind.whole else self.share
        torch = f.state == "torch"
        if kind.shards_parameters or (torch and kind is Sharding.ZERO2):
            return self._sharded()
        if torch and low < MASTER:  # parameters in fp32, cast by autocast and kept so for the backward pass
            buckets = self.step.mesh.shards > 1 and kind is not Sharding.NONE
            return Kept((MASTER + low) * whole, MASTER * (1 + buckets) * whole, MOMENTS * optimizer)
        each = f.kept_gradients or (MASTER if f.fp32_gradients else low)
        if f.state == "deepspeed" and f.fp32_gradients:
            each += low
        state = MOMENTS + (MASTER if low < MASTER else 0)
        return Kept(low * whole, each * gradients, state * optimizer)

    def _sharded(self) -> Kept:
        """Each rank's part in fp32; the layers at hand are whole, and so are the gradients that are being
        reduced.
        """
        plan, low, part, layer = self.step.plan, self.low, self.share, self.parts.layer
        gradient = 0 if plan.adapters else self.step.sent.gradient_bytes
        gathered, gradients, reduced = self.whole, MASTER * part, 0.0
        if self.framework.state == "deepspeed":  # by weights and buckets, not by layers
            gathered, reduced = min(DEEPSPEED_GATHERED, gathered), low * min(DEEPSPEED_BUCKET, gathered)
        elif plan.pp > 1:  # gathered and reduced once for all micro-batches of a pipeline
            gradients += gradient * gathered
        else:
            if plan.reshard and plan.sharding is not Sharding.ZERO2:
                gathered = (1 + plan.prefetch) * layer + self.parts.ends(self.stage.first, self.stage.last)
            # this layer's, and copies of it and the one before
            reduced = (low + 2 * gradient) * layer if gradient else 0.0
        return Kept(MASTER * part, gradients, MOMENTS * part, low * gathered, reduced)

    # -- what comes and goes -----------------------------------------------------------------------

    @property
    def passing(self) -> tuple[float, float]:
        """In a backward pass: at the loss, and in a layer with what it runs again."""
        shape, table = self.step.shape, self.parts.table * self.low
        # the projection's gradient as its product gives it, before it is added to those of earlier
        # micro-batches
        loss = head_bytes(shape) + (not self.step.plan.adapters) * table
        again = saved_bytes(shape, Recompute.NONE) - saved_bytes(shape, self.step.plan.recompute)
        layer = backward_bytes(shape) + again
        return self.stage.last * loss, max(layer, self.stage.first * table)

    @property
    def placeholders(self) -> float:
        """Empty gradients of each shape of a layer's weights, which Transformer Engine keeps to hand to
        autograd where products add to the real ones.
        """
        f = self.framework
        if not (f.placeholders and f.fused_accumulation) or self.step.plan.adapters:
            return 0.0
        return self.low * sum({count for count, _ in self.parts.tensors("layer")})

    def update_blocks(self) -> Iterator[float]:
        """Large blocks that a step's reduction and update ask for one after another.

        DeepSpeed's optimizers (stage_1_and_2.py, bf16_optimizer.py): the embedding's gradient; with fp16,
        buckets to reduce, the largest gradient of this rank's part in fp32 to look for infinities and in fp64
        for its norm, and all of the part flat and in fp32; with bf16, each gradient in fp32 to add it up, and
        all of them in bf16 to reduce them. torch's Adam makes square roots of all second moments.
        """
        plan, state = self.step.plan, self.framework.state
        part = self.whole if plan.sharding.whole else self.whole / self.step.mesh.shards
        if plan.adapters or plan.offload is Offload.OPTIMIZER:
            return
        if state == "torch":
            yield 4.0 * part
        elif state == "deepspeed" and not self.step.sent.sharded:
            yield from self._flat_buffers(part)

    def _flat_buffers(self, part: float) -> Iterator[float]:
        """Of DeepSpeed's optimizers, for a rank's part."""
        low, ends = self.low, self.stage.first or self.stage.last
        largest = max(self.parts.table * ends, *(size for size, _ in self.parts.tensors("layer")))
        yield low * largest
        if self.framework.fp32_gradients:
            yield from (4 * largest, low * self.whole)
            return
        piece, bucket = min(largest, part), max(min(DEEPSPEED_BUCKET, self.whole), largest)
        yield from (low * bucket, 4 * piece, 8 * piece, low * part, 4 * part)

    def activations(self, index: int) -> float:
        """What the micro-batches in flight have saved."""
        plan = self.step.plan
        live = in_flight(plan.schedule, index, plan.pp, plan.micro_batches, plan.vpp)
        layer, embedding = saved(self.step)
        layers = live * self.stage.layers
        if plan.offload is Offload.ACTIVATIONS:
            here = min(OFFLOADED_LAYERS, layers) * layer
            return float(offloaded(here, layers * layer, self.step.cluster))
        return layers * layer + live * self.stage.first * embedding


def kept(step: TransformerStep, stage: StageLayers) -> Kept:
    """Parameters, gradients and optimizer state of a stage, as its framework holds them."""
    return StageBytes(step, stage).kept


def passing(step: TransformerStep, stage: StageLayers) -> tuple[float, float]:
    """Bytes that come and go in a backward pass: at the loss, and in a layer with what it runs again."""
    return StageBytes(step, stage).passing


def placeholders(step: TransformerStep) -> float:
    """Bytes of empty gradients."""
    return StageBytes(step, step.parts.stages[0]).placeholders


def update_bytes(step: TransformerStep, stage: StageLayers) -> float:
    """The largest block that the update asks for."""
    return max(StageBytes(step, stage).update_blocks(), default=0.0)


def available_bytes(step: TransformerStep) -> float:
    """Of a device, what is left beside its context and the buffers of its communicators."""
    taken = step.framework.context_bytes + communicators(step.plan) * device_memory.COMMUNICATOR_BYTES
    return step.cluster.device.memory_bytes - taken


def communicators(plan: Plan) -> int:
    """Groups of ranks that a device is in: each has buffers of its own outside the allocator."""
    axes = [getattr(plan, name) for name in (*SPREAD, *SHARED)]
    # neighbours in a pipeline are two
    return sum(size > 1 for size in (*axes, plan.pp, plan.replicas, plan.ranks))


def cached(blocks: Iterable[float]) -> float:
    """Bytes that an allocator reserves for large blocks that are each freed before the next is asked for: one
    is used again if it is large enough.
    """
    largest = total = 0.0
    for size in blocks:
        if size > largest:
            largest, total = size, total + size
    return total


def offloaded(here: Any, whole: Any, cluster: Cluster) -> Any:
    """Bytes on the device of what is offloaded: what has to be `here`, and what of the `whole` the host has
    no room for; of one plan, or of arrays.
    """
    return np.maximum(here, whole - device_memory.HOST_BYTES / cluster.node_devices)


def saved(step: TransformerStep) -> tuple[float, float]:
    """Bytes that a layer, and the embedding, save of one micro-batch."""
    shape = step.shape
    embedding = shape.local * step.model.hidden * step.sent.parameter_bytes
    return saved_bytes(shape, step.plan.recompute), embedding
