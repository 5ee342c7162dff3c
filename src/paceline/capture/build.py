"""Build modules without allocating them, and put tensors on meta in the precision asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

#: tensors of at most this many elements are made for real while a module is built
SMALL = 4096
_MAKERS = frozenset(("empty", "zeros", "ones", "full", "rand", "randn", "empty_strided"))


class BuildMode(TorchFunctionMode):
    """Large tensors appear on meta; small ones and computed ones stay real, so that `__init__` may read
    values.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _MAKERS and "out" not in kwargs:
            device = kwargs.get("device")
            if (device is None or torch.device(device).type in ("cpu", "cuda")) and _elements(
                args, kwargs
            ) > SMALL:
                kwargs = {**kwargs, "device": "meta"}
                kwargs.pop("generator", None)
        if _mixed(args, kwargs):
            if getattr(func, "__name__", "") in ("copy_", "__setitem__"):
                return args[0]  # values that are not there are not needed either
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
        return func(*args, **kwargs)


def _mixed(args: Any, kwargs: Any) -> bool:
    """Whether real and meta tensors meet; values of no dimension may."""
    devices = {
        t.device.type for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim()
    }
    return len(devices) > 1


def _elements(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    shape = kwargs.get("size", args[0] if args else 0)
    sizes = shape if isinstance(shape, (list, tuple, torch.Size)) else [a for a in args if isinstance(a, int)]
    return math.prod(int(s) for s in sizes) if sizes else 0


def as_meta(old: torch.Tensor, dtype: torch.dtype | None, channels_last: bool) -> torch.Tensor:
    """An empty tensor of the same shape on meta, in the precision and layout asked for."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d} if channels_last else {}
    layout = formats.get(old.dim(), torch.contiguous_format)
    target = dtype if dtype is not None and old.dtype in (torch.float32, torch.float64) else old.dtype
    return torch.empty(old.shape, dtype=target, device="meta", memory_format=layout)


def inputs_to_meta(value: Any, dtype: torch.dtype | None, channels_last: bool) -> Any:
    """Inputs on meta; integers are copied to the CPU where they have values, else filled with zeros."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            fresh = as_meta(value, dtype, channels_last)
            return fresh.requires_grad_(value.requires_grad)
        if value.is_meta:
            return torch.zeros(value.shape, dtype=value.dtype)
        return value.detach().to("cpu", copy=True)
    if isinstance(value, (list, tuple)):
        return type(value)(inputs_to_meta(item, dtype, channels_last) for item in value)
    if isinstance(value, dict):
        return {k: inputs_to_meta(v, dtype, channels_last) for k, v in value.items()}
    return value


def default_loss(output: Any) -> torch.Tensor:
    """The loss when the user gives none: the output's own `.loss`, cross-entropy of class scores, else the
    mean.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    scores = getattr(output, "logits", output)
    if isinstance(scores, (list, tuple)):
        scores = scores[0]
    if isinstance(scores, dict):
        scores = next(iter(scores.values()))
    if scores.dim() == 2 and scores.shape[1] > 1 and scores.is_floating_point():
        return nn.functional.cross_entropy(scores, torch.zeros(scores.shape[0], dtype=torch.int64))
    mean: torch.Tensor = (
        scores.float().mean() if scores.dtype in (torch.float16, torch.bfloat16) else scores.mean()
    )
    return mean


LossFunction = Callable[[Any], torch.Tensor]
