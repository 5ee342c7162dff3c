"""A short real run of a model on this machine, whose values are counted: what `paceline analyze --precision`
looks at.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from paceline.bench import real
from paceline.capture.build import default_loss
from paceline.capture.resolve import resolve
from paceline.capture.step import StepInputs, _user_code
from paceline.catalog import models
from paceline.errors import CaptureError, SpecError
from paceline.spec import checks
from paceline.spec.value_ranges import RangeRecord
from paceline.train.ranges import Ranges, check_trained
from paceline.train.tasks import TASKS, get
from paceline.train.tasks.course import batches, course
from paceline.train.tasks.loop import optimizer_for
from paceline.units import show

#: bytes of a float32 parameter, its gradient, two moments and the copy that updates are measured from
_PARAMETER_BYTES = 20
#: of models that come with inputs for their shapes only
_INPUTS = (
    "inputs are random and labels all alike: weights and activations are as at the start of training,"
    " gradients are those of an easy task; give your own module with real data for advice on gradients"
)
#: options of captured steps that a run cannot follow
_NOT_RUN = ("precision", "checkpointing", "compile", "channels_last")


def record_ranges(
    model: str,
    *,
    steps: int = 40,
    every: int = 4,
    batch: int | None = None,
    seq: int | None = None,
    image: int | None = None,
    optimizer: str | None = None,
    **others: Any,
) -> RangeRecord:
    """Trains `model` for a few steps in float32, and counts the values of every `every`-th.

    A task of `paceline.train.tasks` trains on its data, anything else on the inputs that it comes with.
    """
    for name in _NOT_RUN:
        if others.get(name):
            raise SpecError(
                f"--{name.replace('_', '-')} does not go with --precision, which runs the model in fp32 as it"
                " is; leave it out"
            )
    checks.whole("steps", steps)
    if model in TASKS:
        return _of_task(model, steps, every, batch, optimizer)
    _check_size(model)
    torch.manual_seed(0)
    job, usual = resolve(model, batch=batch or 1, seq=seq, image=image, real=True)
    record = _of_module(model, job, optimizer or usual.optimizer, steps, every)
    return replace(record, notes=(_INPUTS,)) if _made_up(model) else record


def _of_module(model: str, job: StepInputs, optimizer: str, steps: int, every: int) -> RangeRecord:
    module = real.allocate(job.module).train()
    check_trained(module)
    fill = _random if _made_up(model) else real.filled
    args, kwargs = pytree.tree_map_only(Tensor, fill, (job.args, dict(job.kwargs)))
    loss = job.loss or default_loss
    stepped = real.optimizer(optimizer, module)

    def forward(_: None) -> Tensor:
        return loss(module(*args, **kwargs))

    with Ranges(module, stepped, every=every) as ranges:
        _train(job.name, forward, repeat(None, steps), stepped)
    return ranges.result(job.name)


def _of_task(name: str, steps: int, every: int, batch: int | None, optimizer: str | None) -> RangeRecord:
    task = get(name)
    planned = course(task, steps=steps, batch=batch)
    torch.manual_seed(0)
    net = task.model()
    stepped = optimizer_for(optimizer or "sgd", net, task, None)
    peak = stepped.param_groups[0]["lr"]

    def forward(indices: Tensor) -> Tensor:
        return nn.functional.cross_entropy(net(task.train[0][indices]), task.train[1][indices])

    def samples() -> Iterator[Tensor]:
        for one, indices in zip(planned, batches(task, [one.batch for one in planned], 0), strict=True):
            stepped.param_groups[0]["lr"] = peak * one.rate
            yield indices

    with Ranges(net, stepped, every=every) as ranges:
        _train(name, forward, samples(), stepped)
    return ranges.result(name)


def _train(
    name: str, forward: Callable[[Any], Tensor], inputs: Iterator[Any], optimizer: torch.optim.Optimizer
) -> None:
    for given in inputs:
        optimizer.zero_grad()
        with _user_code(name, "forward pass"):
            loss = forward(given)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise CaptureError(f"{name}: the loss must be one number; give a loss function that returns one")
        if not loss.requires_grad:
            raise CaptureError(f"{name}: the loss does not depend on any trainable parameter")
        with _user_code(name, "backward pass"):
            loss.backward()
        optimizer.step()


def _random(tensor: Tensor) -> Tensor:
    """A normalised input in place of one of which only the shape was meant."""
    return torch.randn(tensor.shape) if tensor.is_floating_point() else real.filled(tensor)


def _made_up(model: str) -> bool:
    """The model is not a user's own function, which chooses its inputs."""
    return not model.partition(":")[0].endswith(".py")


def _check_size(model: str) -> None:
    """Raises where a model of the catalog is too large to train here."""
    if ":" in model:
        return
    entry = models.get(model)
    needed = entry.parameters * _PARAMETER_BYTES
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there / 2:
        raise SpecError(
            f"{model} has {show(entry.parameters, 'count')} parameters: a real run needs"
            f" {show(needed, 'bytes')} and more, and this machine has {show(there, 'bytes')}; take a smaller"
            " model, or count in your own loop with paceline.train.Ranges"
        )
