"""QSGD: stochastic rounding to a few levels between zero and a norm per bucket.

Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NIPS 2017. With the
largest magnitude of a bucket as its norm, as in the paper's experiments, or with the 2-norm of its theory.
Codes of a fixed size: no Elias coding of levels.
"""

from __future__ import annotations

from torch import Tensor

from paceline.spec import compression as spec

from . import kernels
from .base import Arrived, Compressor, flat, writing


class QSGDCompressor(Compressor):
    """Unbiased; the variance falls with more bits and smaller buckets."""

    scheme: spec.QSGD

    def encode(self, key: str, grad: Tensor, shared: Tensor | None = None) -> list[Tensor]:
        return list(kernels.qsgd_encode(flat(grad), self.scheme, self._seed(key), self.fused))

    def decode(self, key: str, gathered: Arrived, out: Tensor) -> None:
        with writing(out) as target:
            kernels.qsgd_decode(
                [p[0] for p in gathered], [p[1] for p in gathered], self.scheme, target, self.fused
            )
