"""One bit per element: signSGD with majority vote, and 1-bit SGD with error feedback.

Bernstein et al., signSGD with Majority Vote is Communication Efficient and Fault Tolerant, ICLR 2019.
Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
Speech DNNs, Interspeech 2014: two values per tensor here, where the paper has two per column of a weight
matrix.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from paceline.spec import compression as spec

from . import kernels
from .base import Arrived, Compressor, flat, writing


class SignSGDCompressor(Compressor):
    """Ranks send signs, the majority decides; a tie is 0.

    The mean magnitude goes along: it scales the vote unless `scaled=false`, and carries what is not finite.
    """

    scheme: spec.SignSGD

    def encode(self, key: str, grad: Tensor, shared: Tensor | None = None) -> list[Tensor]:
        x = flat(grad)
        codes, sums = kernels.sign_encode(x, None, 1.0, self.fused)
        return [codes, ((sums[0] - sums[1]) / x.numel()).to(torch.float32).reshape(1)]

    def decode(self, key: str, gathered: Arrived, out: Tensor) -> None:
        magnitude = torch.cat([payload[1] for payload in gathered]).mean()
        # a vote has no unit: multiplied by the scale that the optimizer will divide by; 0 * NaN is NaN
        vote = magnitude if self.scheme.scaled else self.loss_scale + 0.0 * magnitude
        ones = torch.ones(len(gathered), dtype=torch.float32, device=out.device)
        with writing(out) as target:
            kernels.sign_decode([payload[0] for payload in gathered], ones, -ones, target, vote, self.fused)


class OneBitCompressor(Compressor):
    """Signs, decoded as the mean of the elements on their side; what that misses is added to the next
    gradient.
    """

    local_state: ClassVar[tuple[str, ...]] = ("residual",)

    def encode(self, key: str, grad: Tensor, shared: Tensor | None = None) -> list[Tensor]:
        x = flat(grad)
        residual = self._tensor(key, "residual", x)
        codes, sums = kernels.sign_encode(x, residual, 1.0 / self.loss_scale, self.fused)
        counts = torch.stack([x.numel() - sums[2], sums[2]]).clamp(min=1)
        values = (sums[:2] / counts).to(torch.float32)
        kernels.sign_feedback(residual, values[0], values[1], self.fused)
        return [codes, values]

    def decode(self, key: str, gathered: Arrived, out: Tensor) -> None:
        values = torch.stack([payload[1] for payload in gathered], dim=1) * (self.loss_scale / len(gathered))
        with writing(out) as target:
            kernels.sign_decode(
                [payload[0] for payload in gathered], values[0], values[1], target, None, self.fused
            )
