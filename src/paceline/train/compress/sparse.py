"""A few elements of each tensor: top-k, random-k and Deep Gradient Compression.

Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017; Stich et al., Sparsified
SGD with Memory, NeurIPS 2018. Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for
Distributed Training, ICLR 2018.

The number of elements is fixed by the tensor's size, so that bytes are known beforehand and ranks need not
agree on sizes. The largest are found by a threshold from a sample, aimed low, and an exact choice among what
passes it: the same elements as sorting all would give.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from paceline.spec import compression as spec
from paceline.spec.compression.sparse import kept

from . import kernels, reference
from .base import Arrived, Compressor, flat, writing

#: elements up to which sorting all is as fast as sampling
SMALL = 1 << 14
#: elements of a sample above the threshold that are enough to find it: more cost more than an exact choice
#: among those that pass one too low
_HITS = 32
_VALUES = {"fp32": torch.float32, "fp16": torch.float16}


class _Largest(Compressor):
    """What top-k and DGC share: selection, payload, decoding."""

    scheme: spec.TopK | spec.DGC

    def _largest(
        self,
        x: Tensor,
        gain: Tensor,
        velocity: Tensor | None,
        total: Tensor,
        share: float,
        masked: Tensor | None = None,
    ) -> list[Tensor]:
        """Adds the gradient to `total`, from which the k largest sums are taken away to be sent; `masked`
        becomes zero at their places.
        """
        n = x.numel()
        k = kept(n, self.scheme.ratio_at(self.step))
        momentum = self.scheme.momentum if isinstance(self.scheme, spec.DGC) else 0.0
        nesterov = isinstance(self.scheme, spec.DGC) and self.scheme.nesterov
        stride = max(1, int(1 / share), k // _HITS) | 1  # odd: rows of matrices have even lengths, as a rule
        sampled = -(-n // stride)
        hits = k * sampled / n
        # three standard deviations more than k would need, so that k are found nearly always
        wanted = math.ceil(hits + 3 * math.sqrt(hits) + 2)
        threshold = None
        if n > SMALL and wanted < sampled and not x.is_meta:
            threshold = kernels.threshold(
                x, gain, velocity, momentum, nesterov, total, stride, wanted, self.fused
            )
        found = kernels.accumulate(
            x, gain, velocity, momentum, nesterov, total, threshold, min(n, 3 * wanted * stride), self.fused
        )
        if found is not None and found.numel() < k:
            found = None
        return kernels.sparse_encode(total, masked, found, k, _VALUES[self.scheme.values], self.fused)

    def decode(self, key: str, gathered: Arrived, out: Tensor) -> None:
        with writing(out) as target:
            kernels.clear(target, self.fused)
            kernels.sparse_decode(gathered, self.loss_scale / len(gathered), target, self.fused)


class TopKCompressor(_Largest):
    """The k elements largest in magnitude of each rank's gradient, and of what it held back before."""

    scheme: spec.TopK
    local_state: ClassVar[tuple[str, ...]] = ("residual",)

    def encode(self, key: str, grad: Tensor, shared: Tensor | None = None) -> list[Tensor]:
        x = flat(grad)
        total = self._tensor(key, "residual", x) if self.scheme.feedback else torch.zeros_like(x)
        gain = torch.full((), 1.0 / self.loss_scale, device=x.device)
        return self._largest(x, gain, None, total, 0.01)


class DGCCompressor(_Largest):
    """Top-k of accumulated momentum, with local clipping, factor masking and a warm-up of the share that is
    sent.

        u = m u + g,  v += u,  send the largest of v,  clear u and v there

    Momentum is applied here: give the optimizer none. Clipping is of each tensor by itself, since gradients
    are sent as they become ready.
    """

    scheme: spec.DGC
    local_state: ClassVar[tuple[str, ...]] = ("velocity", "residual")

    def encode(self, key: str, grad: Tensor, shared: Tensor | None = None) -> list[Tensor]:
        x = flat(grad)
        total = self._tensor(key, "residual", x)
        velocity = self._tensor(key, "velocity", x) if self.scheme.momentum else None
        gain, masked = self._gain(x), velocity if self.scheme.masking else None
        if velocity is not None and self.passes:
            gain, velocity = self._added(x, gain, velocity), None
        return self._largest(x, gain, velocity, total, self.scheme.sample, masked)

    def _added(self, x: Tensor, gain: Tensor, velocity: Tensor) -> Tensor:
        """Updates the momentum for a later pass of a step; returns the factor by which `x` adds to the total.

        The gradient of the step is g1 + g2, so that u' = m u + g1 + g2: the first pass made m u + g1 of u,
        the second adds g2 to u and to v.
        """
        if self.scheme.nesterov:  # u' = m (u + g), v += u' + g
            velocity.add_(x * gain, alpha=self.scheme.momentum)
            return gain * (1 + self.scheme.momentum)
        velocity.add_(x * gain)
        return gain

    def _gain(self, x: Tensor) -> Tensor:
        """What the gradient is multiplied by: one over the loss scale, and less where its norm is above the
        limit.
        """
        gain = torch.full((), 1.0 / self.loss_scale, device=x.device)
        if not self.scheme.clip_norm:
            return gain
        norm = kernels.moments(x, self.fused)[0].sqrt().to(torch.float32) * gain
        limit = self.scheme.clip_norm / math.sqrt(self.world)
        return gain * torch.where(norm > limit, limit / norm, torch.ones_like(norm))


class RandomKCompressor(Compressor):
    """k elements at places that all ranks draw alike: values alone are sent, and summed by an all-reduce.

    One place is drawn from each of k ranges: as likely as any other, different by construction, and in the
    order of memory.
    """

    scheme: spec.RandomK
    local_state: ClassVar[tuple[str, ...]] = ("residual",)

    def encode(self, key: str, grad: Tensor, shared: Tensor | None = None) -> list[Tensor]:
        x = flat(grad)
        n = x.numel()
        seed = reference.seed_tensor(self._seed(key, shared=True), x.device)
        index, sizes = reference.strata(n, kept(n, self.scheme.ratio), seed)
        self._pending[key] = index
        # elements that are not drawn must tell of an overflow, too: 0, or NaN if anything is not finite
        poison = 0.0 * kernels.moments(x, self.fused)[0].to(torch.float32) if self._saved is not None else 0.0
        if not self.scheme.feedback:
            return [x[index] * (sizes / self.loss_scale).to(torch.float32) + poison]
        residual = self._tensor(key, "residual", x)
        residual.add_(x, alpha=1.0 / self.loss_scale)
        values = residual[index] + poison
        residual[index] = 0.0
        return [values]

    def decode(self, key: str, gathered: Arrived, out: Tensor) -> None:
        index = self._pending.pop(key)
        with writing(out) as target:
            kernels.clear(target, self.fused)
            target[index] = gathered[0][0] * (self.loss_scale / self.world)
