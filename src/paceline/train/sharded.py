"""FSDP2, HSDP and tensor parallelism by plan, through torch.distributed, for models with repeated blocks.

fsdp    parameters, gradients and optimizer state of every block shared by all data-parallel ranks
hsdp    the same within groups of `shard` ranks, replicated across groups
tp      attention and feed-forward of each block split by heads and by hidden units: the first products by
columns, the last by rows
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

from paceline.errors import PlanError
from paceline.spec import trained
from paceline.spec.plan import Plan
from paceline.spec.vocabulary import Precision, Sharding
from paceline.train.memory import blocks_of
from paceline.train.split_state import refuse_parts_of_one_rank
from paceline.train.whole import Split, leave

#: part of the names of a mesh's axes: torch's caches take meshes of the same names and ranks for one, and
#: would use groups that were given back
_numbers = itertools.count()


def mesh_of(plan: Plan, device: torch.device) -> DeviceMesh:
    """Ranks arranged as a resolved plan says: replicas, shards, stages, tensor, the last side by side."""
    dp = plan.dp
    sizes: dict[str, int] = {}
    if plan.sharding is Sharding.HSDP:
        sizes["replicate"], sizes["shard"] = dp // plan.shard, plan.shard
    else:
        sizes["shard"] = dp
    if plan.pp > 1:
        sizes["pipe"] = plan.pp
    if plan.tp > 1:
        sizes["tensor"] = plan.tp
    number = next(_numbers)
    return init_device_mesh(
        device.type, tuple(sizes.values()), mesh_dim_names=tuple(f"{name}-{number}" for name in sizes)
    )


def axes(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """The part of a mesh of `mesh_of` along some of its axes."""
    found = [
        next(full for full in mesh.mesh_dim_names or () if full.startswith(f"{name}-")) for name in names
    ]
    return mesh[found[0]] if len(found) == 1 else mesh[tuple(found)]


def shard(model: nn.Module, optimizer: Optimizer, plan: Plan) -> Callable[[], None]:
    """Splits a model and hands its new parameters to the optimizer, which must not have stepped yet.

    What undoes it, and gives groups back.
    """
    if optimizer.state:
        raise PlanError("the optimizer has state already; parallelize before the first step")
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    split = Split(model)
    mesh = mesh_of(plan, next(model.parameters()).device)
    renamed: dict[str, list[str]] = {}
    if plan.tp > 1:
        renamed = tensor(model, axes(mesh, "tensor"), plan)
    if plan.sharding in trained.SHARDED:
        spread(model, blocks_of(model), mesh, plan)
    new = dict(model.named_parameters())
    for group, wanted in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [new[now] for name in wanted for now in renamed.get(name, [name])]
    model.register_load_state_dict_pre_hook(_before_load)
    weak = weakref.ref(model)  # who keeps what undoes it does not keep the model

    def close() -> None:
        if (found := weak()) is not None:
            split.undo(found, optimizer)
        leave(mesh)

    return close


def _before_load(_: nn.Module, state: dict[str, Any], *rest: Any) -> None:
    refuse_parts_of_one_rank(state)


def spread(model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, plan: Plan) -> None:
    """FSDP2 over the data-parallel axes of a mesh, block by block."""
    chosen = axes(mesh, "replicate", "shard") if plan.sharding is Sharding.HSDP else axes(mesh, "shard")
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if plan.precision is Precision.BF16
        else MixedPrecisionPolicy()
    )
    listed = list(blocks)
    for part in (*listed, model):
        fully_shard(
            part,
            mesh=chosen,
            mp_policy=policy,
            reshard_after_forward=plan.reshard and plan.sharding.shards_parameters,
        )
    if plan.prefetch > 1:
        _prefetch(listed, plan.prefetch)


def _prefetch(blocks: list[Any], count: int) -> None:
    """Has each block gather so many that follow it in the forward pass, and in the backward pass."""
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + count])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - count) : i][::-1])


def tensor(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> dict[str, list[str]]:
    """Splits attention and feed-forward of each block; names that a fused projection's parameters were
    replaced by.
    """
    from paceline.catalog.models.layers import Attention, FeedForward, SwiGLU

    renamed: dict[str, list[str]] = {}
    found = False
    for name, module in list(model.named_modules()):
        if isinstance(module, Attention):
            found = True
            if module.heads % plan.tp or module.kv_heads % plan.tp:
                raise PlanError(
                    f"tp={plan.tp} does not divide {module.heads} heads ({module.kv_heads} of keys and"
                    f" values) of {name}"
                )
            if module.fused:
                renamed |= _unfuse(name, module)
            parallelize_module(
                module,
                mesh,
                {
                    "q": ColwiseParallel(),
                    "k": ColwiseParallel(),
                    "v": ColwiseParallel(),
                    "out": RowwiseParallel(),
                },
            )
        elif isinstance(module, (FeedForward, SwiGLU)):
            plan_of = {
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
                **({"gate": ColwiseParallel()} if isinstance(module, SwiGLU) else {}),
            }
            parallelize_module(module, mesh, plan_of)
    if not found:
        raise PlanError(
            f"tp={plan.tp}: {type(model).__name__} has no attention of the catalog's kind to split; use tp=1"
        )
    return renamed


def _unfuse(name: str, module: Any) -> dict[str, list[str]]:
    """One projection to queries, keys and values becomes three: its rows are theirs one after another, not
    head by head.
    """
    fused: nn.Linear = module.qkv
    parts = "qkv"
    renamed: dict[str, list[str]] = {}
    weights = fused.weight.detach().split(module.split)
    biases = fused.bias.detach().split(module.split) if fused.bias is not None else (None,) * 3
    for part, weight, bias in zip(parts, weights, biases, strict=True):
        linear = nn.Linear(
            weight.shape[1], weight.shape[0], bias=bias is not None, device=weight.device, dtype=weight.dtype
        )
        linear.weight.data.copy_(weight)
        if bias is not None:
            linear.bias.data.copy_(bias)
        setattr(module, part, linear)
    for kind in ("weight", "bias") if fused.bias is not None else ("weight",):
        renamed[f"{name}.qkv.{kind}"] = [f"{name}.{part}.{kind}" for part in parts]
    del module.qkv
    module.fused = False
    return renamed
