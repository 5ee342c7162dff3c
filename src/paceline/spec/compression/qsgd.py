"""QSGD: stochastic rounding to a few levels, with a norm per bucket of elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.spec.compression.scheme import Scheme, Shape, Work, bytes_of, numel, register


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class QSGD(Scheme):
    """Stochastic rounding to a few levels, with a norm per bucket of elements."""

    name: ClassVar[str] = "qsgd"
    title: ClassVar[str] = "QSGD"
    accuracy: ClassVar[str] = "none seen at 4 bits and buckets of 512; fewer bits are noisier"
    evidence: ClassVar[str] = "Alistarh et al., QSGD, NIPS 2017 (ImageNet, CIFAR-10, AN4)"
    encoder: ClassVar[str] = "paceline.train.compress.qsgd:QSGDCompressor"
    #: of one element, its sign included: 2, 4 or 8
    bits: int = 4
    #: elements that share a norm
    bucket: int = 512
    #: "max" or "l2"
    norm: str = "max"

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        self.check("bits", self.bits in (2, 4, 8), "2, 4 or 8")
        self.check("bucket", self.bucket >= 8 and self.bucket % 8 == 0, "a multiple of 8")
        self.check("norm", self.norm in ("max", "l2"), "max or l2")

    @property
    def levels(self) -> int:
        """Levels above zero."""
        return int(2 ** (self.bits - 1)) - 1

    def buckets(self, n: int) -> tuple[int, int]:
        """Full buckets, and the elements left over."""
        return divmod(n, self.bucket)

    def payload_bytes(self, shape: Shape, step: int) -> int:
        full, rest = self.buckets(numel(shape))
        return full * (4 + self.bucket * self.bits // 8) + (4 + bytes_of(rest * self.bits) if rest else 0)

    def encode_work(self, shape: Shape) -> Work:
        # the second reading of a bucket comes from a cache on CPUs
        return self.per_element(shape, 25, 8, 0, 2)

    def decode_work(self, shape: Shape, world: int) -> Work:
        return self.added_up(shape, world, 6)
