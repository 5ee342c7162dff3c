"""A fixed share of the elements of each tensor: the largest, random ones, or the largest of accumulated
momentum.

Sorted indices travel in Elias-Fano code: the low l = floor(log2(n / k)) bits of each as they are, the rest in
unary as one bit per index and one per possible value: about 2 + log2(n / k) bits per index, and a size that
depends on n and k alone.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

from paceline.spec.compression.scheme import LATE, Scheme, Shape, Work, bytes_of, numel, register

#: element types of the values that sparse schemes send, and bytes of one
VALUES = {"fp32": 4, "fp16": 2}


def kept(n: int, ratio: float) -> int:
    """Elements that a sparse scheme sends of n."""
    return min(n, max(1, round(ratio * n)))


def low_bits(n: int, k: int) -> int:
    """Bits of each index that Elias-Fano code stores as they are: floor(log2(n / k))."""
    return (n // k).bit_length() - 1


def index_bytes(n: int, k: int) -> tuple[int, int]:
    """Bytes of the low and of the unary part of k sorted indices below n in Elias-Fano code."""
    low = low_bits(n, k)
    return bytes_of(k * low), bytes_of(k + ((n - 1) >> low) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse(Scheme, ABC):
    """A fixed share of the elements of each tensor."""

    ratio: float = 0.01

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        self.check("ratio", 0 < self.ratio <= 1, "above 0, up to 1")

    def ratio_at(self, step: int) -> float:
        """The share that is sent in a step."""
        return self.ratio

    def decode_work(self, shape: Shape, world: int) -> Work:
        n, ranks = numel(shape), world if self.collective == "all_gather" else 1
        sent, arrived = kept(n, self.ratio) * ranks, self.payload_bytes(shape, LATE) * ranks
        return Work(flops=10 * sent, read_bytes=arrived + 4 * sent, written_bytes=4 * n + 4 * sent, passes=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Indexed(Sparse, ABC):
    """Values, and the indices that they belong to."""

    values: str = "fp32"

    def __post_init__(self) -> None:
        Sparse.__post_init__(self)
        self.check("values", self.values in VALUES, " or ".join(VALUES))

    def payload_bytes(self, shape: Shape, step: int) -> int:
        n = numel(shape)
        k = kept(n, self.ratio_at(step))
        return k * VALUES[self.values] + sum(index_bytes(n, k))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class TopK(_Indexed):
    """The elements largest in magnitude; what is not sent is kept and added to the next gradient."""

    name: ClassVar[str] = "topk"
    title: ClassVar[str] = "top-k"
    accuracy: ClassVar[str] = (
        "small at 1 % with error feedback, no loss of BLEU seen; momentum comes late, which costs where it is"
        " large"
    )
    evidence: ClassVar[str] = (
        "Aji and Heafield, EMNLP 2017; Stich et al., Sparsified SGD with Memory, NeurIPS 2018"
    )
    encoder: ClassVar[str] = "paceline.train.compress.sparse:TopKCompressor"
    feedback: bool = True

    @property
    def state_bytes(self) -> int:
        return 4 if self.feedback else 0

    def encode_work(self, shape: Shape) -> Work:
        # gradient and residual, their sum; thresholding in the same pass
        return self.per_element(shape, 4, 8, 4, 2) if self.feedback else self.per_element(shape, 4, 4, 0, 2)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class RandomK(Sparse):
    """The same random elements on all ranks: indices follow from a shared seed and are not sent."""

    name: ClassVar[str] = "randomk"
    title: ClassVar[str] = "random-k"
    collective: ClassVar[str] = "all_reduce"
    accuracy: ClassVar[str] = "converges with error feedback, more slowly than top-k at the same share"
    evidence: ClassVar[str] = "Stich et al., Sparsified SGD with Memory, NeurIPS 2018"
    encoder: ClassVar[str] = "paceline.train.compress.sparse:RandomKCompressor"
    #: keep what is not sent; without it values are scaled up by 1 / ratio, which is unbiased
    feedback: bool = True

    @property
    def state_bytes(self) -> int:
        return 4 if self.feedback else 0

    def payload_bytes(self, shape: Shape, step: int) -> int:
        return 4 * kept(numel(shape), self.ratio_at(step))

    def encode_work(self, shape: Shape) -> Work:
        return self.per_element(shape, 2, 8, 4, 1) if self.feedback else self.per_element(shape, 2, 4, 0, 1)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class DGC(_Indexed):
    """Deep Gradient Compression: top-k of locally accumulated momentum."""

    name: ClassVar[str] = "dgc"
    title: ClassVar[str] = "Deep Gradient Compression"
    accuracy: ClassVar[str] = (
        "none on ResNet-50 up to 32 workers at 0.1 %, given momentum correction and warm-up; VGG-16 loses 1.7"
        " points on 256"
    )
    evidence: ClassVar[str] = (
        "Lin et al., Deep Gradient Compression, ICLR 2018; the authors' repository"
        " synxlin/deep-gradient-compression"
    )
    encoder: ClassVar[str] = "paceline.train.compress.sparse:DGCCompressor"
    ratio: float = 0.001
    #: momentum correction: the optimizer's momentum, applied before selection (the optimizer then uses none)
    momentum: float = 0.9
    nesterov: bool = False
    #: clear momentum, too, where an element was sent
    masking: bool = True
    #: each rank clips a tensor's gradient to this norm over the square root of the number of ranks; 0: not
    clip_norm: float = 0.0
    #: steps over which the share falls from `warmup_ratio` to `ratio`, in `warmup_stages` geometric stages;
    #: 0: none
    warmup_steps: int = 0
    warmup_ratio: float = 0.25
    warmup_stages: int = 4
    #: share of the elements that the threshold is estimated from
    sample: float = 0.01

    def __post_init__(self) -> None:
        _Indexed.__post_init__(self)
        self.check("momentum", 0 <= self.momentum < 1, "from 0 to below 1")
        self.check("clip_norm", self.clip_norm >= 0, "0 or more")
        self.check("warmup_steps", self.warmup_steps >= 0, "0 or more")
        self.check("warmup_ratio", 0 < self.warmup_ratio <= 1, "above 0, up to 1")
        self.check("warmup_stages", self.warmup_stages >= 1, "1 or more")
        self.check("sample", 0 < self.sample <= 1, "above 0, up to 1")

    @property
    def state_bytes(self) -> int:
        return 8 if self.momentum else 4

    def ratio_at(self, step: int) -> float:
        """Falls geometrically: 25 %, 6.3 %, 1.6 %, 0.4 %, then 0.1 %, by default."""
        if step >= self.warmup_steps or self.warmup_ratio <= self.ratio:
            return self.ratio
        stage = step * self.warmup_stages // self.warmup_steps
        return float(self.warmup_ratio * (self.ratio / self.warmup_ratio) ** (stage / self.warmup_stages))

    def encode_work(self, shape: Shape) -> Work:
        return self.per_element(shape, 7, 12, 8, 2)  # gradient, momentum, accumulated; the latter two written
