"""torch's DistributedDataParallel, with its buckets and buffers, round a model that stays the user's own.

The model's `forward` goes through DDP from now on: the object which the user holds is the one to call, with
the keys in its `state_dict` that it had. Passes without gradients stay on their rank, as under the other
strategies: one rank may evaluate alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from paceline.errors import RunError, SpecError
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
        asked = {"broadcast_buffers": broadcast_buffers}
        self._options: dict[str, Any] = {
            **{name: value for name, value in asked.items() if value is not None},
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
        }
        #: whether there was a forward pass through DDP since the last step
        self._passed = False

    def _begin(self) -> None:
        if "forward" in self.model.__dict__:
            self._undo.callback(setattr, self.model, "forward", self.model.forward)
        else:
            self._undo.callback(self.model.__dict__.pop, "forward", None)
        inner = Inner(self.model)
        # parameters are the same already
        self._ddp: Any = nn.parallel.DistributedDataParallel(inner, init_sync=False, **self._options)
        self._undo.callback(delattr, self, "_ddp")  # with its hooks
        self.model.forward = MethodType(self._forward, self.model)

    def _forward(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """In place of the model's own."""
        if model is not self.model:  # a copy of it
            return type(model).forward(model, *args, **kwargs)
        captured = next(model.parameters()).is_meta
        if captured or not torch.is_grad_enabled():
            return self._ddp.module.forward(*args, **kwargs)
        self._passed = True
        return self._ddp(*args, **kwargs)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._passed and not (args or kwargs) and any(p.grad is not None for _, p in self.parameters):
            raise RunError(
                "there are gradients, but no forward pass went through the model itself, which torch's DDP "
                "needs to average them; call model(...) in place of its parts or methods, or use allreduce"
            )
        result = self._plain_step(*args, **kwargs)
        self._passed = False
        return result

    def synchronize(self) -> None:
        """Nothing is ever on its way after a backward pass."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._ddp.no_sync():
            yield


def refuse_twice(strategy: Strategy) -> None:
    """Raises where a model that DDP wraps already would be wrapped once more."""
    if isinstance(strategy, DDP):
        raise SpecError(
            "the model is wrapped in DistributedDataParallel already, which is what 'ddp' does; "
            "name another strategy, or none"
        )
