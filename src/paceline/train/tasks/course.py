"""The course of a run: how many samples each step takes, which they are, and what share of the learning rate
it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import SpecError
from paceline.train.optim import BatchGrowth, annealed
from paceline.train.tasks import Task

#: shares of a run after which the rate would be divided by the factor of growth
_GROWS_AT = (0.5, 0.75)


@dataclass(frozen=True, slots=True)
class Step:
    """Samples of all ranks together, and the learning rate as a share of its peak."""

    batch: int
    rate: float


def course(
    task: Task,
    *,
    steps: int | None = None,
    batch: int | None = None,
    warmup: int | None = None,
    growth: float | None = None,
) -> list[Step]:
    """The steps of a run: warm-up, then the rate falls to zero; or, with `growth`, the rate stays and the
    batch is multiplied by that, twice.

    `steps` of the starting batch: a run whose batch grows sees as many samples in fewer steps.
    """
    count = len(task.train[1])
    batch = batch or task.batch
    if not 0 < batch <= count:
        raise SpecError(
            f"{task.name} has {count} samples to train on; the batch must be 1 to that, got {batch}"
        )
    total = steps if steps is not None else task.epochs * count // batch
    rise = warmup if warmup is not None else round(task.warmup * total)
    if growth is None:
        return [Step(batch, annealed(step, total, rise)) for step in range(1, total + 1)]
    samples = total * batch
    grown = BatchGrowth(
        batch=batch, most=count, factor=growth, at=tuple(round(share * samples) for share in _GROWS_AT)
    )
    found: list[Step] = []
    seen = 0
    while seen < samples:
        size, rate = grown.when(seen)
        size = min(size, samples - seen)
        found.append(Step(size, rate * min(1.0, (len(found) + 1) / rise) if rise else rate))
        seen += size
    return found


def batches(task: Task, sizes: Sequence[int], seed: int, start: int = 0) -> Iterator[Tensor]:
    """Indices of the samples of each step, from step `start` on; every epoch in another order, without a
    break between.
    """
    count = len(task.train[1])
    at = sum(sizes[:start])
    epoch, order = -1, torch.empty(0, dtype=torch.int64)
    for size in sizes[start:]:
        parts: list[Tensor] = []
        missing = size
        while missing:
            if at // count != epoch:
                epoch = at // count
                order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1000 + epoch))
            part = order[at % count : at % count + missing]
            parts.append(part)
            at, missing = at + len(part), missing - len(part)
        yield torch.cat(parts)
