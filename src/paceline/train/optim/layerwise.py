"""LARS and LAMB: each layer's step is scaled by the ratio of the norm of its weights to that of its update.

    LARS    v = m v + lr r (g + d w),  w -= v,  r = eta |w| / (|g| + d |w|)
            (You et al., Large Batch Training, 2017)
    LAMB    u = Adam's direction + d w,  w -= lr r u,  r = |w| / |u|
            (You et al., ICLR 2020)

Both take apart what they do so that strategies can run them on a share of a layer: `measure` changes the
state and gives the two tensors whose norms count, over the whole layer; `finish` takes the norms and updates.
Vectors (biases, norms) get r = 1, as the papers' codes do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import SpecError

Group = dict[str, Any]


class Layerwise(Optimizer, ABC):
    """An optimizer whose step depends on norms over a layer."""

    @abstractmethod
    def measure(
        self, weight: Tensor, gradient: Tensor, group: Group, state: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """The two tensors whose norms decide, of (a share of) a layer."""

    @abstractmethod
    def ratio(self, first: Tensor, second: Tensor, group: Group) -> Tensor:
        """The layer's factor, from both norms; elementwise where several layers are given."""

    @abstractmethod
    def finish(
        self, weight: Tensor, gradient: Tensor, group: Group, state: dict[str, Any], ratio: Tensor | float
    ) -> None:
        """Updates with the factor, a number or one per element."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step on whole parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                first, second = self.measure(parameter, parameter.grad, group, state)
                ratio = self.ratio(first.norm(), second.norm(), group) if parameter.dim() > 1 else 1.0
                self.finish(parameter, parameter.grad, group, state, ratio)
        return loss


class LARS(Layerwise):
    """Layer-wise adaptive rate scaling, with momentum."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        eta: float = 1e-3,
        nesterov: bool = False,
    ) -> None:
        if lr < 0 or not 0 <= momentum < 1 or weight_decay < 0 or eta <= 0:
            raise SpecError(
                f"LARS needs lr >= 0, 0 <= momentum < 1, weight_decay >= 0, eta > 0; got {lr:g},"
                f" {momentum:g}, {weight_decay:g}, {eta:g}"
            )
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta, "nesterov": nesterov},
        )

    def measure(
        self, weight: Tensor, gradient: Tensor, group: Group, state: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        return weight, gradient

    def ratio(self, first: Tensor, second: Tensor, group: Group) -> Tensor:
        found = group["eta"] * first / (second + group["weight_decay"] * first)
        return torch.where((first > 0) & (second > 0), found, torch.ones_like(found))

    def finish(
        self, weight: Tensor, gradient: Tensor, group: Group, state: dict[str, Any], ratio: Tensor | float
    ) -> None:
        change = gradient.add(weight, alpha=group["weight_decay"]).mul_(ratio).mul_(group["lr"])
        if group["momentum"]:
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            held = state["momentum_buffer"].mul_(group["momentum"]).add_(change)
            change = change.add_(held, alpha=group["momentum"]) if group["nesterov"] else held
        weight.sub_(change)


class LAMB(Layerwise):
    """Layer-wise adaptive moments."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        if lr < 0 or not all(0 <= b < 1 for b in betas) or eps <= 0 or weight_decay < 0:
            raise SpecError(
                f"LAMB needs lr >= 0, 0 <= betas < 1, eps > 0, weight_decay >= 0; got {lr:g}, {betas},"
                f" {eps:g}, {weight_decay:g}"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def measure(
        self, weight: Tensor, gradient: Tensor, group: Group, state: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        first, second = group["betas"]
        if "step" not in state:
            state.update(step=0, exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
        state["step"] += 1
        mean = state["exp_avg"].lerp_(gradient, 1 - first)
        square = state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        mean_hat, square_hat = mean / (1 - first ** state["step"]), square / (1 - second ** state["step"])
        state["direction"] = mean_hat.div_(square_hat.sqrt_().add_(group["eps"])).add_(
            weight, alpha=group["weight_decay"]
        )
        return weight, state["direction"]

    def ratio(self, first: Tensor, second: Tensor, group: Group) -> Tensor:
        return torch.where((first > 0) & (second > 0), first / second, torch.ones_like(first))

    def finish(
        self, weight: Tensor, gradient: Tensor, group: Group, state: dict[str, Any], ratio: Tensor | float
    ) -> None:
        weight.sub_(state.pop("direction").mul_(ratio), alpha=group["lr"])
