"""`parallelize`: two added lines in a training loop."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.errors import RunError, SpecError
from paceline.train import strategies
from paceline.train.comm import TIMEOUT_S, Engine
from paceline.train.strategies.base import Strategy

_attached: WeakKeyDictionary[nn.Module, Strategy] = WeakKeyDictionary()


def parallelize(
    model: nn.Module, optimizer: Optimizer, plan: str | Strategy = "auto", *, timeout_s: float = TIMEOUT_S, **options: Any,
) -> tuple[nn.Module, Optimizer]:
    """The model and optimizer to use in the loop, kept the same on all ranks of the default process group in the way that `plan` names.

    `plan` is a name of `paceline.train.strategies` (options as keywords), or a strategy object.
    """
    if not dist.is_initialized():
        raise RunError("torch.distributed has no process group yet; call torch.distributed.init_process_group before parallelize")
    if not any(p.requires_grad for p in model.parameters()):
        raise SpecError("the model has no parameter that needs a gradient; there is nothing to keep the same")
    if isinstance(plan, str):
        from paceline.train import asynchronous

        name = plan.partition(":")[0]
        if name == "ddp":
            return nn.parallel.DistributedDataParallel(model, **options), optimizer
        if name in asynchronous.NAMES:
            return asynchronous.strategies()[name](model, optimizer, **options)
    strategy = strategies.make(plan, **options) if isinstance(plan, str) else plan
    device = next(model.parameters()).device
    strategy.attach(model, optimizer, Engine(timeout_s=timeout_s, device=device if device.type == "cuda" else torch.device("cpu")))
    _attached[model] = strategy
    return model, optimizer


def of(model: nn.Module) -> Strategy:
    """The strategy that a model was given."""
    if model not in _attached:
        raise SpecError("this model was not parallelized by paceline.train; pass what parallelize returned")
    return _attached[model]


def close(model: nn.Module) -> None:
    """Lets go of a model and ends its communication threads; parameters are as the last step left them."""
    if model in _attached:
        strategy = _attached.pop(model)
        strategy.synchronize()
        strategy.detach()
        strategy.engine.close()
