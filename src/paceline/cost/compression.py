"""What compressed gradients cost: exact bytes on the wire, the collective they need, and the work of encoding and decoding.

Encoders (`paceline.train.compress`) take their byte counts from here. Bytes one rank contributes for n float32 elements:

    fp32, fp16, bf16   4 n, 2 n, 2 n
    terngrad           ceil(n / 5), and 4 that are max-all-reduced first (or sent along, if scalers are not shared)
    qsgd               4 per bucket, and ceil(bits * m / 8) for each bucket of m elements
    signsgd            ceil(n / 8) + 4
    onebit             ceil(n / 8) + 8
    topk, dgc          k values and k sorted indices in Elias-Fano code, k = max(1, round(ratio * n))
    randomk            4 k
    powersgd           4 r (rows + columns) for a matrix where that is less than 4 n, otherwise 4 n

Elias-Fano: the low l = floor(log2(n / k)) bits of each index as they are, the rest in unary as one bit per index and
one per possible value: about 2 + log2(n / k) bits per index, and a size that depends on n and k alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import SpecError
from paceline.spec.compression import (
    DGC,
    QSGD,
    VALUES,
    BFloat16,
    Float16,
    Float32,
    OneBit,
    PowerSGD,
    RandomK,
    Scheme,
    SignSGD,
    Sparse,
    TernGrad,
    TopK,
    parse,
)

Shape = int | Sequence[int]
#: trits in a byte: 3^5 = 243
TRITS = 5
FLOAT32 = Float32()


def get(text: str) -> Scheme:
    """The scheme that `name` or `name:setting=value,...` describes; its `accuracy` and `evidence` say what it may cost."""
    return parse(text)


def numel(shape: Shape) -> int:
    """Elements of a shape; a number of elements stands for itself."""
    n = shape if isinstance(shape, int) else math.prod(shape)
    if n < 1:
        raise SpecError(f"a gradient has at least one element; got shape {shape}")
    return n


def kept(n: int, ratio: float) -> int:
    """Elements that a sparse scheme sends of n."""
    return min(n, max(1, round(ratio * n)))


def low_bits(n: int, k: int) -> int:
    """Bits of each index that Elias-Fano code stores as they are: floor(log2(n / k))."""
    return (n // k).bit_length() - 1


def index_bytes(n: int, k: int) -> tuple[int, int]:
    """Bytes of the low and of the unary part of k sorted indices below n in Elias-Fano code."""
    low = low_bits(n, k)
    return _bytes(k * low), _bytes(k + ((n - 1) >> low) + 1)


def matrix(shape: Shape) -> tuple[int, int] | None:
    """Rows and columns that PowerSGD makes of a shape; None: a vector, which it leaves alone."""
    if isinstance(shape, int) or len(shape) < 2:
        return None
    return shape[0], numel(shape) // shape[0]


def factors(scheme: PowerSGD, shape: Shape) -> tuple[int, int, int] | None:
    """Rows, columns and rank of the factors; None where they would not be smaller than the gradient."""
    view = matrix(shape)
    if view is None:
        return None
    rows, columns = view
    rank = min(scheme.rank, rows, columns)
    return (rows, columns, rank) if rank * (rows + columns) < rows * columns else None


def buckets(scheme: QSGD, n: int) -> tuple[int, int]:
    """Full buckets, and the elements left over."""
    return divmod(n, scheme.bucket)


def _bytes(bits: int) -> int:
    return -(-bits // 8)


def _sparse(scheme: TopK | DGC, n: int, step: int) -> int:
    k = kept(n, scheme.ratio_at(step))
    return k * VALUES[scheme.values] + sum(index_bytes(n, k))


def _qsgd(scheme: QSGD, n: int) -> int:
    full, rest = buckets(scheme, n)
    return full * (4 + scheme.bucket * scheme.bits // 8) + (4 + _bytes(rest * scheme.bits) if rest else 0)


def _powersgd(scheme: PowerSGD, shape: Shape) -> int:
    found = factors(scheme, shape)
    return 4 * numel(shape) if found is None else 4 * found[2] * (found[0] + found[1])


_WIRE: dict[type[Scheme], Callable[[Any, Shape, int], int]] = {
    Float32: lambda scheme, shape, step: 4 * numel(shape),
    Float16: lambda scheme, shape, step: 2 * numel(shape),
    BFloat16: lambda scheme, shape, step: 2 * numel(shape),
    TernGrad: lambda scheme, shape, step: -(-numel(shape) // TRITS) + (0 if scheme.share else 4),
    QSGD: lambda scheme, shape, step: _qsgd(scheme, numel(shape)),
    SignSGD: lambda scheme, shape, step: _bytes(numel(shape)) + 4,
    OneBit: lambda scheme, shape, step: _bytes(numel(shape)) + 8,
    TopK: lambda scheme, shape, step: _sparse(scheme, numel(shape), step),
    DGC: lambda scheme, shape, step: _sparse(scheme, numel(shape), step),
    RandomK: lambda scheme, shape, step: 4 * kept(numel(shape), scheme.ratio_at(step)),
    PowerSGD: lambda scheme, shape, step: _powersgd(scheme, shape),
}


def wire_bytes(scheme: Scheme, shape: Shape, *, step: int | None = None) -> int:
    """Bytes one rank contributes for a float32 gradient of that shape, what is agreed on first not counted.

    `step` matters to schemes that warm up; None: after that.
    """
    return _WIRE[type(scheme)](scheme, shape, _LATE if step is None else step)


#: past any warm-up
_LATE = 2**62


def shared_bytes(scheme: Scheme, shape: Shape) -> int:
    """Bytes that are all-reduced with MAX before a gradient can be encoded."""
    numel(shape)
    return 4 if isinstance(scheme, TernGrad) and scheme.share else 0


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective of a gradient: `op` is "max", "sum" or "gather", `bytes` what one rank contributes."""

    op: str
    bytes: int

    @property
    def collective(self) -> str:
        """As `paceline.cost.collectives` calls it."""
        return "all_gather" if self.op == "gather" else "all_reduce"

    def sent_bytes(self, world: int) -> float:
        """What one of `world` ranks sends in a ring: all of the others' for a gather, 2 (n-1)/n for a reduction."""
        return self.bytes * (world - 1) * (1.0 if self.op == "gather" else 2.0 / world)


def exchanges(scheme: Scheme, shape: Shape, *, step: int | None = None) -> tuple[Exchange, ...]:
    """The collectives of one gradient, one after another."""
    first = shared_bytes(scheme, shape)
    agreed = (Exchange("max", first),) if first else ()
    if isinstance(scheme, PowerSGD):
        found = factors(scheme, shape)
        if found is not None:
            return (Exchange("sum", 4 * found[0] * found[2]), Exchange("sum", 4 * found[1] * found[2]))
    return (*agreed, Exchange("gather" if scheme.collective == "all_gather" else "sum", wire_bytes(scheme, shape, step=step)))


def sent_bytes(scheme: Scheme, shape: Shape, world: int, *, step: int | None = None) -> float:
    """Bytes one rank sends for one gradient, by ring algorithms."""
    return sum(exchange.sent_bytes(world) for exchange in exchanges(scheme, shape, step=step))


# ---- models

Named = tuple[str, Sequence[int]]


def last_layer(parameters: Iterable[Named]) -> str:
    """The module that holds the last matrix, in the order in which a model lists its parameters: the classifier, as a rule.

    Embeddings that are tied to the output are listed first, and are not found.
    """
    found = ""
    for name, shape in parameters:
        if len(shape) >= 2:
            found = name.rpartition(".")[0]
    return found


def assign(scheme: Scheme, parameters: Iterable[Named]) -> dict[str, Scheme]:
    """The scheme of each parameter by name: float32 for small tensors and, if the scheme says so, for the last layer."""
    listed = list(parameters)
    last = last_layer(listed) if scheme.keep_last else None
    return {
        name: FLOAT32 if numel(shape) < scheme.min_elements or name.rpartition(".")[0] == last else scheme
        for name, shape in listed
    }


def model_bytes(scheme: Scheme, parameters: Iterable[Named], *, step: int | None = None, shared: bool = True) -> int:
    """Bytes one rank contributes for all gradients of a model; `shared`: with the scalers that are agreed on first."""
    listed = list(parameters)
    chosen = assign(scheme, listed)
    return sum(
        wire_bytes(chosen[name], shape, step=step) + (shared_bytes(chosen[name], shape) if shared else 0)
        for name, shape in listed
    )


# ---- work


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What encoding or decoding one gradient takes of a device: arithmetic, and memory traffic of fused kernels."""

    flops: float
    read_bytes: float
    written_bytes: float
    #: passes over the gradient, each at least one kernel
    passes: int

    @property
    def bytes(self) -> float:
        """Read and written."""
        return self.read_bytes + self.written_bytes


#: by scheme, per element, for encoding: arithmetic (integer operations of hashing and packing included), bytes read, bytes written
#: besides the payload, passes; for decoding one rank's part: arithmetic. Counted from the fused kernels.
_ENCODE: dict[type[Scheme], tuple[float, float, float, int]] = {
    Float32: (0, 0, 0, 0),
    Float16: (2, 4, 0, 1),
    BFloat16: (2, 4, 0, 1),
    TernGrad: (25, 8, 0, 2),     # moments, then hash, compare and pack
    QSGD: (25, 8, 0, 2),         # the second reading of a bucket comes from a cache on CPUs
    SignSGD: (5, 4, 0, 1),       # magnitudes and signs in one pass
    OneBit: (12, 16, 8, 2),      # gradient and residual; then the sum of both again, to know the error
    TopK: (4, 8, 4, 2),          # gradient and residual, their sum; thresholding in the same pass
    DGC: (7, 12, 8, 2),          # gradient, momentum, accumulated; the latter two written
    RandomK: (2, 8, 4, 1),
    PowerSGD: (0, 0, 0, 0),      # matrix products, below
}
_DECODE: dict[type[Scheme], float] = {
    Float32: 0, Float16: 2, BFloat16: 2, TernGrad: 8, QSGD: 6, SignSGD: 4, OneBit: 5, TopK: 0, DGC: 0, RandomK: 0, PowerSGD: 0,
}


def encode_work(scheme: Scheme, shape: Shape) -> Work:
    """Of one rank, for one gradient."""
    n, payload = numel(shape), wire_bytes(scheme, shape)
    if isinstance(scheme, PowerSGD):
        return _powersgd_encode(scheme, shape)
    flops, read, written, passes = _ENCODE[type(scheme)]
    if isinstance(scheme, TopK | RandomK) and not scheme.feedback:
        read, written = 4, 0
    return Work(flops=flops * n, read_bytes=read * n, written_bytes=written * n + (payload if passes else 0), passes=passes)


def decode_work(scheme: Scheme, shape: Shape, world: int) -> Work:
    """Of one rank, for one gradient, from what all ranks sent."""
    n, payload = numel(shape), wire_bytes(scheme, shape)
    arrived = payload * (world if scheme.collective == "all_gather" else 1)
    if isinstance(scheme, Float32):
        return Work(flops=n, read_bytes=4 * n, written_bytes=4 * n, passes=1)  # the division by the number of ranks
    if isinstance(scheme, PowerSGD):
        return _powersgd_decode(scheme, shape)
    if isinstance(scheme, Sparse):
        sent = kept(n, scheme.ratio) * (world if scheme.collective == "all_gather" else 1)
        return Work(flops=10 * sent, read_bytes=arrived + 4 * sent, written_bytes=4 * n + 4 * sent, passes=2)
    ranks = world if scheme.collective == "all_gather" else 1
    return Work(flops=_DECODE[type(scheme)] * n * ranks, read_bytes=arrived, written_bytes=4 * n, passes=1)


def _powersgd_encode(scheme: PowerSGD, shape: Shape) -> Work:
    """Error feedback, M Q, Gram-Schmidt of P, and M' P."""
    n, found = numel(shape), factors(scheme, shape)
    if found is None:
        return Work(flops=0, read_bytes=0, written_bytes=0, passes=0)
    rows, columns, rank = found
    return Work(flops=n + 4 * n * rank + 2 * rows * rank**2, read_bytes=16 * n + 4 * rank * (2 * rows + columns),
                written_bytes=4 * n + 4 * rank * (2 * rows + columns), passes=3)


def _powersgd_decode(scheme: PowerSGD, shape: Shape) -> Work:
    """P Q' and the new error."""
    n, found = numel(shape), factors(scheme, shape)
    if found is None:
        return Work(flops=n, read_bytes=4 * n, written_bytes=4 * n, passes=1)
    rows, columns, rank = found
    return Work(flops=2 * n * rank + n, read_bytes=8 * n + 4 * rank * (rows + columns), written_bytes=8 * n, passes=2)
