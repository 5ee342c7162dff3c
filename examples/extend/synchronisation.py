"""A way of synchronising: a step averages the gradients of every second layer, the next one the others.

    paceline --extend examples/extend/synchronisation.py compare resnet50 \
        --cluster 4x1xp100-sxm@10Gb/s --plans ddp,alternate
    paceline --extend examples/extend/synchronisation.py train --strategy ddp,alternate --steps 100

A layer whose turn it is not keeps its gradients, which are added to those of its next turn, and its
parameters, so that these are the same on all ranks at any time. A step sends half, after the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, zeros_like

from paceline import sync
from paceline.sim.work import REDUCTION
from paceline.spec.prediction import Evidence
from paceline.sync.way import Gradient, Message, Side, Way, full_bytes
from paceline.train import strategies
from paceline.train.strategies.base import Strategy, average

#: layers take turns of so many steps
TURNS = 2


def halved(side: Side, gradients: Sequence[Gradient]) -> Iterator[Message]:
    """What a step sends, of the mean of two turns: for predictions and the search."""
    for axis in dict.fromkeys(gradient.axis for gradient in gradients):
        mine = [gradient for gradient in gradients if gradient.axis == axis]
        sent = side.mesh.label(("all_reduce", full_bytes(mine) / TURNS, axis), REDUCTION)
        yield Message(gradients=mine, reduce=(sent,), early=False)


class Alternate(Strategy):
    """Does it: for training."""

    name = "alternate"
    paper = "this example"
    exact = False

    def _begin(self) -> None:
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in self.parameters))
        self._turn = [layers.index(name.rpartition(".")[0]) % TURNS for name, _ in self.parameters]
        self._kept: dict[int, Tensor] = {}
        self._steps = 0

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        due = []
        for i, (_, parameter) in enumerate(self.parameters):
            gradient = zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradient = gradient + self._kept.pop(i) if i in self._kept else gradient
            parameter.grad = gradient if self._turn[i] == self._steps % TURNS else None
            if parameter.grad is None:  # the optimizer leaves this parameter as it is
                self._kept[i] = gradient
            else:
                due.append(gradient)
        self.engine.submit("turn", average(due, self.world)).wait()
        self._steps += 1
        return self._plain_step(*args, **kwargs)

    def synchronize(self) -> None:
        """Parameters are the same after every step."""


sync.register(
    "alternate",
    lambda relax: Way(
        messages=halved,
        accuracy=Evidence(what="not measured: gradients wait for a step", kind="guessed", source=__file__),
        state_bytes=4 / TURNS,  # gradients of layers whose turn it is not
    ),
)
strategies.register("alternate", Alternate)
