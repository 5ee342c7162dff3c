"""Counts the zeros of a module's activations, gradients and weights in real passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import SpecError
from paceline.spec.sparsity import ActivationZeros, LayerZeros

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
#: layers whose weights are one operand of a product
LAYERS = (nn.Linear, *_CONVOLUTIONS)
#: adjacent features that count as one vector
VECTOR = 8
#: modules that make zeros, or pass them on
_MAKERS = ("ReLU", "Pool", "Dropout", "Threshold", "Hard")


@dataclass(slots=True)
class _Tally:
    """Zeros among elements that went by."""

    zeros: int = 0
    elements: int = 0

    def add(self, values: Tensor) -> None:
        self.zeros += values.numel() - int(torch.count_nonzero(values))
        self.elements += values.numel()

    @property
    def share(self) -> float:
        return self.zeros / self.elements if self.elements else 0.0

    @property
    def seen(self) -> float | None:
        """The share, where anything went by."""
        return self.share if self.elements else None


@dataclass(slots=True)
class _Watched:
    """What went by one module."""

    module: nn.Module
    inputs: _Tally = field(default_factory=_Tally)
    #: values in groups of adjacent ones that are all zero, as zeros
    vectors: _Tally = field(default_factory=_Tally)
    outputs: _Tally = field(default_factory=_Tally)
    gradients: _Tally = field(default_factory=_Tally)
    weight_gradients: _Tally = field(default_factory=_Tally)
    multiply_adds: float = 0.0
    #: whether each feature was ever other than zero
    alive: Tensor | None = None
    passes_gradient: bool = False

    def enters(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        """Before the module runs."""
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return
        x = args[0].detach()
        self.inputs.add(x)
        if isinstance(self.module, LAYERS):
            self.passes_gradient |= args[0].requires_grad
            features = x if isinstance(self.module, nn.Linear) else x.movedim(-1 - self._points, -1)
            self._by_feature(features.reshape(-1, features.shape[-1]) != 0)

    @property
    def _points(self) -> int:
        """Dimensions of a convolution's image."""
        return next(rank for rank, kind in enumerate(_CONVOLUTIONS, start=1) if isinstance(self.module, kind))

    def _by_feature(self, found: Tensor) -> None:
        ever = found.any(0)
        self.alive = ever if self.alive is None else self.alive | ever
        missing = -found.shape[1] % VECTOR
        groups = nn.functional.pad(found, (0, missing)).reshape(len(found), -1, VECTOR).any(2)
        sizes = torch.full((groups.shape[1],), VECTOR)
        sizes[-1] -= missing
        self.vectors.zeros += int(((~groups).sum(0) * sizes).sum())
        self.vectors.elements += found.numel()

    def leaves(self, _: nn.Module, args: Any, output: Any) -> None:
        """After the module ran."""
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return
        self.outputs.add(output.detach())
        if isinstance(self.module, LAYERS):
            weight = self.module.weight
            self.multiply_adds += output.numel() / weight.shape[0] * weight.numel()
        if output.requires_grad:
            output.register_hook(lambda gradient: self.gradients.add(gradient.detach()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ZerosFound:
    """Zeros by layer with weights and by other modules that make them."""

    layers: tuple[LayerZeros, ...]
    activations: tuple[ActivationZeros, ...]


def count_zeros(model: nn.Module, passes: Iterable[Callable[[], Tensor]]) -> ZerosFound:
    """Zeros in forward and backward passes; each of `passes` runs the model and returns its loss. Nothing is
    updated; gradients are cleared.
    """
    watched = {
        name: _Watched(module)
        for name, module in model.named_modules()
        if isinstance(module, LAYERS) or _makes_zeros(module)
    }
    with _hooked(watched.values()):
        for run in passes:
            model.zero_grad()
            _pass(run, watched.values())
    model.zero_grad()
    ran = {name: one for name, one in watched.items() if one.outputs.elements}
    layers = tuple(_layer(name, one) for name, one in ran.items() if isinstance(one.module, LAYERS))
    if not layers:
        raise SpecError(
            "no linear layer or convolution ran as a module of its own; zeros are counted at nn.Linear and"
            " nn.Conv1d, 2d, 3d"
        )
    others = (_maker(name, one) for name, one in ran.items() if not isinstance(one.module, LAYERS))
    return ZerosFound(layers=layers, activations=tuple(others))


def _pass(run: Callable[[], Tensor], watched: Iterable[_Watched]) -> None:
    """One pass forward and backward."""
    loss = run()
    if not torch.isfinite(loss):
        raise SpecError(
            f"the loss of a measured pass is {loss.item()}; zeros of such a network say nothing:"
            " take fewer steps, or other inputs"
        )
    loss.backward()
    for one in watched:
        weight = getattr(one.module, "weight", None)
        if isinstance(weight, Tensor) and weight.grad is not None:
            one.weight_gradients.add(weight.grad)


def _maker(name: str, one: _Watched) -> ActivationZeros:
    kind = type(one.module).__name__
    return ActivationZeros(
        name=name, kind=kind, outputs=one.outputs.share, output_gradients=one.gradients.seen
    )


def _makes_zeros(module: nn.Module) -> bool:
    name = type(module).__name__
    return not any(module.children()) and any(word in name for word in _MAKERS)


@contextmanager
def _hooked(watched: Iterable[_Watched]) -> Iterator[None]:
    handles = []
    for one in watched:
        handles.append(one.module.register_forward_pre_hook(one.enters))
        handles.append(one.module.register_forward_hook(one.leaves))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layer(name: str, one: _Watched) -> LayerZeros:
    weight = one.module.weight
    assert isinstance(weight, Tensor)
    weights = _Tally()
    weights.add(weight.detach())
    dead = 0.0 if one.alive is None else 1 - float(one.alive.float().mean())
    return LayerZeros(
        name=name,
        kind=type(one.module).__name__,
        multiply_adds=one.multiply_adds,
        outputs=len(weight),
        inputs_each=weight[0].numel(),
        points=weight[0, 0].numel(),
        inputs=one.inputs.share,
        input_vectors=one.vectors.share,
        dead_inputs=dead,
        output_gradients=one.gradients.seen,
        weight_zeros=weights.share,
        weight_gradients=one.weight_gradients.seen,
        passes_gradient=one.passes_gradient,
    )
