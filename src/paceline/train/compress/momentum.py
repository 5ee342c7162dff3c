"""Momentum correction: Deep Gradient Compression applies the optimizer's momentum before it selects. It takes
it over, with weight decay: an optimizer of torch's kind has its momentum over gradient and decay together.

Lin et al., Deep Gradient Compression, ICLR 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import SpecError
from paceline.spec.compression import DGC, Scheme

_TAKEN = ("momentum", "nesterov", "weight_decay")
Groups = Sequence[dict[str, Any]]


class TakenMomentum:
    """Momentum and weight decay of an optimizer that has none of its own any more, and the velocity of
    parameters that go as they are; the velocity of others is their compressor's. Without groups nothing was
    taken.
    """

    def __init__(self, groups: Groups, momentum: float, *, nesterov: bool) -> None:
        self.momentum, self.nesterov = momentum, nesterov
        self._before = [{key: group[key] for key in _TAKEN if key in group} for group in groups]
        self._decays: dict[nn.Parameter, float] = {}
        for group in groups:
            sign = -1.0 if group.get("maximize") else 1.0
            self._decays |= dict.fromkeys(group["params"], sign * float(group.get("weight_decay", 0.0)))
        #: in true units, by the name of the parameter
        self.velocity: dict[str, Tensor] = {}
        self.strip(groups)

    def strip(self, groups: Groups) -> None:
        """Takes momentum and weight decay away from groups of the optimizer."""
        for group, before in zip(groups, self._before, strict=bool(self._before)):
            group.update(momentum=0.0, nesterov=False)
            if "weight_decay" in before:
                group["weight_decay"] = 0.0

    def restore(self, groups: Groups) -> None:
        """Gives them back, as the user set them: other strategies may take them up."""
        for group, before in zip(groups, self._before, strict=bool(self._before)):
            group.update(before)

    def decay(self, parameter: nn.Parameter, gradient: Tensor, scale: float = 1.0) -> None:
        """Adds weight decay to a gradient that is `scale` times the true one. Before selection: what masking
        withholds of an element's momentum, it then withholds of the gradient and of the decay alike, and they
        balance where they did."""
        factor = self._decays.get(parameter, 0.0)
        if factor:
            gradient.add_(parameter.detach(), alpha=factor * scale)

    def accelerate(self, name: str, gradient: Tensor, scale: float = 1.0, *, more: bool = False) -> None:
        """Momentum for a gradient that is not compressed.

        `more`: the gradient is added to one of the same step, which was accelerated already.
        """
        if name not in self.velocity:
            self.velocity[name] = torch.zeros_like(gradient)
        held = self.velocity[name]
        if more:
            held.add_(gradient, alpha=1 / scale)
            if self.nesterov:
                gradient.mul_(1 + self.momentum)
            return
        held.mul_(self.momentum).add_(gradient, alpha=1 / scale)
        if self.nesterov:
            gradient.add_(held, alpha=self.momentum * scale)
        else:
            gradient.copy_(held).mul_(scale)


def take_momentum(chosen: dict[str, Scheme], optimizer: torch.optim.Optimizer) -> TakenMomentum:
    """Takes momentum over, in `chosen` and from the optimizer, where there is some and a scheme wants it."""
    if not any(isinstance(scheme, DGC) and scheme.momentum for scheme in chosen.values()):
        return TakenMomentum((), 0.0, nesterov=False)
    groups = optimizer.param_groups
    used = {(float(group.get("momentum", 0.0)), bool(group.get("nesterov"))) for group in groups}
    if len(used) > 1:
        raise SpecError(
            "dgc takes over the optimizer's momentum, which must be the same in all groups; got"
            f" {sorted(used)}"
        )
    momentum, nesterov = used.pop()
    for name, scheme in chosen.items():
        if isinstance(scheme, DGC):
            chosen[name] = replace(scheme, momentum=momentum, nesterov=nesterov)
    return TakenMomentum(groups if momentum else (), momentum, nesterov=nesterov)
