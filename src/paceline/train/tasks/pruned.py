"""Trains a task, prunes it in several ways, and trains each briefly again: what pruning costs in accuracy."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.spec.sparsity import Granularity, PrunedRun
from paceline.train.pruning import PRUNABLE, keep_pruned, kept_share, prune
from paceline.train.tasks import Task, get
from paceline.train.tasks.course import batches, course
from paceline.train.tasks.loop import optimizer_for
from paceline.train.tasks.step import accuracy, step

#: shares of the weights that are kept; 2:4 keeps half
DENSITIES = (0.5, 0.25, 0.1)
#: retraining over the task's own training: length and peak learning rate
RETRAINED_STEPS, RETRAINED_RATE = 0.125, 0.2


class PruningWay(NamedTuple):
    """One way to prune."""

    granularity: Granularity
    density: float


def ways(model: nn.Module) -> Iterator[PruningWay]:
    """Nothing, which is trained on all the same; then every granularity that a network has units of, at every
    density.
    """
    yield PruningWay(Granularity.ELEMENT, 1.0)
    layers = [module for module in model.modules() if isinstance(module, PRUNABLE)][:-1]
    kernels = any(layer.weight[0, 0].numel() > 1 for layer in layers)
    for granularity in Granularity:
        if granularity is Granularity.KERNEL and not kernels:
            continue
        for density in DENSITIES if granularity is not Granularity.TWO_FOUR else (0.5,):
            yield PruningWay(granularity, density)


def trained(task: Task, seed: int, steps: int | None = None) -> nn.Module:
    """The task's network after its own course, or so many steps of it."""
    torch.manual_seed(seed)
    model = task.model()
    _run(model, task, seed, steps, 1.0, None)
    return model


def _run(
    model: nn.Module, task: Task, seed: int, steps: int | None, rate: float, masks: dict[str, Tensor] | None
) -> None:
    optimizer = optimizer_for("sgd", model, task, task.lr * rate)
    if masks is not None:
        keep_pruned(optimizer, model, masks)
    planned = course(task, steps=steps)
    chosen = batches(task, [one.batch for one in planned], seed)
    for one, indices in zip(planned, chosen, strict=True):
        optimizer.param_groups[0]["lr"] = task.lr * rate * one.rate
        step(model, optimizer, task.train[0][indices], task.train[1][indices])


def measured_passes(model: nn.Module, task: Task, count: int) -> list[Callable[[], Tensor]]:
    """Forward passes of the first batches of a task, each to its loss."""
    chosen = batches(task, [task.batch] * count, seed=0)
    return [partial(_loss, model, task, indices) for indices in chosen]


def _loss(model: nn.Module, task: Task, indices: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(task.train[0][indices]), task.train[1][indices])


def pruned_runs(name: str, seeds: Sequence[int], steps: int | None = None) -> list[PrunedRun]:
    """Accuracy of a task by way of pruning, before pruning, right after it and retrained; `steps` shortens
    both trainings.
    """
    task = get(name)
    again = max(1, round(RETRAINED_STEPS * len(course(task, steps=steps))))
    dense: list[float] = []
    after: dict[PruningWay, list[_Outcome]] = defaultdict(list)
    for seed in seeds:
        model = trained(task, seed, steps)
        dense.append(accuracy(model, task))
        for way in ways(model):
            after[way].append(_outcome(copy.deepcopy(model), task, way, seed + 1, again))
    return [
        PrunedRun(
            task=name,
            granularity=way.granularity,
            density=sum(one.kept for one in found) / len(found),
            dense=tuple(dense),
            pruned=tuple(one.at_once for one in found),
            retrained=tuple(one.retrained for one in found),
        )
        for way, found in after.items()
    ]


class _Outcome(NamedTuple):
    """Share of weights kept, accuracy right after pruning, and retrained."""

    kept: float
    at_once: float
    retrained: float


def _outcome(model: nn.Module, task: Task, way: PruningWay, seed: int, steps: int) -> _Outcome:
    """Prunes a trained network and trains it on."""
    masks = prune(model, way.granularity, way.density)
    at_once = accuracy(model, task)
    _run(model, task, seed, steps, RETRAINED_RATE, masks)
    return _Outcome(kept_share(masks), at_once, accuracy(model, task))
