"""Training as it would run in a narrower number format: float32 tensors whose values are rounded to it.

    net = Emulated(net, EmulatedFormats(forward="fp8-e4m3/tensor", backward="fp8-e5m2/tensor"))

Weights and outputs of layers are rounded in the forward pass, gradients of outputs and of weights in the
backward pass; sums within an operator stay in float32, as matrix units of GPUs keep them, and so do the
parameters that the optimizer updates, and the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from paceline.errors import UnknownName
from paceline.spec.number_formats import BlockFormat, Format, NumberFormat, number_format

_MANTISSA, _EXPONENT = 23, 0x7F800000


def rounded(values: Tensor, to: Format | str) -> Tensor:
    """The nearest numbers of a format, as float32; ties go to the even one. What is too large becomes
    infinite, or the largest number where the format saturates.
    """
    form = number_format(to) if isinstance(to, str) else to
    if isinstance(form, NumberFormat):
        return _nearest(values.float(), form)
    return _blockwise(values.float(), form)


def _nearest(values: Tensor, form: NumberFormat) -> Tensor:
    dropped = _MANTISSA - form.mantissa_bits
    if not dropped:
        return values
    bits = values.view(torch.int32)
    odd = (bits >> dropped) & 1
    # a carry out of the mantissa raises the exponent, which is right; NaN is put back below
    found = ((bits + ((1 << (dropped - 1)) - 1) + odd) >> dropped << dropped).view(torch.float32)
    if form.least_exponent > -126:
        least_normal = 2.0**form.least_exponent
        # adding this number leaves no bits below the format's smallest number, and rounds to even
        drop_below = 1.5 * 2.0 ** (form.least_exponent - form.mantissa_bits + _MANTISSA)
        small = (values + drop_below) - drop_below
        found = torch.where(values.abs() < least_normal, torch.copysign(small, values), found)
    return torch.where(values.isnan(), values, _bounded(found, form))


def _bounded(values: Tensor, form: NumberFormat) -> Tensor:
    """What is too large becomes the largest number, or infinite."""
    if form.saturates:
        return values.clamp(-form.largest, form.largest)
    infinite = torch.copysign(torch.full_like(values, torch.inf), values)
    return torch.where(values.abs() > form.largest, infinite, values)


def _blockwise(values: Tensor, form: BlockFormat) -> Tensor:
    block = form.block or max(1, values.numel())
    missing = -values.numel() % block
    flat = nn.functional.pad(values.reshape(-1), (0, missing)).view(-1, block)
    top = flat.abs().amax(1, keepdim=True)
    below = (top.view(torch.int32) & _EXPONENT).view(torch.float32).clamp(2.0**-126, 2.0**126)
    # multiplying by powers of two rounds nothing, as long as the product is a normal number
    scale = below * 2.0**-form.element.largest_exponent
    found = _nearest(flat / scale, form.element) * scale
    return found.view(-1)[: values.numel()].view(values.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedFormats:
    """Names of formats of both passes; `keep` has layers, by path, that run in another one."""

    forward: str = "fp32"
    backward: str = "fp32"
    keep: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (self.forward, self.backward, *self.keep.values()):
            number_format(name)

    def of(self, layer: str) -> tuple[Format, Format]:
        """Formats of the forward and of the backward pass of a layer."""
        kept = self.keep.get(layer)
        return number_format(kept or self.forward), number_format(kept or self.backward)


class _Rounding(torch.autograd.Function):
    """Rounds values on their way forward, and gradients on their way back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, forward: Format, backward: Format) -> Tensor:
        ctx.format = backward
        return rounded(values, forward)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return rounded(gradients[0], ctx.format), None, None


class Emulated(nn.Module):
    """A module that computes as if in narrower formats; its parameters stay float32 and its own."""

    def __init__(self, module: nn.Module, formats: EmulatedFormats) -> None:
        super().__init__()
        self.module = module
        self.formats = formats
        self._hooked: list[Any] = []
        known = [name for name, _ in module.named_modules()]
        for layer in formats.keep:
            if layer not in known:
                raise UnknownName("layer", layer, known, f"the model has {len(known)} modules")
        for name, each in module.named_modules():
            if not any(True for _ in each.children()):
                self._hooked.append(each.register_forward_hook(self._output(name)))

    def _output(self, layer: str) -> Any:
        formats = self.formats.of(layer)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            return pytree.tree_map_only(Tensor, lambda values: _through(values, *formats), output)

        return after

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass on rounded inputs and weights."""
        weights = {
            name: _through(parameter, *self.formats.of(name.rpartition(".")[0]))
            for name, parameter in self.module.named_parameters()
        }
        first = (number_format(self.formats.forward), number_format(self.formats.backward))
        args, kwargs = pytree.tree_map_only(Tensor, lambda values: _through(values, *first), (args, kwargs))
        return functional_call(self.module, weights, args, kwargs)

    def close(self) -> None:
        """Gives the module its own arithmetic back."""
        for handle in self._hooked:
            handle.remove()


def _through(values: Tensor, forward: Format, backward: Format) -> Tensor:
    if not values.is_floating_point():
        return values
    return _Rounding.apply(values, forward, backward)  # type: ignore[no-any-return,no-untyped-call]
