"""One step of a task, timed, and how good its network is."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.train.tasks import Task


@dataclass(frozen=True, slots=True)
class Done:
    """A step: its loss, and when its phases began and ended, by `time.perf_counter`."""

    loss: float
    phases: tuple[tuple[str, float, float], ...]

    @property
    def seconds(self) -> dict[str, float]:
        """By phase, and of the step, as the record has them."""
        return {f"{name}_s": end - start for name, start, end in self.phases} | {
            "step_s": self.phases[-1][2] - self.phases[0][1]
        }


def step(net: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor, weight: float = 1.0) -> Done:
    """Forward, backward, update; the loss counts `weight` times, for a rank with more or fewer samples than
    the mean of all.
    """
    start = time.perf_counter()
    opt.zero_grad()
    loss = torch.nn.functional.cross_entropy(net(x), y) * weight
    middle = time.perf_counter()
    loss.backward()
    late = time.perf_counter()
    opt.step()
    end = time.perf_counter()
    return Done(loss.item(), (("forward", start, middle), ("backward", middle, late), ("update", late, end)))


@contextlib.contextmanager
def _evaluating(net: nn.Module) -> Iterator[None]:
    was = net.training
    net.eval()
    with torch.no_grad():
        yield
    net.train(was)


def right_answers(net: nn.Module, x: Tensor, y: Tensor) -> int:
    """How many samples a network classifies rightly."""
    with _evaluating(net):
        return int((net(x).argmax(1) == y).sum())


def accuracy(net: nn.Module, task: Task) -> float:
    """Share of right answers on the test set."""
    return right_answers(net, *task.test) / len(task.test[1])


def final_loss(net: nn.Module, task: Task) -> float:
    """On a part of the training set: what runs are compared by."""
    with _evaluating(net):
        return float(torch.nn.functional.cross_entropy(net(task.train[0][:512]), task.train[1][:512]))


def noted(run: Mapping[str, Any], found: dict[str, Any], raw: str | None) -> dict[str, Any]:
    """Appends a run and how it ended to the file `raw`, if there is one; what was found."""
    if raw is not None:
        kept = {key: found[key] for key in ("accuracy", "final_loss", "seconds", "reached")}
        with Path(raw).open("a", encoding="utf-8") as file:
            file.write(json.dumps({**run, **kept}) + "\n")
    return found
