"""The fastest way to run each encoder and decoder where a tensor lies: C on the host, on a GPU Triton for
TernGrad and torch.compile for the rest, else plain torch.

All take flat, contiguous float32 tensors; `fused=False` asks for the plain reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import c_double, c_float, c_int, c_int64, c_uint32, memset
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from paceline.errors import DataError
from paceline.spec.compression import QSGD
from paceline.spec.compression.sparse import index_bytes, low_bits
from paceline.spec.compression.terngrad import TRITS

from . import native, reference
from .native import address, addresses

Function = TypeVar("Function", bound=Callable[..., Any])


#: elements whose places, and five more, fit a 32-bit number
_LARGE = (1 << 31) - 8


def backend(tensor: Tensor, fused: bool = True) -> str:
    """What runs for a tensor: "c", "compile" or "eager"."""
    if fused and native.serves(tensor):
        return "c"
    return "compile" if fused and tensor.device.type == "cuda" and tensor.numel() < _LARGE else "eager"


@cache
def _compiled(function: Function) -> Function:
    # sizes become symbols when a second one comes; settings such as bits per element stay numbers, which bit
    # operations need
    return cast(Function, torch.compile(function))


def _torch(function: Function, tensor: Tensor, fused: bool) -> Function:
    """The function as it is, or compiled for a GPU."""
    return _compiled(function) if backend(tensor, fused) == "compile" else function


def moments(x: Tensor, fused: bool = True) -> Tensor:
    """Sum of squares and largest magnitude, float64, both NaN if anything is not finite."""
    if backend(x, fused) != "c":
        return _torch(reference.moments, x, fused)(x)
    step = native.SHARE  # of fixed length: sums must not depend on how many threads there are
    parts = [(0.0, 0.0)] * max(1, -(-x.numel() // step))

    def part(lo: int, hi: int) -> None:
        for i in range(lo, hi):
            found = (c_double * 2)()
            _c("moments", address(x), c_int64(i * step), c_int64(min(x.numel(), (i + 1) * step)), found)
            parts[i] = found[0], found[1]

    native.share(len(parts), x.numel(), part)
    largest = float("nan") if any(m != m for _, m in parts) else max(m for _, m in parts)
    return torch.tensor([sum(q for q, _ in parts), largest], dtype=torch.float64)


def ternary_scaler(x: Tensor, clip: float, fused: bool = True) -> Tensor:
    """min(max |x|, clip * sigma about zero), one float32; infinite if anything is not finite."""
    how = backend(x, fused)
    if how == "compile":
        return _triton().ternary_scaler(x, clip)  # type: ignore[no-any-return]
    if how == "eager":
        return reference.ternary_scaler(x, clip)
    squares, largest = moments(x).tolist()
    scaler = min(largest, clip * math.sqrt(squares / x.numel())) if clip else largest
    return torch.tensor([scaler if math.isfinite(scaler) else math.inf], dtype=torch.float32)


def ternary_encode(x: Tensor, scale: Tensor, seed: int, fused: bool = True) -> Tensor:
    """Trits of x / scale, five to a byte."""
    how = backend(x, fused)
    if how == "compile":
        return _triton().ternary_encode(x, scale, reference.signed(seed))  # type: ignore[no-any-return]
    if how == "eager":
        return reference.ternary_encode(x, scale, reference.seed_tensor(seed, x.device))
    n = x.numel()
    out = torch.empty(-(-n // TRITS), dtype=torch.uint8)
    factor = c_float(scale.item())
    native.share(
        out.numel(),
        n,
        lambda lo, hi: _c(
            "ternary_encode",
            address(x),
            c_int64(n),
            c_int64(lo),
            c_int64(hi),
            factor,
            c_uint32(seed),
            address(out),
        ),
    )
    return out


def ternary_decode(payloads: Sequence[Tensor], factors: Tensor, out: Tensor, fused: bool = True) -> None:
    """The sum over ranks of factor times trit, into `out`; a single factor is everyone's, and trits are added
    up first.
    """
    n = out.numel()
    how = backend(out, fused)
    if how == "compile":
        _triton().ternary_decode(torch.stack(list(payloads)), factors.contiguous(), out)
        return
    if how == "eager":
        reference.ternary_decode(payloads, factors, out)
        return
    payloads = _checked(payloads, -(-n // TRITS))
    places, factors = addresses(payloads), factors.contiguous()
    native.share(
        payloads[0].numel(),
        n,
        lambda lo, hi: _c(
            "ternary_decode",
            places,
            c_int64(len(payloads)),
            address(factors),
            c_int(factors.numel() == 1),
            c_int64(n),
            c_int64(lo),
            c_int64(hi),
            address(out),
        ),
    )


def sign_encode(x: Tensor, error: Tensor | None, gain: float, fused: bool = True) -> tuple[Tensor, Tensor]:
    """Signs, and sums of either side and the count of negative ones: of x, or of `error` after `gain` times x
    was added to it.
    """
    if backend(x, fused) != "c":
        return _torch(reference.sign_encode, x, fused)(x, error, gain)
    n = x.numel()
    out = torch.empty(-(-n // 8), dtype=torch.uint8)
    parts: list[tuple[int, Any]] = []

    def part(lo: int, hi: int) -> None:
        found = (c_double * 3)()
        _c(
            "sign_encode",
            address(x),
            address(error),
            c_float(gain),
            c_int64(n),
            c_int64(lo),
            c_int64(hi),
            address(out),
            found,
        )
        parts.append((lo, found))

    native.share(out.numel(), n, part)
    # in the order of the parts, not of the threads: sums must not depend on who was first
    return out, torch.tensor(
        [list(found) for _, found in sorted(parts, key=lambda p: p[0])], dtype=torch.float64
    ).sum(dim=0)


def sign_feedback(error: Tensor, positive: Tensor, negative: Tensor, fused: bool = True) -> None:
    """Takes from `error` what its signs decode to."""
    if backend(error, fused) != "c":
        _torch(reference.sign_feedback, error, fused)(error, positive, negative)
        return
    p, q = c_float(positive.item()), c_float(negative.item())
    native.share(
        error.numel(),
        error.numel(),
        lambda lo, hi: _c("sign_feedback", address(error), c_int64(lo), c_int64(hi), p, q),
    )


def sign_decode(
    payloads: Sequence[Tensor],
    positive: Tensor,
    negative: Tensor,
    out: Tensor,
    vote: Tensor | None = None,
    fused: bool = True,
) -> None:
    """The sum over ranks of positive[r] or negative[r] as the bit says; with `vote`, the sign of that sum
    times it.
    """
    n = out.numel()
    if backend(out, fused) != "c":
        _torch(reference.sign_decode, out, fused)(payloads, positive, negative, vote, out)
        return
    payloads = _checked(payloads, -(-n // 8))
    places, positive, negative = addresses(payloads), positive.contiguous(), negative.contiguous()
    magnitude = c_float(0.0 if vote is None else vote.item())
    native.share(
        payloads[0].numel(),
        n,
        lambda lo, hi: _c(
            "sign_decode",
            places,
            c_int64(len(payloads)),
            address(positive),
            address(negative),
            c_int(vote is not None),
            magnitude,
            c_int64(n),
            c_int64(lo),
            c_int64(hi),
            address(out),
        ),
    )


def qsgd_encode(x: Tensor, scheme: QSGD, seed: int, fused: bool = True) -> tuple[Tensor, Tensor]:
    """Norms of buckets, and codes."""
    n, l2 = x.numel(), scheme.norm == "l2"
    full, rest = scheme.buckets(n)
    if backend(x, fused) != "c":
        encode = _torch(reference.qsgd_encode, x, fused)
        start, parts = full * scheme.bucket, []
        if full:
            parts.append(
                encode(x[:start], reference.seed_tensor(seed, x.device), scheme.bits, scheme.bucket, l2)
            )
        if rest:
            parts.append(
                reference.qsgd_encode(
                    x[start:], reference.seed_tensor(seed + start, x.device), scheme.bits, rest, l2
                )
            )
        return torch.cat([norms for norms, _ in parts]), torch.cat([codes for _, codes in parts])
    norms = torch.empty(full + bool(rest), dtype=torch.float32)
    codes = torch.empty(scheme.payload_bytes(n, 0) - 4 * norms.numel(), dtype=torch.uint8)
    native.share(
        norms.numel(),
        n,
        lambda lo, hi: _c(
            "qsgd_encode",
            address(x),
            c_int64(n),
            c_int64(scheme.bucket),
            c_int(scheme.bits),
            c_int(l2),
            c_int64(lo),
            c_int64(hi),
            c_uint32(seed),
            address(norms),
            address(codes),
        ),
    )
    return norms, codes


def qsgd_decode(
    norms: Sequence[Tensor], codes: Sequence[Tensor], scheme: QSGD, out: Tensor, fused: bool = True
) -> None:
    """The mean over ranks, into `out`."""
    n, ranks = out.numel(), len(codes)
    full, rest = scheme.buckets(n)
    if backend(out, fused) != "c":
        start, held = full * scheme.bucket, full * scheme.bucket * scheme.bits // 8
        if full:
            decode = _torch(reference.qsgd_decode, out, fused)
            decode(
                [c[:held] for c in codes], [v[:full] for v in norms], scheme.bits, scheme.bucket, out[:start]
            )
        if rest:
            reference.qsgd_decode(
                [c[held:] for c in codes], [v[full:] for v in norms], scheme.bits, rest, out[start:]
            )
        return
    count = full + bool(rest)
    norms, codes = _checked(norms, count), _checked(codes, scheme.payload_bytes(n, 0) - 4 * count)
    places, scales = addresses(codes), addresses(norms)
    native.share(
        count,
        n,
        lambda lo, hi: _c(
            "qsgd_decode",
            places,
            scales,
            c_int64(ranks),
            c_float(ranks),
            c_int64(n),
            c_int64(scheme.bucket),
            c_int(scheme.bits),
            c_int64(lo),
            c_int64(hi),
            address(out),
        ),
    )


def accumulate(
    x: Tensor,
    gain: Tensor,
    velocity: Tensor | None,
    momentum: float,
    nesterov: bool,
    total: Tensor,
    threshold: Tensor | None = None,
    room: int = 0,
    fused: bool = True,
) -> Tensor | None:
    """Adds a gradient to what is held back; with a threshold, finds what is then not below it in magnitude.

    Ascending int64 places; None: more than `room`, or no threshold.
    """
    if backend(x, fused) != "c":
        _torch(reference.accumulate, x, fused)(x, gain, velocity, momentum, nesterov, total)
        return None if threshold is None else above(total, threshold, room, fused)
    return _scan(x, gain.item(), velocity, momentum, nesterov, total, threshold, room)


def threshold(
    x: Tensor,
    gain: Tensor,
    velocity: Tensor | None,
    momentum: float,
    nesterov: bool,
    total: Tensor,
    stride: int,
    wanted: int,
    fused: bool = True,
) -> Tensor:
    """The `wanted`-th largest magnitude of every `stride`-th element of what `accumulate` would make of
    `total`; nothing is changed.
    """
    if backend(x, fused) != "c":
        sample, part = total[::stride].clone(), None if velocity is None else velocity[::stride].clone()
        reference.accumulate(x[::stride], gain, part, momentum, nesterov, sample)
        return sample.abs_().topk(wanted, sorted=False).values.min()
    room = torch.empty(-(-x.numel() // stride), dtype=torch.int32)
    return torch.tensor(
        _c(
            "threshold",
            address(x),
            c_float(gain.item()),
            address(velocity),
            c_float(momentum),
            c_int(nesterov),
            address(total),
            c_int64(x.numel()),
            c_int64(stride),
            c_int64(wanted),
            address(room),
        )
    )


def above(total: Tensor, threshold: Tensor, room: int, fused: bool = True) -> Tensor | None:
    """Places not below the threshold in magnitude (NaN included), ascending; None: more than `room`."""
    if backend(total, fused) == "c":
        return _scan(None, 0.0, None, 0.0, False, total, threshold, room)
    found = (~(total.abs() < threshold)).nonzero().reshape(-1)
    return found if found.numel() <= room else None


def _scan(
    x: Tensor | None,
    gain: float,
    velocity: Tensor | None,
    momentum: float,
    nesterov: bool,
    total: Tensor,
    threshold: Tensor | None,
    room: int,
) -> Tensor | None:
    limit = math.inf if threshold is None else threshold.item()
    parts: list[tuple[int, Tensor, int]] = []

    def part(lo: int, hi: int) -> None:
        found = torch.empty(room, dtype=torch.int32)
        one, other = (None if t is None else t[lo:hi] for t in (x, velocity))
        count = _c(
            "accumulate",
            address(one),
            c_float(gain),
            address(other),
            c_float(momentum),
            c_int(nesterov),
            address(total[lo:hi]),
            c_int64(hi - lo),
            c_float(limit),
            address(found),
            c_int64(room),
        )
        parts.append((lo, found, count))

    native.share(total.numel(), total.numel(), part)
    if threshold is None or sum(count for _, _, count in parts) > room:
        return None
    places = [
        found[:count].to(torch.int64).add_(lo) for lo, found, count in sorted(parts, key=lambda p: p[0])
    ]
    return torch.cat(places) if len(places) > 1 else places[0]


def sparse_encode(
    total: Tensor,
    masked: Tensor | None,
    places: Tensor | None,
    k: int,
    dtype: torch.dtype,
    fused: bool = True,
) -> list[Tensor]:
    """Takes the k totals that are largest in magnitude away: their values as they are sent, and their places
    in Elias-Fano code, low bits and unary high bits. They are looked for at some places, ascending, or
    everywhere; NaN is larger than all. `masked` becomes zero there."""
    n = total.numel()
    if backend(total, fused) != "c" or dtype != torch.float32:
        index = reference.largest(total, k) if places is None else places[reference.largest(total[places], k)]
        values = total[index].to(dtype)
        total[index] -= values.to(torch.float32)
        if masked is not None:
            masked[index] = 0.0
        return [values, *reference.indices_encode(index, n)]
    count = n if places is None else places.numel()
    sizes = index_bytes(n, k)
    room, values = torch.empty(count, dtype=torch.int32), torch.empty(k, dtype=torch.float32)
    lows, highs = (torch.empty(size, dtype=torch.uint8) for size in sizes)
    _c(
        "sparse_encode",
        address(total),
        address(masked),
        address(places),
        c_int64(count),
        c_int64(k),
        c_int(low_bits(n, k)),
        address(room),
        address(values),
        c_int64(sizes[0]),
        address(lows),
        c_int64(sizes[1]),
        address(highs),
    )
    return [values, lows, highs]


def sparse_decode(
    gathered: Sequence[Sequence[Tensor]], factor: float, out: Tensor, fused: bool = True
) -> None:
    """Adds `factor` times what `sparse_encode` made on each rank to `out`."""
    n, k = out.numel(), gathered[0][0].numel()
    if backend(out, fused) != "c":
        for sent, low, high in gathered:
            out.index_add_(0, reference.indices_decode(low, high, n, k), sent.to(torch.float32), alpha=factor)
        return
    sizes = index_bytes(n, k)
    values, lows, highs = (
        _checked([rank[i] for rank in gathered], size) for i, size in enumerate((k, *sizes))
    )
    values = [sent.to(torch.float32) for sent in values]
    whole = _c(
        "sparse_decode",
        addresses(values),
        addresses(lows),
        addresses(highs),
        c_int64(len(values)),
        c_int64(sizes[0]),
        c_int64(sizes[1]),
        c_int64(k),
        c_int(low_bits(n, k)),
        c_float(factor),
        c_int64(n),
        address(out),
    )
    if whole < len(values):
        raise DataError(f"indices of {k} of {n} elements arrived damaged from rank {whole}")


def clear(out: Tensor, fused: bool = True) -> None:
    """Zeros into `out`."""
    if backend(out, fused) != "c":
        out.zero_()
        return
    at, size = out.data_ptr(), out.element_size()
    native.share(out.numel(), out.numel(), lambda lo, hi: memset(at + size * lo, 0, size * (hi - lo)))


@cache
def _triton() -> Any:
    """Kernels that need a GPU to be imported."""
    from . import triton_kernels

    return triton_kernels


def _c(name: str, *arguments: Any) -> Any:
    return getattr(native.library(), name)(*arguments)


def _checked(payloads: Sequence[Tensor], size: int) -> list[Tensor]:
    """Contiguous, and as long as the C code will read."""
    for payload in payloads:
        if payload.numel() != size:
            raise DataError(
                f"a payload of {size} elements was expected; got {payload.numel()} (ranks must use the same"
                " compressor)"
            )
    return [payload.contiguous() for payload in payloads]
