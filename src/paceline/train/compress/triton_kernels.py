"""TernGrad on GPUs: a scaler, an encoder and a decoder in one launch each (two for the scaler). Imported only
where there is a GPU.

The same arithmetic as `reference.py`; see there for the layout of codes and for the random numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

    jit = triton.jit
except ImportError:  # no GPU build of torch: nothing here will be called

    def jit(function: Any = None, **_: Any) -> Any:
        """Leaves a kernel as it is."""
        return function if function is not None else jit


BLOCK = 1024
#: programs of the first reduction: enough to fill a large GPU several times, few enough for one program to
#: sum up
PARTS = 1024


@jit  # type: ignore[untyped-decorator, unused-ignore]
def _uniform(counter):  # type: ignore[no-untyped-def]
    h = counter
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    return ((h >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0


@jit  # type: ignore[untyped-decorator, unused-ignore]
def _moments(x, squares, largest, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    part, parts = tl.program_id(0), tl.num_programs(0)
    total = tl.zeros([BLOCK], tl.float32)
    top = tl.zeros([BLOCK], tl.float32)
    for start in range(part * BLOCK, n, parts * BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.abs(tl.load(x + i, mask=i < n, other=0.0))
        total += v * v
        top = tl.maximum(top, v)
    tl.store(squares + part, tl.sum(total, 0))
    tl.store(largest + part, tl.max(top, 0))


@jit  # type: ignore[untyped-decorator, unused-ignore]
def _scaler(squares, largest, out, n, clip, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, PARTS)
    total = tl.sum(tl.load(squares + i).to(tl.float64), 0)
    top = tl.max(tl.load(largest + i), 0)
    limit = (clip * tl.sqrt(total / n)).to(tl.float32)
    chosen = tl.where(clip > 0, tl.minimum(top, limit), top)
    # what is not finite makes the sum of squares infinite or NaN
    tl.store(out, tl.where(total < float("inf"), chosen, float("inf")))


@jit(do_not_specialize=["seed"])  # type: ignore[untyped-decorator, unused-ignore]
def _encode(x, scale, out, n, m, seed, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.load(scale)
    code = tl.zeros([BLOCK], tl.int32)
    weight = 1
    for j in tl.static_range(5):
        place = i + j * m
        v = tl.load(x + place, mask=(i < m) & (place < n), other=0.0)
        hit = (_uniform((place + seed).to(tl.uint32, bitcast=True)) * s < tl.abs(v)).to(tl.int32)
        code += weight * (tl.where(v < 0, -hit, hit) + 1)
        weight *= 3
    tl.store(out + i, code.to(tl.uint8), mask=i < m)


@jit  # type: ignore[untyped-decorator, unused-ignore]
def _decode(codes, factors, out, n, m, world, SHARED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.zeros([BLOCK], tl.float32)
    b, c, d, e = a, a, a, a
    row = codes + i
    for r in range(world):
        f = 1.0 if SHARED else tl.load(factors + r)
        v = tl.load(row, mask=i < m, other=0).to(tl.int32)
        row += m
        v1 = (v * 171) >> 9
        v2 = (v1 * 171) >> 9
        v3 = (v2 * 171) >> 9
        v4 = (v3 * 171) >> 9
        a += f * (v - 3 * v1 - 1).to(tl.float32)
        b += f * (v1 - 3 * v2 - 1).to(tl.float32)
        c += f * (v2 - 3 * v3 - 1).to(tl.float32)
        d += f * (v3 - 3 * v4 - 1).to(tl.float32)
        e += f * (v4 - 1).to(tl.float32)
    if SHARED:
        f = tl.load(factors)
        a, b, c, d, e = f * a, f * b, f * c, f * d, f * e
    tl.store(out + i, a, mask=(i < m) & (i < n))
    tl.store(out + i + m, b, mask=(i < m) & (i + m < n))
    tl.store(out + i + 2 * m, c, mask=(i < m) & (i + 2 * m < n))
    tl.store(out + i + 3 * m, d, mask=(i < m) & (i + 3 * m < n))
    tl.store(out + i + 4 * m, e, mask=(i < m) & (i + 4 * m < n))


def ternary_scaler(x: Tensor, clip: float) -> Tensor:
    """min(max |x|, clip * sigma), one float32; infinite if anything is not finite."""
    held = torch.empty(2 * PARTS + 1, dtype=torch.float32, device=x.device)
    squares, largest, out = held[:PARTS], held[PARTS:-1], held[-1:]
    _moments[(PARTS,)](x, squares, largest, x.numel(), BLOCK=BLOCK)
    _scaler[(1,)](squares, largest, out, x.numel(), float(clip), PARTS=PARTS)
    return out


def ternary_encode(x: Tensor, scale: Tensor, seed: int) -> Tensor:
    """Trits of x / scale, five to a byte; `seed` as a signed 32-bit number."""
    m = -(-x.numel() // 5)
    out = torch.empty(m, dtype=torch.uint8, device=x.device)
    _encode[(-(-m // BLOCK),)](x, scale, out, x.numel(), m, seed, BLOCK=BLOCK)
    return out


def ternary_decode(codes: Tensor, factors: Tensor, out: Tensor) -> None:
    """The sum over ranks (rows of `codes`) of factor times trit, into `out`; a single factor is
    everyone's.
    """
    world, m = codes.shape
    _decode[(-(-m // BLOCK),)](
        codes, factors, out, out.numel(), m, world, SHARED=factors.numel() == 1, BLOCK=BLOCK
    )
