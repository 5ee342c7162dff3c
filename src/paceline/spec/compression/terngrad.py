"""TernGrad: -1, 0, 1 times a scaler per tensor, five to a byte."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from paceline.spec.compression.scheme import Scheme, Shape, Work, numel, register

#: trits in a byte: 3^5 = 243
TRITS = 5


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class TernGrad(Scheme):
    """Ternary gradients: -1, 0, 1 times a scaler per tensor, five to a byte."""

    name: ClassVar[str] = "terngrad"
    title: ClassVar[str] = "TernGrad, 1.6 bit"
    accuracy: ClassVar[str] = (
        "none on AlexNet, below 2 points on average on GoogLeNet; without clipping AlexNet loses 2.7 points"
    )
    evidence: ClassVar[str] = "Wen et al., TernGrad, NIPS 2017 (ImageNet and CIFAR-10, 2 to 16 workers)"
    encoder: ClassVar[str] = "paceline.train.compress.terngrad:TernGradCompressor"
    #: gradients are clipped at so many standard deviations of their tensor; 0: not
    clip: float = 2.5
    #: one scaler for all ranks, the largest; otherwise each rank sends its own
    share: bool = True
    keep_last: bool = True

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        self.check("clip", self.clip >= 0 and math.isfinite(self.clip), "0 or more")

    def payload_bytes(self, shape: Shape, step: int) -> int:
        return -(-numel(shape) // TRITS) + (0 if self.share else 4)

    def shared_bytes(self, shape: Shape) -> int:
        numel(shape)
        return 4 if self.share else 0

    def encode_work(self, shape: Shape) -> Work:
        return self.per_element(shape, 25, 8, 0, 2)  # moments, then hash, compare and pack

    def decode_work(self, shape: Shape, world: int) -> Work:
        return self.added_up(shape, world, 8)
