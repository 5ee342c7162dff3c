"""Training with fully connected layers that exchange input activations and output errors in place of weight
gradients: what travels, and who multiplies (see `paceline.sync.factors`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from paceline.errors import RunError
from paceline.train.comm import Collective, Engine, Job
from paceline.train.hooks import Gradients, Uses
from paceline.train.layout import Flat, Piece, Slot, groups_of
from paceline.train.strategies.parts import DeferredPart
from paceline.train.strategies.portion import Portion


def fully_connected(model: nn.Module) -> dict[str, nn.Linear]:
    """Fully connected layers of a model that may exchange factors: float32, with a weight that no other
    module owns.
    """
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module.weight.requires_grad
        and owners[id(module.weight)] == 1
        and module.weight.dtype == torch.float32
    }


def rows_of(layers: Mapping[str, nn.Linear], uses: Uses, device: torch.device) -> dict[str, int]:
    """Rows of layers that ran once in the pass, and whose weights nobody else reads; all ranks ask together,
    and the one with most rows counts.
    """
    readers = Counter(key for read in uses.by_module.values() for key in read)
    fit = {
        name: calls[0]
        for name, layer in layers.items()
        if len(calls := uses.calls.get(layer, [])) == 1 and readers[id(layer.weight)] == 1
    }
    most = most_rows([fit.get(name, 0) for name in layers], device)
    return {name: rows for name, rows in zip(layers, most, strict=True) if name in fit}


def most_rows(mine: list[int], device: torch.device) -> list[int]:
    """Rows of each layer on the rank that has most of them; batches need not be shared out evenly."""
    rows = torch.tensor(mine, device=device)
    dist.all_reduce(rows, op=dist.ReduceOp.MAX)
    return rows.tolist()


class FactorPart(DeferredPart):
    """A fully connected layer whose weight gradient never travels."""

    def __init__(
        self,
        name: str,
        layer: nn.Linear,
        how: tuple[str, int],
        optimizer: Optimizer,
        engine: Engine,
        gradients: Gradients,
        ready: Callable[[DeferredPart], None],
    ) -> None:
        self.layer, (self.mode, self.rows) = layer, how
        shared, groups = self.mode == "rows", groups_of(optimizer)
        portions = [
            Portion(_alone(name, p, groups[id(p)], shared=shared), optimizer, engine, shared=shared)
            for p in (layer.weight, layer.bias)
            if isinstance(p, nn.Parameter)
        ]
        super().__init__(name, portions, engine, shared=shared)
        #: rows of the last pass here
        self.seen = 0
        self._hooks, self._ready = gradients, ready
        #: inputs and errors of each pass since the last that was brought together
        self._kept: list[tuple[Tensor, Tensor]] = []
        layer.forward = MethodType(self._forward, layer)  # type: ignore[method-assign]

    # -- in the model ----------------------------------------------------------------------------------

    def _forward(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """The layer; where gradients are wanted, without one of its own for the weight. In a copy of the
        model, or while a step is captured, a plain layer.
        """
        if not torch.is_grad_enabled() or layer is not self.layer or layer.weight.is_meta:
            return F.linear(x, layer.weight, layer.bias)
        if not x.requires_grad:
            x = x.detach().requires_grad_()  # the first layer: so that its errors are seen
        self.seen = x.numel() // layer.in_features
        bias = None if layer.bias is None else layer.bias.detach()
        out: Tensor = _Linear.apply(x, layer.weight.detach(), bias, self)  # type: ignore[no-untyped-call]
        return out

    def keep(self, x: Tensor, errors: Tensor) -> None:
        """Called by the backward pass with both factors."""
        self._kept.append((x.reshape(-1, x.shape[-1]), errors.reshape(-1, errors.shape[-1])))
        if self._hooks.enabled:
            if not self.waiting:
                raise RunError(
                    f"{self.name} ran more than once in a pass, but only once in the first; use fc='gradient'"
                )
            self._hooks.begin()
            self._ready(self)

    # -- jobs ------------------------------------------------------------------------------------------

    def _padded(self, kept: Iterable[Tensor], width: int) -> Tensor:
        """All rows so far, zeros behind: rows of zeros add nothing to the product, and messages keep their
        size.

        In the weight's precision, whatever autocast made of them: a rank that did not use the layer cannot
        know that.
        """
        like = self.portions[0].values
        rows = [tensor.to(like.dtype) for tensor in kept]
        count = sum(map(len, rows))
        if count > self.rows:
            raise RunError(
                f"{self.name}: {count} rows in a step, the first had {self.rows}; begin with the largest"
                " batch, or use fc='gradient'"
            )
        return torch.cat([*rows, like.new_zeros((self.rows - count, width))])

    def reduce(self) -> Job:
        inputs = self._padded((x for x, _ in self._kept), self.layer.in_features)
        errors = self._padded((error for _, error in self._kept), self.layer.out_features)
        self._kept = []
        if self.shared:
            columns = errors.view(self.rows, self.world, -1).transpose(0, 1).contiguous()
            (mine,), ranks = yield [Collective("exchange", [columns]), Collective("gather", [inputs])]
            errors, inputs = mine.view(self.world * self.rows, -1), torch.cat([rank[0] for rank in ranks])
        elif self.world > 1:
            ranks = yield Collective("gather", [inputs, errors])
            inputs, errors = map(torch.cat, zip(*ranks, strict=True))
        self._multiply(inputs, errors / self.world)

    def _multiply(self, inputs: Tensor, errors: Tensor) -> None:
        weight, *bias = self.gradients
        torch.mm(errors.t(), inputs, out=weight.view(-1, self.layer.in_features))
        for gradient in bias:
            torch.sum(errors, dim=0, out=gradient)


def _alone(name: str, parameter: nn.Parameter, group: int, *, shared: bool) -> Piece:
    """A parameter where it lies, as a piece; memory for its whole gradient only where all ranks have that."""
    parameter.data = parameter.data.contiguous()
    memory = parameter.data.view(-1)
    gradient = memory.new_empty(0) if shared else torch.empty_like(memory)
    flat = Flat(group, [Slot(name, parameter, 0)], memory, gradient)
    return Piece(flat, 0, memory.numel(), flat.slots)


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
