"""The first step of a user's loop, compared with the batch that its plan says.

The loop feeds the batch, not the plan. A plan that says `mbs`, `gbs` or `seq` was predicted for these sizes,
so a loop that feeds others is told in its first step.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import PlanError
from paceline.spec.plan import Plan
from paceline.spec.vocabulary import Precision


class FirstStep:
    """Watches a model and its optimizer until the first step; sizes that `said` leaves out are not compared.

    `filled` is the same plan with its degrees. With fp16, a loss scaler may leave steps out: passes may be
    those of several steps then.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, said: Plan, filled: Plan) -> None:
        self.said, self.filled = said, filled
        self.passes = 0
        self.done = not (said.mbs or said.gbs or said.seq)
        if self.done:
            return
        self._hook = model.register_forward_pre_hook(self._before_pass, with_kwargs=True)
        step = optimizer.step

        def checked(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._before_step()
            return step(*args, **kwargs)

        # a function bound to the optimizer: schedulers of torch wrap it as one
        setattr(optimizer, "step", MethodType(checked, optimizer))  # noqa: B010

    def close(self) -> None:
        """Watches no longer."""
        if not self.done:
            self.done = True
            self._hook.remove()

    def _before_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.done or not torch.is_grad_enabled():
            return
        self.passes += 1
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.dim()]
        if not tensors:
            return
        inputs = tensors[0]
        _compare("mbs", self.said.mbs, "samples of a pass", len(inputs))
        if inputs.dim() > 1 and not inputs.is_floating_point():
            _compare("seq", self.said.seq, "tokens of a sample", inputs.shape[1])

    def _before_step(self) -> None:
        if not self.done:
            self.close()
            self._check_passes()

    def _check_passes(self) -> None:
        """Whether the passes of a step make up its batch."""
        if not (self.said.gbs and self.said.mbs):
            return
        wanted = self.filled.micro_batches
        skips = self.said.precision is Precision.FP16
        if self.passes != wanted and not (skips and self.passes and self.passes % wanted == 0):
            batch = f"gbs={self.said.gbs}: with mbs={self.filled.mbs} on dp={self.filled.dp}"
            raise PlanError(
                f"the plan says {batch}, a step has {wanted} passes on each rank, but the first one had"
                f" {self.passes}; feed as many, or change the plan"
            )


def _compare(name: str, wanted: int, what: str, got: int) -> None:
    if wanted and got != wanted:
        raise PlanError(
            f"the plan says {name}={wanted}, {what}, but the model was given {got}; feed {wanted}, or change"
            " the plan"
        )
