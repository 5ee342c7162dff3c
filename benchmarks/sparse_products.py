"""Time products whose weights are pruned 2:4 beside dense ones on a CUDA device.

    python benchmarks/sparse_products.py --out sparse_products.jsonl
    python benchmarks/sparse_products.py --parts packing eager fp16

One line per shape, type and kind: `device_s`, the seconds of the product on the device alone, and `call_s`,
the seconds from one eager call to the next. The calls of `device_s` wait behind a long kernel, so that the
host has issued them all before the first one starts; the L2 cache is flushed before each. Both are medians.

    dense                    torch.nn.functional.linear
    cusparselt-transposed    the bare product of cuSPARSELt with the fastest algorithm that a search finds
    cusparselt-first         the same with its first algorithm
    eager                    torch.nn.functional.linear with a SparseSemiStructuredTensor
    packing                  compress_s: pruned weights are packed; prune_s: both orientations are pruned and
                             packed, as training needs after each update

Each part runs in a process of its own: a product that a library breaks down on takes its process with it (a
search in fp16 did, cuSPARSELt 0.8). CUTLASS kernels of torch are for compute capability 8.x alone. Needs
torch alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

warnings.filterwarnings("ignore", message=".*SparseSemiStructuredTensor is in prototype.*")
#: inputs and outputs of layers as transformers and their MLPs have them
WEIGHTS = ((768, 3072), (1024, 4096), (4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (8192, 28672))
#: rows of activations: a few as in decoding, up to those of a training step
ROWS = (16, 128, 512, 2048, 8192, 16384)
#: those of eager calls, and in fp16
SOME_ROWS = (128, 2048, 8192)
#: cycles of the kernel that the host gets ahead behind: some 4 ms
AHEAD_CYCLES = 8_000_000
REPEATS = 15
Call = Callable[[], Any]


def device_seconds(call: Call, flush: torch.Tensor) -> float:
    """Median time of a call on the device, without the host's."""
    times: list[float] = []
    for _ in range(REPEATS):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def call_seconds(call: Call) -> float:
    """Median over rounds of the time between eager calls, one after the other."""
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / 10)
    return statistics.median(times)


def pruned(weights: torch.Tensor) -> torch.Tensor:
    """The two largest of every four weights along the inputs, zeros for the others."""
    fours = weights.reshape(-1, 4)
    kept = fours.abs().topk(2, dim=1).indices
    mask = torch.zeros_like(fours).scatter_(1, kept, 1)
    return (fours * mask).reshape(weights.shape)


def dense(x: torch.Tensor, weights: torch.Tensor) -> Call:
    return partial(linear, x, weights)


def transposed(x: torch.Tensor, weights: torch.Tensor, search: bool = True) -> Call:
    """The bare product, which writes its result transposed: no copy behind it."""
    packed = torch._cslt_compress(weights)
    best = int(torch._cslt_sparse_mm_search(packed, x.t(), transpose_result=True)) if search else 0
    return partial(torch._cslt_sparse_mm, packed, x.t(), transpose_result=True, alg_id=best)


def eager(x: torch.Tensor, weights: torch.Tensor) -> Call:
    return partial(linear, x, torch.sparse.SparseSemiStructuredTensorCUSPARSELT.from_dense(weights))


Make = Callable[[torch.Tensor, torch.Tensor], Call]
SEARCHED: dict[str, Make] = {"cusparselt-transposed": transposed}
EAGER: dict[str, Make] = {"cusparselt-first": partial(transposed, search=False), "eager": eager}


def measured(call: Call, flush: torch.Tensor) -> dict[str, float]:
    for _ in range(3):
        call()
    return {"device_s": device_seconds(call, flush), "call_s": call_seconds(call)}


def products(
    flush: torch.Tensor, rows: tuple[int, ...], dtype: torch.dtype, kinds: dict[str, Make]
) -> Iterator[dict[str, Any]]:
    for (inputs, outputs), samples in itertools.product(WEIGHTS, rows):
        x = torch.randn(samples, inputs, device="cuda", dtype=dtype)
        weights = torch.randn(outputs, inputs, device="cuda", dtype=dtype)
        about = {"rows": samples, "inputs": inputs, "outputs": outputs, "dtype": str(dtype).split(".")[1]}
        yield {**about, "kind": "dense", **measured(dense(x, weights), flush)}
        sparse = pruned(weights)
        reference = linear(x, sparse).float()
        for kind, make in kinds.items():
            row: dict[str, Any] = {**about, "kind": kind}
            try:
                call = make(x, sparse)
                off = (call().float() - reference).norm() / reference.norm()
                row |= {**measured(call, flush), "relative_error": float(off)}
            except Exception as error:  # what this build or device refuses is a finding too
                row["refused"] = f"{type(error).__name__}: {str(error)[:160]}"
            yield row


def packing(flush: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Seconds to pack weights, and to prune and pack both orientations of them."""
    for inputs, outputs in WEIGHTS:
        weights = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
        row: dict[str, Any] = {"kind": "packing", "inputs": inputs, "outputs": outputs}
        both = partial(torch._sparse_semi_structured_tile, weights, use_cutlass=False)
        calls: dict[str, Call] = {
            "compress_s": partial(torch._cslt_compress, pruned(weights)),
            "prune_s": both,
        }
        for name, call in calls.items():
            try:
                call()
                row[name] = device_seconds(call, flush)
            except Exception as error:
                row["refused"] = f"{name}: {type(error).__name__}: {str(error)[:160]}"
        yield row


def about_device() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "kind": "about",
        "device": properties.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cusparselt": torch.backends.cusparselt.version(),
    }


PARTS: dict[str, Callable[[torch.Tensor], Iterator[dict[str, Any]]]] = {
    "packing": packing,
    "bf16": partial(products, rows=ROWS, dtype=torch.bfloat16, kinds=SEARCHED),
    "eager": partial(products, rows=SOME_ROWS, dtype=torch.bfloat16, kinds=EAGER),
    "fp16": partial(products, rows=SOME_ROWS, dtype=torch.float16, kinds=EAGER),
}


def run_part(part: str, out: Path) -> None:
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    with out.open("a", encoding="utf-8") as file:
        for row in PARTS[part](flush):
            file.write(json.dumps(row) + "\n")
            file.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = Path(os.environ.get("OUT", ".")) / "sparse_products.jsonl"
    parser.add_argument("--out", type=Path, default=usual)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--here", action="store_true", help="in this process; appends to the file")
    args = parser.parse_args()
    if args.here:
        for part in args.parts:
            run_part(part, args.out)
        return
    args.out.write_text(json.dumps(about_device()) + "\n", encoding="utf-8")
    for part in args.parts:
        began = time.perf_counter()
        command = [sys.executable, __file__, "--here", "--out", str(args.out), "--parts", part]
        code = subprocess.run(command, check=False).returncode
        print(f"{part}: {time.perf_counter() - began:.0f} s, exit code {code}", flush=True)


if __name__ == "__main__":
    main()
