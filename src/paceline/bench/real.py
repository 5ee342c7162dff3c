"""A model that was described for capture, allocated for real: what is timed beside its prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils import _pytree as pytree

from paceline.capture import optimizer as rules
from paceline.capture.build import default_loss
from paceline.capture.resolve import resolve

#: spread of the values that stand for weights and inputs: small enough that nothing overflows
SPREAD = 0.02
_CLASSES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd-plain": (SGD, {}),
    "sgd": (SGD, {"momentum": 0.9}),
    "adam": (Adam, {}),
    "adamw": (AdamW, {}),
}


def build(
    model: str, batch: int, options: Mapping[str, Any]
) -> tuple[nn.Module, Callable[[nn.Module], Tensor], Optimizer]:
    """The module of a model's name with weights, a function that runs it forward to its loss, and its
    optimizer; `options` as for capture.
    """
    job, usual = resolve(model, batch=batch, seq=options.get("seq"), image=options.get("image"))
    module = allocate(job.module).train()
    args, kwargs = pytree.tree_map_only(Tensor, filled, (job.args, dict(job.kwargs)))
    loss = job.loss or default_loss

    def forward(wrapped: nn.Module) -> Tensor:
        return loss(wrapped(*args, **kwargs))

    return module, forward, optimizer(options.get("optimizer") or usual.optimizer, module)


def allocate(module: nn.Module) -> nn.Module:
    """Gives parameters and buffers that have no memory yet some, with values; shared ones stay shared."""
    made: dict[int, Tensor] = {}
    for sub in module.modules():
        for table in (sub._parameters, sub._buffers):
            for name, old in table.items():
                if old is None or not old.is_meta:
                    continue
                if id(old) not in made:
                    new = filled(old)
                    made[id(old)] = (
                        nn.Parameter(new, requires_grad=old.requires_grad)
                        if isinstance(old, nn.Parameter)
                        else new
                    )
                table[name] = made[id(old)]  # type: ignore[assignment]
    return module


def filled(tensor: Tensor) -> Tensor:
    """The tensor; one without memory becomes random numbers, or zeros where it holds integers."""
    if not tensor.is_meta:
        return tensor
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, dtype=tensor.dtype) * SPREAD
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def optimizer(name: str, module: nn.Module) -> Optimizer:
    """The optimizer that capture calls so, in the implementation that it assumes."""
    _, how = rules.check(name)
    cls, more = _CLASSES[name.removesuffix(f"-{how}")]
    trained = [p for p in module.parameters() if p.requires_grad]
    return cls(trained, lr=1e-4, fused=how == "fused", foreach=how == "foreach", **more)  # type: ignore[call-arg]
