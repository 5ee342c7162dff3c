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
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.cost import memory as device_memory
from paceline.cost.transformer import backward_bytes, head_bytes, saved_bytes
from paceline.spec import schedules
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan
from paceline.spec.prediction import Memory
from paceline.spec.workload import ITEMSIZE

if TYPE_CHECKING:
    from paceline.predict.distributed import Step
    from paceline.predict.layer import Held

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


def stage_memory(step: Step, stage: Held, index: int) -> Memory:
    """Bytes of one device of a stage, by kind, when most is live."""
    state = kept(step, stage)
    activations = _activations(step, stage, index)
    loss, layer = passing(step, stage)
    come = max(loss, layer + state.reduced) + state.gathered + placeholders(step)
    blocks = list(_update_blocks(step, stage))
    update = max(blocks, default=0.0)
    training = activations + come >= update
    by_kind = {
        kind: int(size)
        for kind, size in (
            ("parameters", state.parameters),
            ("gradients", state.gradients),
            ("optimizer", state.optimizer),
            ("activations", activations if training else 0.0),
            ("temporary", come if training else update),
            ("workspace", device_memory.workspace_bytes(step.cluster.device)),
        )
    }
    peak, lasting = sum(by_kind.values()), by_kind["temporary"] + by_kind["activations"]
    taken = step.framework.slack * (activations + come)
    # flat buffers as large as a rank's part find no room among freed activations
    taken = taken + cached(blocks) if step.framework.state == "deepspeed" else max(taken, update)
    where = "update" if not training else "loss" if loss > layer + state.reduced else "backward"
    return Memory(
        peak_bytes=peak,
        reserved_bytes=int(peak - lasting + taken),
        by_kind=by_kind,
        available_bytes=int(available_bytes(step)),
        peak_at=f"stage {index}, {where}",
    )


def available_bytes(step: Step) -> float:
    """Of a device, what is left beside its context and the buffers of its communicators."""
    return (
        step.cluster.device.memory_bytes
        - step.framework.context_bytes
        - communicators(step.plan) * device_memory.COMMUNICATOR_BYTES
    )


def passing(step: Step, stage: Held) -> tuple[float, float]:
    """Bytes that come and go in a backward pass: at the loss, and in a layer with what it runs again."""
    shape = step.shape
    loss = head_bytes(shape) + _head_gradient(step) if stage.last else 0.0
    again = saved_bytes(shape, "none") - saved_bytes(shape, step.plan.recompute)
    layer = max(backward_bytes(shape) + again, _table(step) * ITEMSIZE[shape.dtype] if stage.first else 0.0)
    return loss, layer


def update_bytes(step: Step, stage: Held) -> float:
    """The largest block that the update asks for."""
    return max(_update_blocks(step, stage), default=0.0)


def communicators(plan: Plan) -> int:
    """Groups of ranks that a device is in: each has buffers of its own outside the allocator."""
    # neighbours in a pipeline are two
    axes = (plan.tp, plan.cp, plan.dp * plan.cp, plan.ep, plan.pp, plan.pp)
    return sum(size > 1 for size in axes) + (plan.ranks > 1)


def cached(blocks: Iterable[float]) -> float:
    """Bytes that an allocator reserves for large blocks that are each freed before the next is asked for: one
    is used again if it is large enough.
    """
    largest = total = 0.0
    for size in blocks:
        if size > largest:
            largest, total = size, total + size
    return total


# -- what is kept ----------------------------------------------------------------------------------


def kept(step: Step, stage: Held) -> Kept:
    """Parameters, gradients and optimizer state of a stage, as its framework holds them."""
    plan, low = step.plan, ITEMSIZE[step.shape.dtype]
    experts = stage.layers * step.expert_parameters()
    dense = step.parameters(stage) - experts
    shards, expert_shards = plan.shard or plan.dp * plan.cp, max(1, plan.dp * plan.cp * plan.tp // plan.ep)

    def share(sharded: bool) -> float:
        return dense / shards + experts / min(shards, expert_shards) if sharded else dense + experts

    whole, zero = share(False), plan.sharding in ("zero1", "zero2")
    state = (MASTER if low < 4 else 0) + MOMENTS
    if step.sharded or (step.framework.state == "torch" and plan.sharding == "zero2"):
        found = _sharded(step, stage, share(True))
    # parameters in fp32, cast by autocast and kept so for the backward pass
    elif step.framework.state == "torch" and low < 4:
        buckets = 4.0 * whole if plan.dp * plan.cp > 1 and plan.sharding != "none" else 0.0
        found = Kept((4 + low) * whole, 4.0 * whole + buckets, MOMENTS * share(zero))
    else:
        each = step.framework.kept_gradients or (4 if step.framework.fp32_gradients else low)
        each += low if step.framework.state == "deepspeed" and step.framework.fp32_gradients else 0
        found = Kept(low * whole, each * share(plan.sharding == "zero2"), state * share(zero))
    if plan.adapters:
        frozen = low * whole
        # weights that nobody updates are kept in fp8 alone
        if step.shape.matrix == "fp8" and step.framework.fp8_saved:
            frozen -= (low - 1) * stage.layers * step.layer_parameters()
        found = replace(
            found, gradients=0.0, optimizer=0.0, parameters=found.parameters if step.sharded else frozen
        )
    if plan.offload == "optimizer":
        found = replace(found, optimizer=offloaded(0.0, found.optimizer, step.cluster))
    way = step.way
    encoders = way.state_bytes * step.parameters(stage)
    found = replace(found, optimizer=found.optimizer * way.update_share(step.mesh.replicas) + encoders)
    fp8 = (
        step.framework.fp8_weights * stage.layers * step.layer_parameters()
        if step.shape.matrix == "fp8"
        else 0.0
    )
    return replace(found, parameters=found.parameters + fp8)


def _sharded(step: Step, stage: Held, share: float) -> Kept:
    """Each rank's part in fp32; the layers at hand are whole, and so are the gradients that are being
    reduced.
    """
    plan, low, layer = step.plan, ITEMSIZE[step.shape.dtype], step.layer_parameters()
    if step.framework.state == "deepspeed":  # by weights and buckets, not by layers
        gathered, reduced = (
            low * min(DEEPSPEED_GATHERED, step.parameters(stage)),
            low * min(DEEPSPEED_BUCKET, step.parameters(stage)),
        )
        return Kept(4 * share, 4 * share, MOMENTS * share, gathered, reduced)
    if plan.pp > 1:  # gathered and reduced once for all micro-batches of a pipeline
        whole = step.parameters(stage)
        return Kept(
            4 * share,
            4 * share + (0.0 if plan.adapters else step.gradient_bytes * whole),
            MOMENTS * share,
            low * whole,
        )
    ends = step.end_parameters(stage.first, stage.last)
    dropped = plan.reshard and plan.sharding != "zero2"
    gathered = low * ((1 + plan.prefetch) * layer + ends) if dropped else low * step.parameters(stage)
    # this layer's, and copies of it and the one before
    reduced = 0.0 if plan.adapters else low * layer + 2.0 * step.gradient_bytes * layer
    return Kept(4 * share, 4 * share, MOMENTS * share, gathered, reduced)


def _table(step: Step) -> float:
    """Parameters of the embedding's, or the projection's, part on one rank."""
    return step.model.vocab * step.model.hidden / step.plan.tp


def _head_gradient(step: Step) -> float:
    """The projection's gradient as its product gives it, before it is added to those of earlier
    micro-batches.
    """
    return 0.0 if step.plan.adapters else _table(step) * ITEMSIZE[step.shape.dtype]


def placeholders(step: Step) -> float:
    """Empty gradients of each shape of a layer's weights, which Transformer Engine keeps to hand to autograd
    where products add to the real ones.
    """
    if not (step.framework.placeholders and step.framework.fused_accumulation) or step.plan.adapters:
        return 0.0
    return ITEMSIZE[step.shape.dtype] * sum({count for count, _ in step.tensors("layer")})


def _update_blocks(step: Step, stage: Held) -> Iterator[float]:
    """Large blocks that a step's reduction and update ask for one after another, in bytes.

    DeepSpeed's optimizers (stage_1_and_2.py, bf16_optimizer.py): the embedding's gradient; with fp16, buckets
    to reduce, the largest gradient of this rank's part in fp32 to look for infinities and in fp64 for its
    norm, and all of the part flat and in fp32; with bf16, each gradient in fp32 to add it up, and all of them
    in bf16 to reduce them. torch's Adam makes square roots of all second moments.
    """
    plan, low, count = step.plan, ITEMSIZE[step.shape.dtype], step.parameters(stage)
    shards = plan.shard or plan.dp * plan.cp
    if plan.adapters or plan.offload == "optimizer":
        return
    if step.framework.state == "torch":
        yield 4.0 * count / (shards if plan.sharding not in ("none", "ddp") else 1)
        return
    if step.framework.state != "deepspeed" or step.sharded:
        return
    largest = max(
        _table(step) if stage.first or stage.last else 0.0, *(size for size, _ in step.tensors("layer"))
    )
    yield low * largest
    if step.framework.fp32_gradients:
        yield from (4 * largest, low * count)
        return
    part = count / (shards if plan.sharding in ("zero1", "zero2") else 1)
    piece = min(largest, part)
    yield from (low * max(min(DEEPSPEED_BUCKET, count), largest), 4 * piece, 8 * piece, low * part, 4 * part)


# -- activations -----------------------------------------------------------------------------------


def _activations(step: Step, stage: Held, index: int) -> float:
    """What the micro-batches in flight have saved."""
    plan = step.plan
    live = in_flight(plan.schedule, index, plan.pp, plan.micro_batches, plan.vpp)
    layer, embedding = saved(step)
    if plan.offload == "activations":
        here, layers = min(OFFLOADED_LAYERS, live * stage.layers), live * stage.layers
        return float(offloaded(here * layer, layers * layer, step.cluster))
    return live * (stage.layers * layer + (embedding if stage.first else 0.0))


def offloaded(here: Any, whole: Any, cluster: Cluster) -> Any:
    """Bytes on the device of what is offloaded: what has to be `here`, and what of the `whole` the host has
    no room for; of one plan, or of arrays.
    """
    return np.maximum(here, whole - device_memory.HOST_BYTES / cluster.node_devices)


def saved(step: Step) -> tuple[float, float]:
    """Bytes that a layer, and the embedding, save of one micro-batch."""
    return (
        saved_bytes(step.shape, step.plan.recompute),
        step.shape.local * step.model.hidden * ITEMSIZE[step.shape.dtype],
    )


def in_flight(schedule: str, index: int, pp: int, micro_batches: int, vpp: int = 1) -> float:
    """Micro-batches whose activations a rank of a pipeline holds at once; parts of one where it holds several
    chunks.

    Activations are held until the weights' gradients are done, which some schedules put off.
    """
    if pp == 1:
        return 1.0
    order = schedules.get(schedule)
    known = order.in_flight(index, pp, micro_batches, vpp)
    if known is not None:
        return known
    few = min(micro_batches, 4 * pp)
    found = _walked(order, index, pp, few, vpp)
    steady = few == micro_batches or found == _walked(order, index, pp, min(micro_batches, 2 * few), vpp)
    return found if steady else _walked(order, index, pp, micro_batches, vpp)


@lru_cache(maxsize=65536)
def _walked(schedule: schedules.Schedule, index: int, pp: int, micro_batches: int, vpp: int) -> float:
    """`in_flight`, counted along a rank's actions."""
    live = most = 0
    for action in schedule.actions(index, pp, micro_batches, vpp):
        live += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, live)
    return most / schedule.chunks_per_rank(vpp)
