"""Mixed precision: passes in half precision, parameters in float32, and a loss scale that finds its own
level.

float16 needs the scale: gradients below 6e-8 would vanish. `Scaler` works as `torch.amp.GradScaler` does, and
also with strategies whose gradients never come back to the parameters (`overlap`): there, all ranks agree on
whether any part of any gradient overflowed.

Micikevicius et al., Mixed Precision Training, ICLR 2018.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import PlanError, RunError, SpecError
from paceline.spec.vocabulary import Precision
from paceline.train.comm import Collective, Job
from paceline.train.strategies.deferral import Deferred

DTYPES = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(model: nn.Module, precision: str) -> nn.Module:
    """Runs the forward pass in that precision where torch knows it to be safe; the model, changed."""
    if precision not in DTYPES:
        raise PlanError(f"precision {precision!r} is not run here; allowed: {', '.join(DTYPES)}")
    dtype = DTYPES[precision]
    if dtype is None:
        return model
    inner = model.forward
    kind = next(model.parameters()).device.type

    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, dtype=dtype):
            return inner(*args, **kwargs)

    model.forward = MethodType(forward, model)
    return model


def multiply_in(precision: str) -> None:
    """Has float32 products of this process run in TF32, for the precision of that name; others leave them as
    they are.
    """
    if precision == Precision.TF32:
        torch.set_float32_matmul_precision("high")


class Scaler:
    """Dynamic loss scaling: halved when a gradient overflows, doubled after `growth` good steps.

    A step with an overflow is skipped, on all ranks.

    Loops written for `torch.amp.GradScaler` run as they are: `scale`, `unscale_`, `step`, `update`. Without
    `update`, the scale changes with the next `scale`.
    """

    def __init__(self, scale: float = 65536.0, *, growth: int = 2000) -> None:
        if scale <= 0 or growth < 1:
            raise SpecError(f"the scale must be positive and growth 1 or more; got {scale:g} and {growth}")
        self.value, self.growth = scale, growth
        self.skipped = 0
        self._good = 0
        #: of optimizers that were unscaled since the last update, by id, whether their gradients are finite
        self._unscaled: dict[int, bool] = {}
        #: the same of those that were stepped
        self._stepped: list[bool] = []

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on."""
        if self._stepped:
            self.update()
        return loss * self.value

    def get_scale(self) -> float:
        """What losses are multiplied by; for strategies that keep state in true units."""
        return self.value

    def unscale_(self, optimizer: Optimizer) -> None:
        """Gradients in true units, in `p.grad`: to clip or read them before `step`."""
        if id(optimizer) in self._unscaled:
            raise RunError("unscale_() was called twice since the last update(); call it once a step")
        self._unscaled[id(optimizer)] = self._plain(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Unscales, unless that is done, and steps unless something overflowed; whether it did step."""
        held = getattr(optimizer, "_paceline", None)
        # `auto` steps by another one
        strategy = getattr(held.by, "inner", held.by) if held is not None else None
        deferred = strategy if isinstance(strategy, Deferred) and strategy.parts else None
        unscaled = self._unscaled.get(id(optimizer))
        if strategy is not None and (deferred is None or unscaled is None):
            strategy.scaled_by(self)
        if unscaled is not None:
            finite = unscaled
        elif deferred is not None:
            finite = self._deferred(deferred)
        else:
            finite = self._plain(optimizer)
        if finite:
            optimizer.step()
        elif strategy is not None:
            strategy.skipped()
        self._stepped.append(finite)
        return finite

    def update(self) -> None:
        """After the steps of all optimizers: the scale for the next pass."""
        if not all(self._stepped):
            self.value, self._good = self.value / 2, 0
            self.skipped += 1
        elif self._stepped:
            self._good += 1
        if self._good >= self.growth:
            self.value, self._good = self.value * 2, 0
        self._stepped.clear()
        self._unscaled.clear()

    def _plain(self, optimizer: Optimizer) -> bool:
        """Gradients are the same on all ranks: so is the answer."""
        gradients = [
            p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        for gradient in gradients:
            gradient.div_(self.value)
        return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)

    def _deferred(self, strategy: Deferred) -> bool:
        parts = [part for part in strategy.parts if part.reduced is not None]
        bad = torch.zeros(1)

        def job() -> Job:
            squares = torch.stack([part.square() for part in parts]).sum()
            bad[0] = 0.0 if bool(torch.isfinite(squares)) else 1.0
            if strategy.world > 1:
                yield Collective("max", [bad])

        strategy.engine.submit(
            "overflow", job(), after=[part.reduced for part in parts if part.reduced is not None]
        ).wait()
        return not bool(bad[0])

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"value": self.value, "good": self._good, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up where `state_dict` stopped."""
        self.value, self._good, self.skipped = state["value"], state["good"], state["skipped"]
