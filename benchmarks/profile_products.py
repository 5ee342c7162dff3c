"""Time matrix products of low precision, structured sparsity and groups on a CUDA device.

    python benchmarks/profile_products.py --out products.jsonl.gz

One line per shape and kind: seconds of the product and, where operands must be converted first, of the
conversion (cast and scale for 8-bit floats, compression for 2:4 sparsity). The median of repetitions between
which the L2 cache is flushed. Needs torch alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

E4M3 = torch.float8_e4m3fn
#: rows, reduction and columns of products as transformers have them, a few odd ones among them
SHAPES = [
    (m, k, n)
    for m in (1024, 4096, 16384)
    for k, n in ((1024, 4096), (2048, 8192), (4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192))
] + [(2048, 2880, 5760), (8192, 1152, 4608), (512, 4096, 4096), (32768, 768, 3072)]
#: experts, tokens for each on average, width and inner width
GROUPS = [
    (8, 512, 2048, 4096),
    (8, 2048, 4096, 14336),
    (64, 128, 2048, 768),
    (64, 512, 2048, 1024),
    (128, 64, 4096, 1536),
]


def seconds(run: Callable[[], Any], flush: torch.Tensor, repeats: int = 15) -> float:
    """Median over repetitions, the cache emptied before each."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def per_tensor(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax().float() / 448
    return (x / scale).to(E4M3), scale


def per_row(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(1, keepdim=True).float() / 448
    return (x / scale).to(E4M3), scale


def per_block(x: torch.Tensor, high: int, wide: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    parts = x.reshape(rows // high, high, columns // wide, wide)
    scale = parts.abs().amax((1, 3), keepdim=True).float() / 448
    return (parts / scale).to(E4M3).reshape(x.shape), scale[:, 0, :, 0]


def tensorwise(a: torch.Tensor, b: torch.Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    cast = torch.compile(per_tensor)
    (x, sx), (y, sy) = cast(a), cast(b)
    return (lambda: torch._scaled_mm(x, y.t(), sx, sy, out_dtype=torch.bfloat16)), (lambda: cast(a))


def rowwise(a: torch.Tensor, b: torch.Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    cast = torch.compile(per_row)
    (x, sx), (y, sy) = cast(a), cast(b)
    return (lambda: torch._scaled_mm(x, y.t(), sx, sy.t(), out_dtype=torch.bfloat16)), (lambda: cast(a))


def blockwise(a: torch.Tensor, b: torch.Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    cast = torch.compile(per_block)
    x, sx = cast(a, 1, 128)
    y, sy = cast(b, 128, 128)
    sx, sy = sx.t().contiguous().t(), sy.t().contiguous()
    return (lambda: torch._scaled_mm(x, y.t(), sx, sy, out_dtype=torch.bfloat16)), (lambda: cast(a, 1, 128))


def semi_structured(a: torch.Tensor, b: torch.Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    keep = torch.tensor([1, 1, 0, 0], device="cuda", dtype=a.dtype).tile(b.shape[0], b.shape[1] // 4)
    pruned = b * keep
    sparse = torch.sparse.to_sparse_semi_structured(pruned)
    return (lambda: torch.nn.functional.linear(a, sparse)), (
        lambda: torch.sparse.to_sparse_semi_structured(pruned)
    )


def dense(a: torch.Tensor, b: torch.Tensor) -> tuple[Callable[[], Any], None]:
    return (lambda: a @ b.t()), None


KINDS: dict[str, Callable[..., Any]] = {
    "bf16": dense,
    "fp8-tensorwise": tensorwise,
    "fp8-rowwise": rowwise,
    "fp8-blockwise": blockwise,
    "bf16-2:4": semi_structured,
}


def products(flush: torch.Tensor) -> Iterator[dict[str, Any]]:
    for m, k, n in SHAPES:
        a, b = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (n, k)))
        for kind, make in KINDS.items():
            row = {"kind": kind, "m": m, "k": k, "n": n}
            try:
                product, convert = make(a, b)
                row["product_s"] = seconds(product, flush)
                if convert:
                    row["convert_s"] = seconds(convert, flush)
            except Exception as error:  # a shape or kind that this build refuses is a finding too
                row["refused"] = f"{type(error).__name__}: {str(error)[:160]}"
            yield row


def groups(flush: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Products of experts in one kernel and one by one, with even loads and with loads of a power law."""
    for experts, mean, width, inner in GROUPS:
        weights = torch.randn(experts, width, inner, device="cuda", dtype=torch.bfloat16)
        for skew in (0.0, 0.5, 1.0):
            loads = torch.arange(1, experts + 1, dtype=torch.float64) ** -skew
            counts = (loads / loads.sum() * experts * mean / 16).round().clamp(min=1).to(torch.int32) * 16
            ends = counts.cumsum(0).to(torch.int32).cuda()
            tokens = torch.randn(int(counts.sum()), width, device="cuda", dtype=torch.bfloat16)
            parts = tokens.split(counts.tolist())
            row = {
                "experts": experts,
                "mean": mean,
                "width": width,
                "inner": inner,
                "skew": skew,
                "tokens": len(tokens),
            }
            together = partial(torch._grouped_mm, tokens, weights, offs=ends)
            yield {"kind": "grouped", **row, "product_s": seconds(together, flush)}
            yield {"kind": "one-by-one", **row, "product_s": seconds(partial(apart, parts, weights), flush)}


def apart(parts: tuple[torch.Tensor, ...], weights: torch.Tensor) -> list[torch.Tensor]:
    return [part @ weight for part, weight in zip(parts, weights, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    with gzip.open(args.out, "wt") as out:
        for source in (groups, products):
            for row in source(flush):
                out.write(json.dumps(row) + "\n")
                print(row, flush=True)


if __name__ == "__main__":
    main()
