"""What a step on this rank looks like without waiting for anyone: when parameters are needed, when gradients
are ready, how long the passes take.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from paceline.train.hooks import trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One parameter: bytes of its float32 gradient, seconds into the forward pass when it is needed, into the
    backward pass when it is ready.
    """

    name: str
    shape: tuple[int, ...]
    need_s: float
    ready_s: float
    #: input rows of the fully connected layer whose weight it is, per step; 0: it is none, or does not
    #: qualify
    rows: int = 0

    @property
    def bytes(self) -> int:
        """Of the gradient."""
        return 4 * int(torch.Size(self.shape).numel())


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A step: parameters as the model lists them, seconds of the passes and of the optimizer."""

    layers: tuple[Layer, ...]
    forward_s: float
    backward_s: float
    update_s: float
    #: whether the optimizer keeps a momentum: a compressor may take it over
    momentum: bool = False

    @property
    def bytes(self) -> int:
        """Of all gradients."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Of parameters, by name."""
        return [(layer.name, layer.shape) for layer in self.layers]

    @property
    def compute_s(self) -> float:
        """A step without communication."""
        return self.forward_s + self.backward_s + self.update_s

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Profile:
        """What `to_dict` gave."""
        layers = tuple(Layer(**{**layer, "shape": tuple(layer["shape"])}) for layer in data["layers"])
        return Profile(
            layers=layers, **{key: data[key] for key in ("forward_s", "backward_s", "update_s", "momentum")}
        )


class Profiler:
    """Watches steps of a model; communication must not run inside the passes for the times to be those of
    computation alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = trained(model)
        self._names = {id(p): name for name, p in self._parameters}
        self._owners: dict[nn.Module, list[str]] = {
            m: [self._names[id(p)] for p in m.parameters(recurse=False) if id(p) in self._names]
            for m in model.modules()
        }
        self._linear = {m: names for m, names in self._owners.items() if type(m) is nn.Linear and names}
        self._steps: list[dict[str, Any]] = []
        self._now: dict[str, Any] = {}
        self._handles = [
            model.register_forward_pre_hook(self._start),
            model.register_forward_hook(self._middle),
        ]
        self._handles += [
            m.register_forward_pre_hook(self._need) for m, names in self._owners.items() if names
        ]
        self._handles += [p.register_post_accumulate_grad_hook(self._ready) for _, p in self._parameters]

    def _start(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._now = {"start": _clock(), "need": {}, "ready": {}, "rows": {}}

    def _need(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._now and "middle" not in self._now:
            at = _clock() - self._now["start"]
            for name in self._owners[module]:
                self._now["need"].setdefault(name, at)
            if module in self._linear:
                rows = inputs[0].numel() // inputs[0].shape[-1]
                for name in self._linear[module]:
                    # called twice: the two calls' factors would have to be kept apart
                    self._now["rows"][name] = 0 if name in self._now["rows"] else rows

    def _middle(self, *_: Any) -> None:
        if self._now:
            self._now.setdefault("middle", _clock())

    def _ready(self, parameter: torch.Tensor) -> None:
        if "middle" in self._now:
            self._now["ready"][self._names[id(parameter)]] = self._now["end"] = _clock()

    def stepped(self, update_s: float) -> None:
        """Called after the optimizer's step, which took `update_s`."""
        if "end" in self._now:
            self._steps.append({**self._now, "update_s": update_s})
        self._now = {}

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()

    def profile(self, optimizer: torch.optim.Optimizer | None = None) -> Profile:
        """The one in the middle of the steps seen, by time; the first left out if there are others: it pays
        for what is done once.
        """
        steps = sorted(self._steps[1:] or self._steps, key=lambda step: float(step["end"] - step["start"]))
        best = steps[(len(steps) - 1) // 2]
        start, middle = best["start"], best["middle"]
        layers = tuple(
            Layer(
                name=name,
                shape=tuple(p.shape),
                need_s=best["need"].get(name, 0.0),
                ready_s=best["ready"].get(name, best["end"]) - middle,
                rows=best["rows"].get(name, 0) if name.endswith("weight") else 0,
            )
            for name, p in self._parameters
        )
        momentum = optimizer is not None and any(group.get("momentum") for group in optimizer.param_groups)
        return Profile(
            layers=layers,
            forward_s=middle - start,
            backward_s=best["end"] - middle,
            update_s=statistics.median_low(step["update_s"] for step in steps),
            momentum=momentum,
        )


def _clock() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def order_of(layers: Sequence[Layer]) -> list[Layer]:
    """Layers as their gradients become ready."""
    return sorted(layers, key=lambda layer: layer.ready_s)
