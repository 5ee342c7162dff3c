"""The gradient noise scale, from the gradients that data-parallel ranks have anyway.

With b samples per rank and P ranks, E|g_rank|^2 = |G|^2 + S / b and E|g_mean|^2 = |G|^2 + S / (b P), where G
is the true gradient and S the trace of the covariance over samples. Two unknowns, two measured norms: B = S /
|G|^2 is about the batch beyond which more samples per step stop paying (McCandlish et al., An Empirical Model
of Large-Batch Training, 2018).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import SpecError


class NoiseScale:
    """Running estimate; give it every rank's own gradients before averaging and the mean after, in each step
    or now and then.
    """

    def __init__(self, batch: int, world: int, decay: float = 0.95) -> None:
        if world < 2:
            raise SpecError(
                "the noise scale is measured from the difference between ranks; it needs at least 2"
            )
        self.batch, self.world, self.decay = batch, world, decay
        self._signal = self._noise = 0.0
        self._weight = 0.0

    def update(self, own_square: float, mean_square: float) -> None:
        """Takes the mean over ranks of the squared norm of a rank's gradient, and the squared norm of the
        mean gradient.
        """
        small, large = self.batch, self.batch * self.world
        signal = (large * mean_square - small * own_square) / (large - small)
        noise = (own_square - mean_square) / (1 / small - 1 / large)
        self._signal = self.decay * self._signal + (1 - self.decay) * signal
        self._noise = self.decay * self._noise + (1 - self.decay) * noise
        self._weight = self.decay * self._weight + (1 - self.decay)

    @property
    def value(self) -> float:
        """Samples; infinite where the gradient is lost in its noise, not a number before the first step."""
        if not self._weight:
            return float("nan")
        return self._noise / self._signal if self._signal > 0 else float("inf")


def squares(
    own: Iterable[Tensor], mean: Iterable[Tensor], group: dist.ProcessGroup | None = None
) -> tuple[float, float]:
    """What `NoiseScale.update` takes, from the gradients of this rank and their mean; all ranks take part."""
    both = torch.stack(
        [torch.stack([t.float().square().sum() for t in tensors]).sum() for tensors in (own, mean)]
    )
    dist.all_reduce(both, group=group)
    world = dist.get_world_size(group)
    return float(both[0]) / world, float(both[1]) / world
