"""Neighbouring ranks that average gradients in every backward pass, where islands of them meet now and
then.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import PlanError
from paceline.spec.defaults import PLAIN
from paceline.train.strategies.ddp import Inner
from paceline.train.transport import give_back


class Island:
    """Sends the passes of a model through torch's DDP, over `size` neighbouring ranks; all ranks make one."""

    def __init__(self, model: nn.Module, size: int) -> None:
        world = dist.get_world_size()
        if world % size:
            raise PlanError(f"islands of {size} do not divide the {world} ranks that were started")
        self.model, self.size = model, size
        # every rank takes part in making every group
        self._groups = [dist.new_group(list(range(at, at + size))) for at in range(0, world, size)]
        self._before: Any = model.__dict__.get("forward")
        self._ddp: Any = nn.parallel.DistributedDataParallel(
            Inner(model),
            process_group=self._groups[dist.get_rank() // size],
            bucket_cap_mb=PLAIN.bucket_bytes / 2**20,
            init_sync=False,  # parameters are the same already
        )
        model.forward = MethodType(self._forward, model)

    def _forward(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """In place of the model's own."""
        if model is not self.model:  # a copy of it
            return type(model).forward(model, *args, **kwargs)
        inner = self._ddp if torch.is_grad_enabled() else self._ddp.module
        return inner(*args, **kwargs)

    def close(self) -> None:
        """The model's own passes again; all ranks do together."""
        if self._before is None:
            self.model.__dict__.pop("forward", None)
        else:
            self.model.forward = self._before
        del self._ddp  # with its hooks
        give_back(self._groups, well=True)
