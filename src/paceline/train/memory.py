"""Less memory for activations: computed again, or kept in host memory; chosen by plan.

full         each block of a model keeps its input only (Chen et al., Training Deep Nets with Sublinear Memory
Cost, 2016) selective    each block keeps the results of matrix products, which are dear, and computes the
rest again (Korthikanti et al., 2022) recursive    blocks in groups of about the square root of their number,
each group a checkpoint with checkpoints inside
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from paceline.errors import PlanError
from paceline.spec.vocabulary import Offload, Recompute

RECOMPUTE = ("none", "selective", "full", "recursive")
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


def blocks_of(model: nn.Module, but: list[nn.Module] | None = None) -> list[nn.Module]:
    """The repeated blocks of a model: members of its longest list of modules, or else the children of its
    longest sequence; `but` where there are none.
    """
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    lists += (
        []
        if lists
        else [list(m.children()) for m in model.modules() if isinstance(m, nn.Sequential) and len(m) > 1]
    )
    if not lists and but is not None:
        return but
    if not lists:
        raise PlanError(
            f"{type(model).__name__} has no repeated blocks (no ModuleList, no Sequential); leave recompute"
            " and sharding by block out"
        )
    longest = max(lists, key=len)
    return [block for block in longest if any(True for _ in block.parameters())]


def recompute(model: nn.Module, kind: str, blocks: Sequence[nn.Module] | None = None) -> nn.Module:
    """Makes blocks (by default those that repeat) compute activations again in the backward pass; the model,
    changed.
    """
    if kind not in RECOMPUTE:
        raise PlanError(f"recompute must be {', '.join(RECOMPUTE)}; got {kind!r}")
    if kind == Recompute.NONE:
        return model
    found = blocks_of(model) if blocks is None else list(blocks)
    for block in found:
        _wrap(
            block,
            partial(create_selective_checkpoint_contexts, _policy) if kind == Recompute.SELECTIVE else None,
        )
    if kind == "recursive":
        _group(model, found)
    return model


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _wrap(module: nn.Module, contexts: Callable[[], Any] | None) -> None:
    inner = module.forward
    more: dict[str, Any] = {"context_fn": contexts} if contexts is not None else {}

    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **more, **kwargs)

    module.forward = MethodType(forward, module)


def _group(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Outer checkpoints round groups of blocks that follow one another in a list: the first of a group runs
    them all, the others pass on.
    """
    size = max(1, math.isqrt(len(blocks)))
    for start in range(0, len(blocks), size):
        members = blocks[start : start + size]
        if len(members) > 1:
            _chain(members)


def _chain(members: list[nn.Module]) -> None:
    inner = [member.forward for member in members]

    def together(x: Any, *args: Any) -> Any:
        for forward in inner:
            x = forward(x, *args)
        return x

    def first(_: nn.Module, x: Any, *args: Any) -> Any:
        return (
            checkpoint(together, x, *args, use_reentrant=False)
            if torch.is_grad_enabled()
            else together(x, *args)
        )

    members[0].forward = MethodType(first, members[0])
    for member in members[1:]:
        member.forward = MethodType(lambda _, x, *args: x, member)


def compiled(model: nn.Module, framework: str) -> nn.Module:
    """Has torch.compile fuse each repeated block, or the whole of a model without any, where the framework
    says so; the model, changed.
    """
    if framework == "torch-compile":
        for part in blocks_of(model, but=[model]):
            part.compile()
    return model


def offload(model: nn.Module, kind: str) -> nn.Module:
    """Keeps activations of the model in host memory between the passes ("activations"); the model,
    changed.
    """
    if kind == Offload.NONE:
        return model
    if kind != Offload.ACTIVATIONS:
        raise PlanError(
            f"offload={kind} is not run here; with fsdp, optimizer state stays where parameters are; allowed:"
            " none, activations"
        )
    inner = model.forward

    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return inner(*args, **kwargs)

    model.forward = MethodType(forward, model)
    return model
