"""The gradient noise scale of a task's run, from the gradients of its ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import SpecError
from paceline.train.optim import NoiseScale

#: strategies under which `p.grad` is the mean over ranks, and exact, when `backward()` returns
_PLAIN = ("ddp", "allreduce")


class Meter:
    """Looks at each gradient as it is complete, before it is averaged: make it before `parallelize`, whose
    hooks come after.
    """

    def __init__(self, model: nn.Module, strategy: str) -> None:
        allowed(strategy)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._own = 0.0
        self._scale: NoiseScale | None = None
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._see)

    def _see(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._own += float(parameter.grad.double().square().sum())

    def after(self, batch: int) -> float | None:
        """The scale in samples, after a step of `batch` over all ranks; None while the signal is lost in the
        noise. All ranks take part.
        """
        world = dist.get_world_size()
        if self._scale is None:
            self._scale = NoiseScale(batch // world, world)
        self._scale.batch = batch // world
        total = torch.tensor([self._own], dtype=torch.float64)
        dist.all_reduce(total)
        mean = sum(float(p.grad.double().square().sum()) for p in self._parameters if p.grad is not None)
        self._scale.update(float(total) / world, mean)
        self._own = 0.0
        return self._scale.value if self._scale.value < float("inf") else None


def allowed(strategy: str) -> None:
    """Raises where the scale cannot be measured."""
    if strategy not in _PLAIN:
        raise SpecError(
            f"the noise scale is measured with {' or '.join(_PLAIN)}, whose gradients are there before and"
            f" after; got {strategy!r}"
        )
