"""Learning rate and batch over time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from paceline.errors import SpecError


def scaled_lr(base_lr: float, batch: int, base_batch: int = 256, rule: str = "linear") -> float:
    """The learning rate for a batch, given one that is known to work: in proportion (SGD), or to the square
    root (adaptive optimizers).

    Goyal et al., Accurate, Large Minibatch SGD, 2017; Krizhevsky, One weird trick, 2014.

    >>> scaled_lr(0.1, 8192)
    3.2
    """
    if rule not in ("linear", "sqrt"):
        raise SpecError(f"rule must be linear or sqrt; got {rule!r}")
    if min(base_lr, batch, base_batch) <= 0:
        raise SpecError(f"learning rate and batches must be positive; got {base_lr:g}, {batch}, {base_batch}")
    return base_lr * (batch / base_batch if rule == "linear" else (batch / base_batch) ** 0.5)


def warmup(
    optimizer: torch.optim.Optimizer, steps: int, then: LRScheduler | None = None, start: float = 0.0
) -> LRScheduler:
    """Raises the learning rate from `start` of itself to all of it over `steps`, then goes on with another
    schedule.
    """
    if steps < 0 or not 0 <= start <= 1:
        raise SpecError(
            f"warm-up takes 0 steps or more and begins at 0 to 1 of the rate; got {steps} and {start:g}"
        )
    rise = LambdaLR(optimizer, lambda step: min(1.0, start + (1 - start) * (step + 1) / (steps + 1)))
    return rise if then is None else torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, then], [steps])


def annealed(step: int, steps: int, warmup: int = 0) -> float:
    """The share of the learning rate in step `step` (from 1) of `steps`: it rises over `warmup`, then falls
    to zero along half a cosine.

    Loshchilov and Hutter, SGDR, ICLR 2017, without restarts. Averages out what noise is left in the gradients
    at the end of a run.

    >>> [round(annealed(step, 8, 2), 2) for step in range(1, 9)]
    [0.5, 1.0, 1.0, 0.93, 0.75, 0.5, 0.25, 0.07]
    """
    if step <= warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup - 1) / max(1, steps - warmup)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGrowth:
    """Grows the batch where others lower the learning rate, as far as it may; beyond, the rate falls.

    Smith et al., Don't Decay the Learning Rate, Increase the Batch Size, ICLR 2018: both keep lr / batch, and
    so the noise of SGD.
    """

    batch: int
    most: int
    factor: float = 5.0
    #: steps (or epochs) at which the rate would be divided by `factor`
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.batch <= self.most or self.factor <= 1:
            raise SpecError(
                f"0 < batch <= most and factor > 1; got {self.batch}, {self.most} and {self.factor:g}"
            )

    def when(self, step: int) -> tuple[int, float]:
        """The batch, and what the learning rate is multiplied with, at a step.

        >>> growth = BatchGrowth(batch=128, most=1000, factor=4, at=(10, 20))
        >>> growth.when(0), growth.when(10), growth.when(20)
        ((128, 1.0), (512, 1.0), (1000, 0.48828125))
        """
        wanted = self.batch * self.factor ** sum(step >= at for at in self.at)
        batch = min(self.most, int(wanted))
        return batch, min(1.0, batch / wanted)
