"""Fully connected layers exchange input activations and output errors in place of weight gradients.

The gradient of a weight (n_out x n_in) is E' X with the errors E (b x n_out) and inputs X (b x n_in) of a
batch, so that ranks can send these factors and multiply afterwards. Bytes that one of P ranks sends, b
samples on each, 4 bytes an element:

    gradient    2 (P-1)/P n_in n_out
                reduce-scatter and all-gather
    rows        (P-1) b n_in + (P-1)/P b n_out + (P-1)/P n_in n_out
                gather X, each rank gets the columns of E for the rows of the weight that it updates,
                all-gather of the updated weight
    factors     (P-1) b (n_in + n_out)
                gather both; every rank multiplies and updates everything

`rows` is how Lee et al. (MLHPC 2018) treat fully connected layers (they share out columns; the sum of both
exchanges is the same to a factor of at most P). `factors` is the sufficient factor broadcasting of Xie et al.
(UAI 2016); it multiplies P times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from paceline.errors import RunError
from paceline.train.comm import Collective, Job
from paceline.train.strategies.parts import Part, Settings, State
from paceline.train.strategies.updates import clone, update

MODES = ("gradient", "rows", "factors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A fully connected layer in a step of one rank."""

    n_in: int
    n_out: int
    rows: int

    def sent_bytes(self, mode: str, world: int) -> float:
        """What one rank sends, float32."""
        others, share = world - 1, (world - 1) / world
        weight, inputs, errors = self.n_in * self.n_out, self.rows * self.n_in, self.rows * self.n_out
        elements = {
            "gradient": 2 * share * weight,
            "rows": others * inputs + share * (errors + weight),
            "factors": others * (inputs + errors),
        }
        return 4.0 * elements[mode]

    def extra_flops(self, mode: str, world: int) -> float:
        """Multiplications and additions beyond the local weight gradient, whose product all modes need
        once.
        """
        product = 2.0 * self.rows * self.n_in * self.n_out
        return product * (world - 1) if mode == "factors" else 0.0

    def choose(self, world: int, link_Bps: float, flops: float) -> str:
        """The mode of least time on the wire and in products, for a link of `link_Bps` and a device of
        `flops` per second.
        """
        allowed = [mode for mode in MODES if mode != "rows" or self.n_out % world == 0]
        return min(
            allowed,
            key=lambda mode: self.sent_bytes(mode, world) / link_Bps + self.extra_flops(mode, world) / flops,
        )


class FactorPart(Part):
    """A fully connected layer whose weight gradient never travels."""

    def __init__(
        self,
        name: str,
        layer: nn.Linear,
        mode: str,
        rows: int,
        optimizer: Optimizer,
        groups: Mapping[int, int],
        rank: int,
        world: int,
        ready: Callable[[FactorPart], None],
        paused: Callable[[], bool],
    ) -> None:
        held = [p for p in (layer.weight, layer.bias) if isinstance(p, nn.Parameter)]
        super().__init__(name, held, rank, world)
        self.waiting = 1
        self.layer, self.mode, self.rows = layer, mode, rows
        #: rows of the last pass here
        self.seen = 0
        self._ready, self._paused = ready, paused
        self._inputs: list[Tensor] = []
        self._errors: list[Tensor] = []
        for parameter in held:
            parameter.data = parameter.data.contiguous()
        share = layer.out_features // world
        self._own = slice(rank * share, (rank + 1) * share) if mode == "rows" else slice(None)
        self.groups = [groups[id(p)] for p in held]
        #: memory of the parameters themselves, on which others wait while this part updates them
        self._memory = [p.data for p in held]
        self.values = [memory[self._own] for memory in self._memory]
        self.gradients: list[Tensor] = [torch.empty_like(values) for values in self.values]
        #: of all ranks, where somebody reads them
        self._whole: list[Tensor] = []
        self.twins = [
            clone(optimizer, group, values) for group, values in zip(self.groups, self.values, strict=True)
        ]
        layer.forward = MethodType(self._forward, layer)  # type: ignore[method-assign]

    # -- in the model ----------------------------------------------------------------------------------

    @property
    def results(self) -> list[Tensor]:
        return self.gradients

    def _forward(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """The layer; where gradients are wanted, without one of its own for the weight. In a copy of the
        model, or while a step is captured, a plain layer.
        """
        if not torch.is_grad_enabled() or layer is not self.layer or layer.weight.is_meta:
            return F.linear(x, layer.weight, layer.bias)
        if not x.requires_grad:
            x = x.detach().requires_grad_()  # the first layer: so that its errors are seen
        self.seen = x.numel() // layer.in_features
        out: Tensor = _Linear.apply(
            x, layer.weight.detach(), None if layer.bias is None else layer.bias.detach(), self
        )  # type: ignore[no-untyped-call]
        return out

    def keep(self, x: Tensor, errors: Tensor) -> None:
        """Called by the backward pass with both factors."""
        self._inputs.append(x.reshape(-1, x.shape[-1]))
        self._errors.append(errors.reshape(-1, errors.shape[-1]))
        if not self._paused():
            if self.waiting < 1:
                raise RunError(
                    f"{self.name} ran more than once in a pass, but only once in the first; use fc='gradient'"
                )
            self._ready(self)

    def release(self) -> None:
        self.layer.__dict__.pop("forward", None)

    # -- jobs ------------------------------------------------------------------------------------------

    def _padded(self, parts: list[Tensor], width: int) -> Tensor:
        """All rows so far, zeros behind: rows of zeros add nothing to the product, and messages keep their
        size.

        In the weight's precision, whatever autocast made of them: a rank that did not use the layer cannot
        know that.
        """
        like = self._memory[0]
        parts = [part.to(like.dtype) for part in parts]
        count = sum(len(part) for part in parts)
        if count > self.rows:
            raise RunError(
                f"{self.name}: {count} rows in a step, the first had {self.rows}; begin with the largest"
                " batch, or use fc='gradient'"
            )
        if count == self.rows and len(parts) == 1:
            return parts[0].contiguous()
        return torch.cat([*parts, like.new_zeros((self.rows - count, width))])

    def reduce(self) -> Job:
        inputs, errors = (
            self._padded(self._inputs, self.layer.in_features),
            self._padded(self._errors, self.layer.out_features),
        )
        self._inputs, self._errors = [], []
        if self.mode == "rows":
            columns = errors.view(self.rows, self.world, -1).transpose(0, 1).contiguous()
            (mine,), ranks = yield [Collective("exchange", [columns]), Collective("gather", [inputs])]
            errors, inputs = mine.view(self.world * self.rows, -1), torch.cat([rank[0] for rank in ranks])
        elif self.world > 1:
            ranks = yield Collective("gather", [inputs, errors])
            inputs, errors = (torch.cat([rank[i] for rank in ranks]) for i in range(2))
        errors = errors.to(self.gradients[0].dtype) / self.world
        torch.mm(errors.t(), inputs.to(errors.dtype), out=self.gradients[0])
        if len(self.gradients) > 1:
            torch.sum(errors, dim=0, out=self.gradients[1])

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """The gradient of a parameter, once it is here."""
        (at,) = (i for i, own in enumerate(self.parameters) if own is parameter)
        return (self._whole if self.mode == "rows" else self.gradients)[at]

    def reading(self) -> Collective | None:
        if self.mode != "rows":
            return None
        self._whole = self._whole or [torch.empty_like(memory) for memory in self._memory]
        return Collective("gather", self.gradients, self._whole, last=True)

    def take_back(self) -> None:
        for gradient, whole in zip(self.gradients, self._whole, strict=False):
            gradient.copy_(whole[self._own])

    def update(self, now: Settings, scale: float | None) -> Job:
        for twin, group, gradient in zip(self.twins, self.groups, self.gradients, strict=True):
            update(twin, now[group], gradient if scale is None else gradient.mul_(scale))
        if self.mode == "rows":
            yield Collective("gather", self.values, self._memory, last=True)

    def square(self) -> Tensor:
        total = torch.stack([g.float().square().sum() for g in self.gradients]).sum()
        return total if self.mode == "rows" else total / self.world

    def take(self, full: Mapping[Any, Mapping[str, Any]]) -> None:
        for twin, parameter, values in zip(self.twins, self.parameters, self.values, strict=True):
            twin.state.clear()
            for name, value in full.get(parameter, {}).items():
                whole = isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0
                twin.state[values][name] = _own(value[self._own] if whole else value)

    def _split(self) -> list[tuple[int, str, Tensor]]:
        """Entries of state that are as large as what is updated here, by the place of the parameter."""
        if self.mode != "rows":
            return []
        return [
            (i, name, value)
            for i, (twin, values) in enumerate(zip(self.twins, self.values, strict=True))
            for name, value in next(iter(twin.state.values()), {}).items()
            if isinstance(value, Tensor) and value.shape == values.shape
        ]

    def shared(self) -> list[Tensor]:
        return [value for _, _, value in self._split()]

    def spread(self, rows: Sequence[Sequence[Tensor]], full: State) -> None:
        for twin, parameter in zip(self.twins, self.parameters, strict=True):
            entries: dict[str, Any] = next(iter(twin.state.values()), {})
            full[parameter] = {name: _own(value) for name, value in entries.items()}
        for at, (i, name, _) in enumerate(self._split()):
            full[self.parameters[i]][name] = torch.cat([row[at] for row in rows])


def _own(value: Any) -> Any:
    """A copy: updates change state in place."""
    return value.clone() if isinstance(value, Tensor) else value


class _Linear(torch.autograd.Function):
    """x W' + b, whose backward pass gives the gradient of x only and keeps the factors of the rest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, part: FactorPart) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.part = part
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.part.keep(x.detach(), grads[0])
        wanted = ctx.needs_input_grad[0]  # under autocast, errors come in half precision
        return ((grads[0] @ weight.to(grads[0].dtype)).to(x.dtype) if wanted else None), None, None, None
