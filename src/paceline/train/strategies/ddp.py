"""torch's DistributedDataParallel, with its buckets and buffers, round a model that stays the user's own.

The model's `forward` goes through DDP from now on: the object which the user holds is the one to call, with
the keys in its `state_dict` that it had. Passes without gradients stay on their rank, as under the other
strategies: one rank may evaluate alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import nn

from paceline.errors import RunError
from paceline.spec.defaults import PLAIN
from paceline.train.strategies.base import Strategy


class Inner(nn.Module):
    """What DDP wraps: the model, called by the `forward` that it had."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._forward = model.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


class ThroughDDP:
    """Sends the passes of a model that need gradients through torch's DDP, until it is closed."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self._model, self._before = model, model.__dict__.get("forward")
        #: whether there was such a pass since somebody set this to False
        self.passed = False
        # parameters are the same already
        self.ddp: Any = nn.parallel.DistributedDataParallel(Inner(model), init_sync=False, **options)
        model.forward = MethodType(self._forward, model)

    def _forward(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """In place of the model's own."""
        if model is not self._model:  # a copy of it
            return type(model).forward(model, *args, **kwargs)
        captured = next(model.parameters()).is_meta
        if captured or not torch.is_grad_enabled():
            return self.ddp.module.forward(*args, **kwargs)  # a capture counts calls of modules
        self.passed = True
        return self.ddp(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, gradients of backward passes add up on this rank."""
        passes: AbstractContextManager[None] = self.ddp.no_sync()
        return passes

    def close(self) -> None:
        """The model's own passes again."""
        if self._before is None:
            self._model.__dict__.pop("forward", None)
        else:
            self._model.forward = self._before
        del self.ddp  # with its hooks


class DDP(Strategy):
    """The baseline. Options are those of `torch.nn.parallel.DistributedDataParallel`; buckets are those of a
    plan.
    """

    name = "ddp"
    paper = "Li et al., PyTorch Distributed, VLDB 2020"
    own_engine = False

    def __init__(
        self,
        *,
        bucket_cap_mb: float = PLAIN.bucket_bytes / 2**20,
        broadcast_buffers: bool | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
    ) -> None:
        super().__init__()
        self._options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
        }
        if broadcast_buffers is not None:
            self._options["broadcast_buffers"] = broadcast_buffers

    def _begin(self) -> None:
        self._passes = ThroughDDP(self.model, **self._options)
        self._undo.callback(self._passes.close)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        there = any(parameter.grad is not None for parameter in self.names)
        if there and not (self._passes.passed or args or kwargs):
            raise RunError(
                "there are gradients, but no forward pass went through the model itself, which torch's DDP "
                "needs to average them; call model(...) in place of its parts or methods, or use allreduce"
            )
        result = self._plain_step(*args, **kwargs)
        self._passes.passed = False
        return result

    def no_sync(self) -> AbstractContextManager[None]:
        return self._passes.no_sync()
