"""Encoders and decoders in plain torch, for any device: what the fused ones must equal, and what
torch.compile fuses on GPUs.

Codes lie in streams: with w codes to a byte and m bytes, code j of byte i belongs to element j m + i. Random
numbers are a hash of a seed plus the element's place, so that every implementation draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.spec.compression.sparse import low_bits
from paceline.spec.compression.terngrad import TRITS


def signed(value: int) -> int:
    """A 32-bit pattern as torch's int32 holds it."""
    return value - (1 << 32) if value >= 1 << 31 else value


#: constants of murmur3's finaliser
_FIRST, _SECOND = signed(0x85EBCA6B), signed(0xC2B2AE35)


def mix(h: Tensor) -> Tensor:
    """32 well mixed bits of an int32 counter; shifts are of unsigned numbers."""
    h = (h ^ ((h >> 16) & 0xFFFF)) * _FIRST
    h = (h ^ ((h >> 13) & 0x7FFFF)) * _SECOND
    return h ^ ((h >> 16) & 0xFFFF)


def uniform(counter: Tensor) -> Tensor:
    """Float32 in [0, 1) with 23 bits, of an int32 counter."""
    return ((mix(counter) >> 9) & 0x7FFFFF).to(torch.float32) * 2.0**-23


def seed_tensor(seed: int, device: torch.device) -> Tensor:
    """A 32-bit seed where the data is, without a transfer."""
    return torch.full((), signed(seed & 0xFFFFFFFF), dtype=torch.int32, device=device)


def counters(start: int, count: int, seed: Tensor) -> Tensor:
    """Seed plus place of `count` elements."""
    wide = torch.int32 if start + count < 1 << 31 else torch.int64
    return torch.arange(start, start + count, dtype=wide, device=seed.device).to(torch.int32) + seed


def moments(x: Tensor) -> Tensor:
    """Sum of squares and largest magnitude, float64; anything that is not finite makes both NaN."""
    largest = x.abs().amax().double()
    squares = x.double().square().sum() if x.device.type == "cpu" else x.square().sum().double()
    return torch.stack([squares, largest]) + (largest - largest)


# ---- TernGrad


def ternary_scaler(x: Tensor, clip: float) -> Tensor:
    """min(max |x|, clip * sigma about zero), one float32; infinite if anything is not finite, since a maximum
    over ranks may lose a NaN.
    """
    squares, largest = moments(x).unbind()
    limit = clip * (squares / x.numel()).sqrt() if clip else largest
    return torch.nan_to_num(
        torch.minimum(largest, limit).to(torch.float32), nan=float("inf"), posinf=float("inf")
    ).reshape(1)


def ternary_encode(x: Tensor, scale: Tensor, seed: Tensor) -> Tensor:
    """Trits of x / scale, rounded at random, five to a byte."""
    m = -(-x.numel() // TRITS)
    codes = torch.zeros((), dtype=torch.int32, device=x.device)
    for j in range(TRITS):
        part = x[j * m : (j + 1) * m]
        hit = (uniform(counters(j * m, part.numel(), seed)) * scale < part.abs()).to(torch.int32)
        trits = torch.where(part < 0, -hit, hit) + 1
        if part.numel() < m:
            trits = F.pad(trits, (0, m - part.numel()), value=1)
        codes = codes + trits * 3**j
    return codes.to(torch.uint8)


def ternary_decode(payloads: Sequence[Tensor], factors: Tensor, out: Tensor) -> None:
    """The sum over ranks of factor times trit, into `out`; a single factor is everyone's, and trits are added
    up first.
    """
    powers = torch.tensor([3**j for j in range(TRITS)], dtype=torch.int32, device=factors.device)[:, None]
    trits = ((payload.to(torch.int32)[None, :] // powers % 3 - 1).to(torch.float32) for payload in payloads)
    zero = torch.zeros((), dtype=torch.float32, device=factors.device)
    total = (
        factors * sum(trits, zero)
        if factors.numel() == 1
        else sum((f * t for f, t in zip(factors.unbind(), trits, strict=True)), zero)
    )
    out.copy_(total.reshape(-1)[: out.numel()])


# ---- signs


def sign_pack(x: Tensor) -> Tensor:
    """One bit per element, set where it is negative."""
    m = -(-x.numel() // 8)
    codes = torch.zeros((), dtype=torch.int32, device=x.device)
    for j in range(8):
        part = x[j * m : (j + 1) * m]
        bits = (part < 0).to(torch.int32)
        if part.numel() < m:
            bits = F.pad(bits, (0, m - part.numel()))
        codes = codes + bits * 2**j
    return codes.to(torch.uint8)


def sign_sums(x: Tensor) -> Tensor:
    """Sums of the elements from zero up and of those below, and how many are below, float64."""
    below = x < 0
    wide = x.double()
    return torch.stack(
        [wide.masked_fill(below, 0).sum(), wide.masked_fill(~below, 0).sum(), below.sum().double()]
    )


def sign_encode(x: Tensor, error: Tensor | None, gain: float) -> tuple[Tensor, Tensor]:
    """Signs and sums of x, or of `error` after `gain` times x was added to it."""
    value = x if error is None else error.add_(x * gain)
    return sign_pack(value), sign_sums(value)


def sign_feedback(error: Tensor, positive: Tensor, negative: Tensor) -> None:
    """Takes from `error` what its signs decode to."""
    error.sub_(torch.where(error < 0, negative, positive))


def sign_decode(
    payloads: Sequence[Tensor], positive: Tensor, negative: Tensor, vote: Tensor | None, out: Tensor
) -> None:
    """The sum over ranks of positive[r] or negative[r], as the bit says; with `vote`, the sign of that sum
    times it.
    """
    shifts = torch.arange(8, dtype=torch.int32, device=positive.device)[:, None]
    total = torch.zeros((), dtype=torch.float32, device=positive.device)
    for payload, p, q in zip(payloads, positive.unbind(), negative.unbind(), strict=True):
        total = total + torch.where(((payload.to(torch.int32)[None, :] >> shifts) & 1) != 0, q, p)
    out.copy_((total if vote is None else total.sign() * vote).reshape(-1)[: out.numel()])


# ---- QSGD


def qsgd_encode(x: Tensor, seed: Tensor, bits: int, bucket: int, l2: bool) -> tuple[Tensor, Tensor]:
    """Norms and codes of a tensor of whole buckets, or of one shorter bucket (`bucket` is then its size)."""
    levels, per = 2 ** (bits - 1) - 1, 8 // bits
    rows = x.reshape(-1, bucket)
    largest = rows.abs().amax(dim=1)
    norms = torch.linalg.vector_norm(rows, dim=1) if l2 else largest
    norms = norms + (largest - largest)  # NaN where anything is not finite
    rate = torch.where(norms > 0, levels / norms, torch.zeros_like(norms))
    drawn = uniform(counters(0, x.numel(), seed)).reshape(rows.shape)
    level = (rows.abs() * rate[:, None] + drawn).to(torch.int32).clamp(max=levels)
    codes = level + (rows < 0).to(torch.int32) * (levels + 1)
    m = -(-bucket // per)
    codes = F.pad(codes, (0, m * per - bucket)).reshape(-1, per, m)
    packed = torch.zeros((), dtype=torch.int32, device=x.device)
    for j in range(per):
        packed = packed + codes[:, j] * 2 ** (bits * j)
    return norms, packed.to(torch.uint8).reshape(-1)


def qsgd_decode(
    codes: Sequence[Tensor], norms: Sequence[Tensor], bits: int, bucket: int, out: Tensor
) -> None:
    """The mean over ranks of whole buckets, or of one shorter bucket, into `out`."""
    levels = 2 ** (bits - 1) - 1
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=norms[0].device)[None, :, None]
    total = torch.zeros((), dtype=torch.float32, device=norms[0].device)
    for packed, norm in zip(codes, norms, strict=True):
        code = (packed.to(torch.int32).reshape(norm.numel(), 1, -1) >> shifts) & (2**bits - 1)
        level = code & levels
        signed = (
            torch.where(code > levels, -level, level).to(torch.float32).reshape(norm.numel(), -1)[:, :bucket]
        )
        total = total + (norm / (levels * len(codes)))[:, None] * signed
    out.copy_(total.reshape(-1))


# ---- sparse


def accumulate(
    x: Tensor, gain: Tensor, velocity: Tensor | None, momentum: float, nesterov: bool, total: Tensor
) -> None:
    """total += gain * x; with `velocity`, momentum first."""
    step = x * gain
    if velocity is None:
        total.add_(step)
    elif nesterov:
        velocity.copy_(momentum * (velocity + step))
        total.add_(velocity + step)
    else:
        velocity.copy_(momentum * velocity + step)
        total.add_(velocity)


def largest(total: Tensor, k: int) -> Tensor:
    """Places of the k largest in magnitude, ascending; NaN is larger than all."""
    values = total.abs()
    found = values.topk(k, sorted=False)
    if values.is_meta:
        return found.indices
    chosen = (~(values < found.values.min())).nonzero().reshape(-1)
    return chosen if chosen.numel() == k else found.indices.sort().values  # ties, or NaN


def bits_pack(bits: Tensor) -> Tensor:
    """Zeros and ones, eight to a byte, the first in the lowest bit."""
    padded = F.pad(bits.to(torch.int32), (0, -bits.numel() % 8)).reshape(-1, 8)
    return (padded << torch.arange(8, dtype=torch.int32, device=bits.device)).sum(dim=1).to(torch.uint8)


def bits_unpack(packed: Tensor, count: int) -> Tensor:
    """What `bits_pack` packed."""
    return (
        (packed.to(torch.int32)[:, None] >> torch.arange(8, dtype=torch.int32, device=packed.device)) & 1
    ).reshape(-1)[:count]


def indices_encode(index: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Low bits and unary high bits of ascending int64 indices below n (Elias-Fano)."""
    k = index.numel()
    low = low_bits(n, k)
    shifts = torch.arange(low, device=index.device)
    lows = bits_pack(((index[:, None] >> shifts) & 1).reshape(-1))
    high = torch.zeros(k + ((n - 1) >> low) + 1, dtype=torch.int32, device=index.device)
    high[(index >> low) + torch.arange(k, device=index.device)] = 1
    return lows, bits_pack(high)


def indices_decode(lows: Tensor, highs: Tensor, n: int, k: int) -> Tensor:
    """Int64 indices that `indices_encode` encoded."""
    low = low_bits(n, k)
    shifts = torch.arange(low, device=lows.device)
    rest = (bits_unpack(lows, k * low).reshape(k, low).to(torch.int64) << shifts).sum(dim=1)
    ones = bits_unpack(highs, highs.numel() * 8).nonzero().reshape(-1)[:k]
    return ((ones - torch.arange(k, device=lows.device)) << low) | rest


def strata(n: int, k: int, seed: Tensor) -> tuple[Tensor, Tensor]:
    """k different int64 places below n, ascending: one drawn from each of k ranges of nearly equal size; and
    the sizes of the ranges.
    """
    edges = torch.arange(k + 1, dtype=torch.int64, device=seed.device) * n // k
    sizes = edges[1:] - edges[:-1]
    drawn = mix(counters(0, k, seed)).to(torch.int64) & 0xFFFFFFFF
    return edges[:-1] + drawn % sizes, sizes
