"""Memory of one device of a captured module: the lifetimes of its tensors, of which ranks hold shares, and
what is whole for a moment besides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.cost import memory as device_memory
from paceline.predict.program import enough
from paceline.sim.schedules import actions, in_flight
from paceline.spec.prediction import Memory
from paceline.spec.vocabulary import Sharding
from paceline.sync.way import full_bytes

if TYPE_CHECKING:
    from paceline.predict.captured import Module


def stage_memory(module: Module, rank: int) -> Memory:
    """Of one device of a stage."""
    kind, mine, part = module.plan.sharding, module.mesh.chunks(rank), 1 / module.shards
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
    trained = sum(gradient.numel for gradient in module.gradients if gradient.needed[0] in mine)
    return device_memory.with_more(found, module.way.state_bytes * trained)


def _for_a_moment(module: Module, rank: int) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes by kind that a rank holds besides its share: for the whole step, and while a block runs."""
    kind, buckets = module.plan.sharding, 0.0
    if kind.shards_parameters:
        return _gathered(module, module.mesh.chunks(rank))
    if kind is Sharding.ZERO2:
        buckets = max((full_bytes(message.gradients) for message in module.messages[rank]), default=0.0)
    elif kind is not Sharding.NONE and module.style.copies:  # buckets hold them once more
        buckets = module.in_stage(module.gradient_bytes, rank)
    return {"gradients": buckets}, {}


def _gathered(module: Module, mine: tuple[int, ...]) -> tuple[dict[str, float], dict[str, float]]:
    """The same of sharded parameters: what is in no block, and the blocks at hand."""
    roots = sum(module.units[number][0].bytes for number in mine)
    sizes = sorted((unit.bytes for number in mine for unit in module.units[number][1:]), reverse=True)
    whole = sum(sizes[: 1 + module.plan.prefetch])
    more: dict[str, float] = {"parameters": roots * module.gathered_share}
    if not sizes:  # one unit, whose gradients are whole when all are there
        more["gradients"] = roots
    return more, {"parameters": whole * module.gathered_share, "gradients": max([*sizes, 0])}


def live(module: Module, rank: int) -> float:
    """The most of a micro-batch's activations that a stage holds at once, in whole micro-batches."""
    p, kept = module.plan, activations(module)
    if p.pp == 1:
        return 1.0
    few = min(p.micro_batches, enough(p))
    full, steady = (in_flight(p.schedule, rank, p.pp, count, p.vpp) for count in (p.micro_batches, few))
    if full == p.micro_batches:  # before the first goes back
        return full * sum(kept[number] for number in module.mesh.chunks(rank))
    held = most = 0.0
    change = {"F": 1.0, "B": -1.0, "W": -1.0}
    for chunk, kind, _ in actions(p.schedule, rank, p.pp, p.micro_batches if full > steady else few, p.vpp):
        held += kept[chunk] * change.get(kind, 0.0)
        most = max(most, held)
    return most


def activations(module: Module) -> list[float]:
    """Of a micro-batch's activations, the share of each chunk: what its operators write."""
    written = np.array([float(op.bytes_written) for op in module.operators])
    sizes = [float(written[slice(*chunk.forward)].sum()) for chunk in module.chunks]
    return [size / max(1.0, sum(sizes)) for size in sizes]
