"""Gradients in float32, or cast to half precision: reduced as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.spec.compression.scheme import NO_WORK, Scheme, Shape, Work, numel, register


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Float32(Scheme):
    """No compression: the all-reduce that everything else is measured against."""

    name: ClassVar[str] = "fp32"
    title: ClassVar[str] = "float32 all-reduce"
    collective: ClassVar[str] = "all_reduce"
    accuracy: ClassVar[str] = "none: the sum of all gradients, up to its order"
    evidence: ClassVar[str] = "definition of synchronous SGD"
    encoder: ClassVar[str] = "paceline.train.compress.cast:Cast"
    min_elements: int = 0

    def payload_bytes(self, shape: Shape, step: int) -> int:
        return 4 * numel(shape)

    def encode_work(self, shape: Shape) -> Work:
        return NO_WORK

    def decode_work(self, shape: Shape, world: int) -> Work:
        n = numel(shape)
        # the division by the number of ranks
        return Work(flops=n, read_bytes=4 * n, written_bytes=4 * n, passes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Half(Scheme):
    """Two bytes an element."""

    collective: ClassVar[str] = "all_reduce"
    encoder: ClassVar[str] = "paceline.train.compress.cast:Cast"
    min_elements: int = 0

    def payload_bytes(self, shape: Shape, step: int) -> int:
        return 2 * numel(shape)

    def encode_work(self, shape: Shape) -> Work:
        return self.per_element(shape, 2, 4, 0, 1)

    def decode_work(self, shape: Shape, world: int) -> Work:
        return self.added_up(shape, world, 2)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Float16(_Half):
    """Half precision: 11 bits of significand, overflows above 65,504."""

    name: ClassVar[str] = "fp16"
    title: ClassVar[str] = "float16 all-reduce"
    accuracy: ClassVar[str] = (
        "none seen with loss scaling; without it small gradients vanish and large sums overflow"
    )
    evidence: ClassVar[str] = "Micikevicius et al., Mixed Precision Training, ICLR 2018"


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class BFloat16(_Half):
    """Half the bytes with the range of float32: 8 bits of significand."""

    name: ClassVar[str] = "bf16"
    title: ClassVar[str] = "bfloat16 all-reduce"
    accuracy: ClassVar[str] = "none seen: the range of float32, sums rounded to 8 bits"
    evidence: ClassVar[str] = "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019"
