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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from paceline.spec.workload import MEMORY_KINDS

if TYPE_CHECKING:
    from paceline.predict.distributed import TransformerStep
    from paceline.predict.stages import StageLayers

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
    """What a device of the stage at `index` holds when most is live."""
    state, live = kept(step, stage), activations(step, stage, index)
    where, coming = _fuller(step, stage, state)
    blocks = list(update_blocks(step, stage))
    taken, update = _taken(step.framework, live + coming, blocks), max(blocks, default=0.0)
    if live + coming < update:
        where, live, coming = "update", 0.0, update
    workspace = device_memory.workspace_bytes(step.cluster.device)
    sizes = (state.parameters, state.gradients, state.optimizer, live, coming, workspace)
    by_kind = dict(zip(MEMORY_KINDS, map(int, sizes), strict=True))
    peak = sum(by_kind.values())
    return Memory(
        peak_bytes=peak,
        reserved_bytes=int(peak - int(live) - int(coming) + taken),
        by_kind=by_kind,
        available_bytes=int(available_bytes(step)),
        peak_at=f"stage {index}, {where}",
    )


def _taken(framework: Framework, passing: float, blocks: Sequence[float]) -> float:
    """Bytes that the allocator reserves for what comes and goes in passes, and for blocks of the update."""
    taken = framework.slack * passing
    # flat buffers as large as a rank's part find no room among freed activations
    return taken + cached(blocks) if framework.state == "deepspeed" else max(taken, *blocks, 0.0)


def _fuller(step: TransformerStep, stage: StageLayers, state: Kept) -> tuple[str, float]:
    """Where in a backward pass most comes and goes, and how much."""
    loss, layer = passing(step, stage)
    backward = layer + state.reduced
    where = "loss" if loss > backward else "backward"
    return where, max(loss, backward) + state.gathered + placeholders(step)


# -- what is kept ----------------------------------------------------------------------------------


def kept(step: TransformerStep, stage: StageLayers) -> Kept:
    """Parameters, gradients and optimizer state of a stage, with what the plan leaves out or keeps
    elsewhere.
    """
    plan, f, way, found = step.plan, step.framework, step.way, _by_framework(step, stage)
    parameters, gradients, optimizer = found.parameters, found.gradients, found.optimizer
    whole, low = step.parts.whole(stage), step.sent.parameter_bytes
    fp8 = stage.layers * step.parts.layer if plan.precision is Precision.FP8 else 0.0
    if plan.adapters:
        gradients = optimizer = 0.0
        # weights that nobody updates are kept in fp8 alone
        frozen = low * whole - (low - 1) * fp8 * f.fp8_saved
        parameters = parameters if step.sent.sharded else frozen
    if plan.offload is Offload.OPTIMIZER:
        optimizer = offloaded(0.0, optimizer, step.cluster)
    return replace(
        found,
        parameters=parameters + f.fp8_weights * fp8,
        gradients=gradients,
        optimizer=optimizer * way.update_share(step.mesh.replicas) + way.state_bytes * whole,
    )


def _by_framework(step: TransformerStep, stage: StageLayers) -> Kept:
    """State as the framework holds it."""
    f, low, kind = step.framework, step.sent.parameter_bytes, step.plan.sharding
    whole, part, torch = step.parts.whole(stage), _part(step, stage), f.state == "torch"
    if kind.shards_parameters or (torch and kind is Sharding.ZERO2):
        return _sharded(step, stage, part)
    gradients, optimizer = part if kind.shards_gradients else whole, whole if kind.whole else part
    if torch and low < MASTER:  # parameters in fp32, cast by autocast and kept so for the backward pass
        buckets = step.mesh.shards > 1 and kind is not Sharding.NONE
        return Kept((MASTER + low) * whole, MASTER * (1 + buckets) * whole, MOMENTS * optimizer)
    master = MASTER * (low < MASTER)
    return Kept(low * whole, _gradient_bytes(f, low) * gradients, (MOMENTS + master) * optimizer)


def _gradient_bytes(framework: Framework, low: int) -> float:
    """Of a gradient as it is kept, where parameters are computed with in so many bytes."""
    f = framework
    both = low if f.state == "deepspeed" and f.fp32_gradients else 0
    return (f.kept_gradients or (MASTER if f.fp32_gradients else low)) + both


def _part(step: TransformerStep, stage: StageLayers) -> float:
    """Parameters of which a rank has the state where that is sharded."""
    shards = step.mesh.shards
    return step.parts.shared(stage, shards, min(shards, step.mesh.group("expert-dp").size))


def _sharded(step: TransformerStep, stage: StageLayers, part: float) -> Kept:
    """Each rank's part in fp32; the layers at hand are whole, and so are the gradients that are being
    reduced.
    """
    plan, parts, low, layer = step.plan, step.parts, step.sent.parameter_bytes, step.parts.layer
    gradient = 0 if plan.adapters else step.sent.gradient_bytes
    gathered, gradients, reduced = parts.whole(stage), MASTER * part, 0.0
    if step.framework.state == "deepspeed":  # by weights and buckets, not by layers
        gathered, reduced = min(DEEPSPEED_GATHERED, gathered), low * min(DEEPSPEED_BUCKET, gathered)
    elif plan.pp > 1:  # gathered and reduced once for all micro-batches of a pipeline
        gradients += gradient * gathered
    else:
        if plan.reshard and plan.sharding is not Sharding.ZERO2:
            gathered = (1 + plan.prefetch) * layer + parts.ends(stage.first, stage.last)
        # this layer's, and copies of it and the one before
        reduced = (low + 2 * gradient) * layer if gradient else 0.0
    return Kept(MASTER * part, gradients, MOMENTS * part, low * gathered, reduced)


# -- what comes and goes ---------------------------------------------------------------------------


def passing(step: TransformerStep, stage: StageLayers) -> tuple[float, float]:
    """Bytes that come and go in a backward pass: at the loss, and in a layer with what it runs again."""
    shape, plan, table = step.shape, step.plan, step.parts.table * step.sent.parameter_bytes
    # the projection's gradient as its product gives it, before it is added to those of earlier
    # micro-batches
    loss = head_bytes(shape) + (not plan.adapters) * table
    again = saved_bytes(shape, Recompute.NONE) - saved_bytes(shape, plan.recompute)
    return stage.last * loss, max(backward_bytes(shape) + again, stage.first * table)


def placeholders(step: TransformerStep) -> float:
    """Bytes of empty gradients of each shape of a layer's weights, which Transformer Engine keeps to hand to
    autograd where products add to the real ones.
    """
    f = step.framework
    if not (f.placeholders and f.fused_accumulation) or step.plan.adapters:
        return 0.0
    return step.sent.parameter_bytes * sum({count for count, _ in step.parts.tensors("layer")})


def update_bytes(step: TransformerStep, stage: StageLayers) -> float:
    """The largest block that the update asks for."""
    return max(update_blocks(step, stage), default=0.0)


def update_blocks(step: TransformerStep, stage: StageLayers) -> Iterator[float]:
    """Large blocks that a step's reduction and update ask for one after another.

    DeepSpeed's optimizers (stage_1_and_2.py, bf16_optimizer.py): the embedding's gradient; with fp16,
    buckets to reduce, the largest gradient of this rank's part in fp32 to look for infinities and in fp64
    for its norm, and all of the part flat and in fp32; with bf16, each gradient in fp32 to add it up, and
    all of them in bf16 to reduce them. torch's Adam makes square roots of all second moments.
    """
    plan, state, whole = step.plan, step.framework.state, step.parts.whole(stage)
    part = whole if plan.sharding.whole else whole / step.mesh.shards
    if plan.adapters or plan.offload is Offload.OPTIMIZER:
        return
    if state == "torch":
        yield 4.0 * part
    elif state == "deepspeed" and not step.sent.sharded:
        yield from _flat_buffers(step, stage, whole, part)


def _flat_buffers(step: TransformerStep, stage: StageLayers, whole: float, part: float) -> tuple[float, ...]:
    """Of DeepSpeed's optimizers, for a rank's part of the whole."""
    low, table = step.sent.parameter_bytes, step.parts.table * (stage.first or stage.last)
    largest = max(table, *(size for size, _ in step.parts.tensors("layer")))
    if step.framework.fp32_gradients:
        return low * largest, 4 * largest, low * whole
    piece, bucket = min(largest, part), max(min(DEEPSPEED_BUCKET, whole), largest)
    return low * largest, low * bucket, 4 * piece, 8 * piece, low * part, 4 * part


def activations(step: TransformerStep, stage: StageLayers, index: int) -> float:
    """What the micro-batches in flight have saved."""
    plan, (layer, embedding) = step.plan, saved(step)
    live = in_flight(plan.schedule, index, plan.pp, plan.micro_batches, plan.vpp)
    layers = live * stage.layers
    if plan.offload is Offload.ACTIVATIONS:
        here = min(OFFLOADED_LAYERS, layers) * layer
        return float(offloaded(here, layers * layer, step.cluster))
    return layers * layer + live * stage.first * embedding


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
