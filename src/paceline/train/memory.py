"""Less memory for activations: computed again, or kept in host memory; chosen by plan, or by a policy.

full         each block of a model keeps its input only (Chen et al., Training Deep Nets with Sublinear Memory
Cost, 2016) selective    each block keeps the results of matrix products, which are dear, and computes the
rest again (Korthikanti et al., 2022) recursive    blocks in groups of about the square root of their number,
each group a checkpoint with checkpoints inside

A policy (`spec.recomputation`) says it module by module: `paceline analyze MODEL --memory --apply FILE`
writes one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from paceline.capture import recompute as spans
from paceline.errors import PlanError
from paceline.spec.recomputation import RecomputePolicy
from paceline.spec.vocabulary import Offload, Recompute

RECOMPUTE = ("none", "selective", "full", "recursive")
#: what `selective` keeps
KEPT = ("products", "convolutions", "attention")


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


def recompute(
    model: nn.Module, how: str | Path | RecomputePolicy, blocks: Sequence[nn.Module] | None = None
) -> nn.Module:
    """Makes a model compute activations again in the backward pass; the model, changed.

    `how` is a kind (`RECOMPUTE`) for its blocks, by default those that repeat; or a policy, or the file of
    one, whose modules are named by path. Call it before `parallelize`. Gradients keep their bits.
    """
    policy = _policy(how)
    if policy is not None:
        spans.apply(model, policy)
        return model
    if how not in RECOMPUTE:
        raise PlanError(f"recompute must be {', '.join(RECOMPUTE)}, or a file of a policy; got {how!r}")
    if how == Recompute.NONE:
        return model
    found = blocks_of(model) if blocks is None else list(blocks)
    keep = KEPT if how == Recompute.SELECTIVE else ()
    chosen: list[tuple[Sequence[nn.Module], Sequence[str]]] = [((block,), keep) for block in found]
    if how == "recursive":
        chosen += [(group, ()) for group in _groups(found)]
    spans.checkpoints(model, chosen)
    return model


def _policy(how: str | Path | RecomputePolicy) -> RecomputePolicy | None:
    if isinstance(how, RecomputePolicy):
        return how
    if isinstance(how, Path) or str(how).endswith(".json"):
        return RecomputePolicy.load(how)
    return None


def _groups(blocks: list[nn.Module]) -> list[list[nn.Module]]:
    """Blocks that follow one another, in groups of about the square root of their number."""
    size = max(1, math.isqrt(len(blocks)))
    groups = [blocks[start : start + size] for start in range(0, len(blocks), size)]
    return [group for group in groups if len(group) > 1]


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
