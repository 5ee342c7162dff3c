"""Operators made from sizes, without a captured module: what a linear layer, a norm or attention runs.

Backward passes are operators of their own, in the layouts autograd gives them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.spec.workload import ITEMSIZE, Access, Op


def make_op(
    name: str,
    kind: str,
    dtype: str,
    reads: Sequence[float],
    writes: Sequence[float],
    dims: tuple[int, ...],
    flops: float = 0.0,
    tags: tuple[str, ...] = (),
    phase: str = "forward",
) -> Op:
    """An operator from the bytes of each tensor it reads and writes, none of them used before."""
    accesses = [tuple(Access(i, int(size)) for i, size in enumerate(sizes)) for sizes in (reads, writes)]
    return Op(name, kind, phase, "", dtype, flops, accesses[0], accesses[1], dims, tags)


def gemm(b: int, m: int, n: int, k: int, dtype: str, layout: str = "tt", bias: bool = False) -> Op:
    """(b, m, k) x (b, k, n); in layout "tt" both operands are contiguous in k, as in a linear layer's forward
    pass.
    """
    size = ITEMSIZE[dtype]
    leads = {"t": k, "n": m}[layout[0]], {"t": k, "n": n}[layout[1]], n
    align = math.gcd(*leads, 16)
    return make_op(
        "aten.mm",
        "gemm",
        dtype,
        [b * m * k * size, b * k * n * size, *([n * size] if bias else [])],
        [b * m * n * size],
        (b, m, n, k),
        2.0 * b * m * n * k,
        (layout, f"align{align}"),
    )


def linear(tokens: int, inputs: int, outputs: int, dtype: str) -> tuple[list[Op], list[Op]]:
    """Forward and backward operators of a linear layer with bias."""
    size = ITEMSIZE[dtype]
    forward = [gemm(1, tokens, outputs, inputs, dtype, bias=True)]
    backward = [
        gemm(1, tokens, inputs, outputs, dtype, "tn"),
        gemm(1, outputs, inputs, tokens, dtype, "nn"),
        make_op(
            "aten.sum",
            "reduce",
            dtype,
            [tokens * outputs * size],
            [outputs * size],
            (outputs, tokens),
            tags=("outer",),
        ),
    ]
    return forward, backward


def pointwise(elements: int, dtype: str, inputs: int = 1, outputs: int = 1, tags: tuple[str, ...] = ()) -> Op:
    """One contiguous pointwise kernel."""
    size = ITEMSIZE[dtype]
    return make_op(
        "aten.pointwise",
        "elementwise",
        dtype,
        [elements * size] * inputs,
        [elements * size] * outputs,
        (elements,),
        tags=tags,
    )


def norm(rows: int, cols: int, dtype: str, backward: bool = False, rms: bool = False) -> Op:
    """Layer norm (or RMS norm) over rows."""
    size = ITEMSIZE[dtype] * rows * cols
    tags = (("backward", "weights") if backward else ("forward",)) + (("rms",) if rms else ())
    return make_op(
        "aten.norm", "norm", dtype, [size] * (2 if backward else 1), [size], (rows, cols), tags=tags
    )


def softmax(rows: int, cols: int, dtype: str, backward: bool = False) -> Op:
    size = ITEMSIZE[dtype] * rows * cols
    tags = ("backward" if backward else "forward", "inner")
    return make_op(
        "aten._softmax", "softmax", dtype, [size] * (2 if backward else 1), [size], (rows, cols), tags=tags
    )


def attention(
    b: int, heads: int, sq: int, sk: int, d: int, dtype: str, causal: bool, backward: bool = False
) -> Op:
    size = ITEMSIZE[dtype] * b * heads * d
    flops = (5 if backward else 2) * 2.0 * b * heads * sq * sk * d * (0.5 if causal and sq == sk else 1.0)
    tags = ("backward" if backward else "forward", *(("causal",) if causal else ()))
    reads = [size * sq, size * sk, size * sk] + ([size * sq] * 2 if backward else [])
    writes = [size * sq] + ([size * sk] * 2 if backward else [])
    return make_op(
        "aten.scaled_dot_product_attention",
        "attention",
        dtype,
        reads,
        writes,
        (b, heads, heads, sq, sk, d, d),
        flops,
        tags,
    )


def conv(
    n: int,
    c: int,
    k: int,
    groups: int,
    side: int,
    kernel: int,
    stride: int,
    padding: int,
    dtype: str,
    which: str,
    layout: str,
) -> Op:
    out = (side + 2 * padding - kernel) // stride + 1
    size = ITEMSIZE[dtype]
    dims = (n, c, k, groups, side * side, out * out, kernel * kernel, stride)
    x, y, w = n * c * side * side * size, n * k * out * out * size, k * c // groups * kernel * kernel * size
    reads, writes = {"fprop": ([x, w], [y]), "dgrad": ([y, w], [x]), "wgrad": ([y, x], [w])}[which]
    return make_op(
        "aten.convolution",
        "conv",
        dtype,
        reads,
        writes,
        dims,
        2.0 * n * out * out * k * (c // groups) * kernel**2,
        (which, layout),
    )
