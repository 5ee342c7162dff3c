"""Prunes weights by magnitude, in units of several sizes, and keeps them pruned while training goes on.

    masks = prune(model, Granularity.of("2:4"))
    keep_pruned(optimizer, model, masks)     # each step ends with zeros where the masks are

A layer's weights are a matrix: a row per output, behind each other the inputs (of a convolution channel by
channel, each with the points of its kernel). Within each layer the units with the largest mean magnitude are
kept (Han et al., Learning both Weights and Connections, NeurIPS 2015); 2:4 keeps the two largest of every
four along a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.cost.index_overhead import unit_shape
from paceline.errors import SpecError
from paceline.spec.sparsity import Granularity

#: layers that are pruned
PRUNABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def prune(model: nn.Module, granularity: Granularity, density: float = 0.5) -> dict[str, Tensor]:
    """Sets the weights of the smallest units of each layer but the last to zero; the masks (True: kept) by
    parameter. Kernels are pruned in convolutions alone.
    """
    if not 0 < density <= 1:
        raise SpecError(f"the density is the share that is kept, above 0 and at most 1; got {density:g}")
    if granularity is Granularity.TWO_FOUR and density != 0.5:
        raise SpecError(f"2:4 keeps a half of the weights; got density {density:g}")
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, PRUNABLE)]
    masks = {}
    for name, module in named[:-1]:
        weight = module.weight
        assert isinstance(weight, Tensor)
        if granularity is Granularity.KERNEL and weight[0, 0].numel() == 1:
            continue
        mask = unit_mask(weight.detach(), granularity, density)
        masks[f"{name}.weight" if name else "weight"] = mask
        with torch.no_grad():
            weight.mul_(mask)
    if not masks:
        raise SpecError(f"no layer to prune by {granularity}: the last one is left as it is")
    return masks


def unit_mask(weight: Tensor, granularity: Granularity, density: float) -> Tensor:
    """Which weights of one layer are kept."""
    matrix = weight.reshape(len(weight), -1)
    if granularity is Granularity.TWO_FOUR:
        return _two_of_four(matrix).reshape(weight.shape)
    sizes = len(weight), weight[0].numel(), weight[0, 0].numel()
    height, width = unit_shape(granularity, *sizes)
    return _largest(matrix, height, width, density).reshape(weight.shape)


def _units(matrix: Tensor, height: int, width: int) -> Tensor:
    """The matrix as units, with zeros beyond its edges: rows of units, columns of units, height, width."""
    below, right = -matrix.shape[0] % height, -matrix.shape[1] % width
    padded = nn.functional.pad(matrix, (0, right, 0, below))
    return padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width).transpose(1, 2)


def _largest(matrix: Tensor, height: int, width: int, density: float) -> Tensor:
    sizes = _units(torch.ones_like(matrix), height, width).sum((2, 3))
    means = _units(matrix.abs(), height, width).sum((2, 3)) / sizes
    kept = max(1, round(density * means.numel()))
    chosen = torch.zeros(means.numel(), dtype=torch.bool)
    chosen[means.flatten().topk(kept).indices] = True
    spread = chosen.reshape(means.shape).repeat_interleave(height, 0).repeat_interleave(width, 1)
    return spread[: matrix.shape[0], : matrix.shape[1]]


def _two_of_four(matrix: Tensor) -> Tensor:
    fours = _units(matrix.abs(), 1, 4).squeeze(2)
    places = fours.topk(2, dim=2).indices
    mask = torch.zeros_like(fours, dtype=torch.bool).scatter_(2, places, True)
    return mask.reshape(len(matrix), -1)[:, : matrix.shape[1]]


def keep_pruned(optimizer: torch.optim.Optimizer, model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Sets pruned weights to zero after each step of an optimizer."""
    parameters = dict(model.named_parameters())

    def clear(*_: Any) -> None:
        with torch.no_grad():
            for name, mask in masks.items():
                parameters[name].mul_(mask)

    optimizer.register_step_post_hook(clear)


def kept_share(masks: Mapping[str, Tensor]) -> float:
    """Share of the weights of pruned layers that is kept."""
    total = sum(mask.numel() for mask in masks.values())
    return sum(int(mask.sum()) for mask in masks.values()) / total
