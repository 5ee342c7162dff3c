"""TernGrad: -1, 0 or 1 times a scaler, rounded at random so that the expectation is the gradient.

Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning, NIPS 2017.

    s = max over ranks of min(max |g|, 2.5 sigma)         per tensor; elements above s become s: that is the
                                                          clipping
    t = sign(g) with probability min(|g| / s, 1), else 0  five to a byte, 1.6 bits per element
    mean over ranks of s t

Sigma is taken about zero, as the clipping is: a tensor whose elements are all alike is not clipped away.
Unbiased where nothing is clipped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.spec import compression as spec

from . import kernels
from .base import Arrived, Compressor, flat, writing


class TernGradCompressor(Compressor):
    """Ternary gradients, five to a byte."""

    scheme: spec.TernGrad

    def prepare(self, key: str, grad: Tensor) -> Tensor | None:
        return self._scaler(flat(grad)) if self.scheme.share else None

    def encode(self, key: str, grad: Tensor, shared: Tensor | None = None) -> list[Tensor]:
        x = flat(grad)
        scaler = self._scaler(x) if shared is None else shared.reshape(1)
        codes = kernels.ternary_encode(x, scaler[0], self._seed(key), self.fused)
        if not self.scheme.share:
            return [codes, scaler]
        self._pending[key] = scaler
        return [codes]

    def decode(self, key: str, gathered: Arrived, out: Tensor) -> None:
        ranks = len(gathered)
        factors = (
            self._pending.pop(key) if self.scheme.share else torch.cat([payload[1] for payload in gathered])
        )
        with writing(out) as target:
            kernels.ternary_decode([payload[0] for payload in gathered], factors / ranks, target, self.fused)

    def _scaler(self, x: Tensor) -> Tensor:
        return kernels.ternary_scaler(x, self.scheme.clip, self.fused)
