"""Memory of one device of a captured module: the lifetimes of its tensors, of which ranks hold shares, and
what is whole for a moment besides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.cost import memory as device_memory
from paceline.predict.program import enough
from paceline.sim.schedules import actions, in_flight, most_live
from paceline.spec.prediction import Memory
from paceline.spec.vocabulary import Sharding
from paceline.sync.way import full_bytes

if TYPE_CHECKING:
    from paceline.predict.captured import Module


def stage_memory(module: Module, rank: int) -> Memory:
    """Of one device of a stage."""
    kind, part = module.plan.sharding, 1 / module.shards
    share = module.in_stage(module.parameter_bytes, rank) / max(1, sum(module.parameter_bytes))
    more, inside = _for_a_moment(module, rank)
    found = device_memory.memory(
        module.workload,
        module.cluster.device,
        held={
            "parameters": share * (part if kind.shards_parameters else 1.0),
            "gradients": share * (part if kind.shards_gradients else 1.0),
            "optimizer": share * module.update_share,
            "activations": live(module, rank),
        },
        more=more,
        inside=inside,
        accumulated=module.plan.micro_batches > 1,
    )
    trained = sum(gradient.numel for gradient in module.gradients[rank])
    return device_memory.with_more(found, module.way.state_bytes * trained)


def _for_a_moment(module: Module, rank: int) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes by kind that a rank holds besides its share: for the whole step, and while a block runs."""
    kind = module.plan.sharding
    if kind is Sharding.ZERO2:
        buckets = [full_bytes(message.gradients) for message in module.messages[rank]]
        return {"gradients": max(buckets, default=0.0)}, {}
    if not kind.shards_parameters:
        copied = kind is not Sharding.NONE and module.style.copies  # buckets hold gradients once more
        return {"gradients": module.in_stage(module.gradient_bytes, rank) if copied else 0.0}, {}
    return _gathered(module, rank)


def _gathered(module: Module, rank: int) -> tuple[dict[str, float], dict[str, float]]:
    """The same of sharded parameters: what is in no block, and the blocks at hand."""
    units = [module.units[number] for number in module.mesh.chunks(rank)]
    roots = sum(root.bytes for root, *_ in units)
    sizes = sorted((unit.bytes for _, *blocks in units for unit in blocks), reverse=True)
    at_hand = sum(sizes[: 1 + module.plan.prefetch])
    # gradients of one unit are whole when all are there
    more = {"parameters": roots * module.gathered_share, "gradients": 0 if sizes else roots}
    return more, {"parameters": at_hand * module.gathered_share, "gradients": max(sizes, default=0)}


def live(module: Module, rank: int) -> float:
    """The most of a micro-batch's activations that a stage holds at once, in whole micro-batches."""
    p = module.plan
    if p.pp == 1:
        return 1.0
    few = min(p.micro_batches, enough(p))
    full, steady = (in_flight(p.schedule, rank, p.pp, count, p.vpp) for count in (p.micro_batches, few))
    shown = p.micro_batches if full > steady else few
    return most_live(actions(p.schedule, rank, p.pp, shown, p.vpp), activations(module))


def activations(module: Module) -> list[float]:
    """Of a micro-batch's activations, the share of each chunk: what its operators write."""
    written = (sum(op.bytes_written for op in module.operators[slice(*c.forward)]) for c in module.chunks)
    sizes = list(written)
    return [size / max(1, sum(sizes)) for size in sizes]
