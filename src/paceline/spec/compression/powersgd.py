"""PowerSGD: low-rank factors of each matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.spec.compression.scheme import NO_WORK, Exchange, Scheme, Shape, Work, numel, register

#: past any warm-up; PowerSGD has none
_ANY = 0


def matrix(shape: Shape) -> tuple[int, int] | None:
    """Rows and columns that PowerSGD makes of a shape; None: a vector, which it leaves alone."""
    if isinstance(shape, int) or len(shape) < 2:
        return None
    return shape[0], numel(shape) // shape[0]


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD(Scheme):
    """Low-rank approximation of each matrix by one warm-started power iteration, with error feedback."""

    name: ClassVar[str] = "powersgd"
    title: ClassVar[str] = "PowerSGD"
    collective: ClassVar[str] = "all_reduce"
    accuracy: ClassVar[str] = "none at rank 2 or 4 on ResNet-18 and an LSTM; rank 1 loses about half a point"
    evidence: ClassVar[str] = "Vogels et al., PowerSGD, NeurIPS 2019 (CIFAR-10, WikiText-2, 16 workers)"
    encoder: ClassVar[str] = "paceline.train.compress.powersgd:PowerSGDCompressor"
    rank: int = 4

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        self.check("rank", self.rank >= 1, "1 or more")

    def factors(self, shape: Shape) -> tuple[int, int, int] | None:
        """Rows, columns and rank of the factors; None where they would not be smaller than the gradient."""
        view = matrix(shape)
        if view is None:
            return None
        rows, columns = view
        rank = min(self.rank, rows, columns)
        return (rows, columns, rank) if rank * (rows + columns) < rows * columns else None

    @property
    def state_bytes(self) -> int:
        return 4

    def payload_bytes(self, shape: Shape, step: int) -> int:
        found = self.factors(shape)
        return 4 * numel(shape) if found is None else 4 * found[2] * (found[0] + found[1])

    def exchanges(self, shape: Shape, step: int = _ANY) -> tuple[Exchange, ...]:
        found = self.factors(shape)
        if found is None:
            return Scheme.exchanges(self, shape, step)
        rows, columns, rank = found
        return Exchange("sum", 4 * rows * rank), Exchange("sum", 4 * columns * rank)

    def encode_work(self, shape: Shape) -> Work:
        """Error feedback, M Q, Gram-Schmidt of P, and M' P."""
        n, found = numel(shape), self.factors(shape)
        if found is None:
            return NO_WORK
        rows, columns, rank = found
        factors = 4 * rank * (2 * rows + columns)
        flops = n + 4 * n * rank + 2 * rows * rank**2
        return Work(flops=flops, read_bytes=16 * n + factors, written_bytes=4 * n + factors, passes=3)

    def decode_work(self, shape: Shape, world: int) -> Work:
        """P Q' and the new error."""
        n, found = numel(shape), self.factors(shape)
        if found is None:
            return Work(flops=n, read_bytes=4 * n, written_bytes=4 * n, passes=1)
        rows, columns, rank = found
        read = 8 * n + 4 * rank * (rows + columns)
        return Work(flops=2 * n * rank + n, read_bytes=read, written_bytes=8 * n, passes=2)
