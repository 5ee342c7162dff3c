"""Single-operator measurements: each row as the operators it ran.

h200/ops.jsonl            our own microbenchmarks of one H200
kernels/*.csv.gz          FP32 operators on six GPUs (sitar-lab/NeuSight)
kernels_fp16/*/*.csv.gz   FP16 transformer operators on A100 and GH200 (DebarghaG/estimate-train-time)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.cost.make import attention, conv, gemm, linear, make_op, norm, pointwise, softmax
from paceline.spec.workload import ITEMSIZE, Op

Row = Mapping[str, Any]


# -- h200/ops.jsonl ------------------------------------------------------------------------------

#: pointwise rows: (tensors read, tensors written)
_POINTWISE = {"add": (2, 1), "relu": (1, 1), "gelu": (1, 1)}
_CAST = {"bf16": "fp32", "fp32": "bf16"}


def h200_op(row: Row) -> dict[str, list[Op]]:
    """Operators per measured column of a row; columns with a fixed meaning and no operator are left out."""
    op, dtype = row["op"], row.get("dtype", "")
    if op == "gemm":
        return {"s": [gemm(1, row["m"], row["n"], row["k"], dtype)]}
    if op == "bmm":
        return {"s": [gemm(row["b"], row["m"], row["n"], row["k"], dtype, "tn")]}
    if op in _POINTWISE:
        return {"s": [pointwise(row["n"], dtype, *_POINTWISE[op], tags=("math",) if op == "gelu" else ())]}
    if op in ("copy", "fill", "cast", "sum"):
        return {"s": [_simple(op, row["n"], dtype)]}
    if op in ("layer_norm", "rms_norm"):
        rms = op == "rms_norm"
        return {
            "fwd_s": [norm(row["rows"], row["cols"], dtype, rms=rms)],
            "bwd_s": [norm(row["rows"], row["cols"], dtype, True, rms)],
        }
    if op == "softmax":
        gradient = pointwise(row["rows"] * row["cols"], dtype, 2)
        return {
            "fwd_s": [softmax(row["rows"], row["cols"], dtype)],
            "bwd_s": [gradient, softmax(row["rows"], row["cols"], dtype, True)],
        }
    if op == "sdpa":
        shape = (row["b"], row["heads"], row["seq"], row["seq"], row["dim"], dtype, bool(row["causal"]))
        return {"fwd_s": [attention(*shape)], "bwd_s": [attention(*shape, backward=True)]}
    if op == "conv2d":
        shape2 = (
            row["b"],
            row["cin"],
            row["cout"],
            row.get("groups", 1),
            row["hw"],
            row["k"],
            row["stride"],
            row["pad"],
            dtype,
        )
        return {
            column: [conv(*shape2, which, "nhwc")]
            for column, which in (("fwd_s", "fprop"), ("bwd_x_s", "dgrad"), ("bwd_w_s", "wgrad"))
        }
    return {}


def _simple(op: str, n: int, dtype: str) -> Op:
    size = ITEMSIZE[dtype] * n
    if op == "copy":
        return make_op("aten.copy_", "copy", dtype, [size], [size], (n,))
    if op == "fill":
        return make_op("aten.fill_", "fill", dtype, [], [size], (n,))
    if op == "sum":
        return make_op("aten.sum", "reduce", dtype, [size], [ITEMSIZE[dtype]], (1, n), tags=("inner",))
    return make_op("aten._to_copy", "cast", dtype, [size], [ITEMSIZE[_CAST[dtype]] * n], (n,))


# -- kernels/ ------------------------------------------------------------------------------------

_BINARY = frozenset(("add", "mul", "div", "pow"))


def fp32_kernel(row: Row) -> list[Op]:
    """Operators of a row of `kernels/`: linear and bmm are (B, M, N) x (N, K), as the script that took them
    has it.
    """
    op = row["OPName"]
    size = {
        k: int(float(v))
        for k, v in row.items()
        if k not in ("OPName", "Device", "Latency", "large") and v not in ("", None)
    }
    if op == "linear":
        return [gemm(1, size["B"] * size["M"], size["K"], size["N"], "fp32", bias=True)]
    if op == "bmm":
        return [gemm(size["B"], size["M"], size["K"], size["N"], "fp32", "tn")]
    if op == "conv":
        return [
            conv(
                size["B"],
                size["Input_Channel"],
                size["Output_Channel"],
                1,
                size["Input_Size"],
                size["Kernel_Szie"],
                size["Stride"],
                size["Padding"],
                "fp32",
                "fprop",
                "nchw",
            )
        ]
    if op == "ln":
        return [norm(size["B"], size["H"], "fp32")]
    if op == "softmax":
        return [softmax(size["B"], size["H"], "fp32")]
    return [pointwise(size["B"] * size["H"], "fp32", 2 if op in _BINARY else 1)]


# -- kernels_fp16/ -------------------------------------------------------------------------------

Pair = tuple[list[Op], list[Op]]
VOCABULARY = 50257


def fp16_kernel(operator: str, row: Row) -> Pair | None:
    """Forward and backward operators of a row of `kernels_fp16/`; None for operators whose make-up the source
    does not give.

    `mp` is the tensor-parallel degree, b the micro-batch, l the sequence, dim the width, h the heads.
    """
    s = {
        k: int(float(v)) for k, v in row.items() if k in ("mp", "b", "h", "l", "dim") and v not in ("", None)
    }
    mp, tokens = s.get("mp", 1), s.get("b", 1) * s.get("l", 1)
    dim, heads = s.get("dim", 0), max(1, s.get("h", 1) // mp)
    makers: dict[str, Callable[[], Pair]] = {
        "linear1": lambda: linear(tokens, dim, 3 * dim // mp, "fp16"),
        "linear2": lambda: linear(tokens, dim // mp, dim, "fp16"),
        "linear3": lambda: linear(tokens, dim, 4 * dim // mp, "fp16"),
        "linear4": lambda: linear(tokens, 4 * dim // mp, dim, "fp16"),
        "linear_final": lambda: linear(tokens, dim, -(-VOCABULARY // (128 * mp)) * 128, "fp16"),
        "layernorm": lambda: ([norm(tokens, dim, "fp16")], [norm(tokens, dim, "fp16", True)]),
        "gelu": lambda: (
            [pointwise(tokens * 4 * dim // mp, "fp16")],
            [pointwise(tokens * 4 * dim // mp, "fp16", 2)],
        ),
        "res_add": lambda: ([pointwise(tokens * dim, "fp16", 2)], [pointwise(tokens * dim, "fp16", 2)]),
        "flash_atten": lambda: _pair_attention(s["b"], heads, s["l"], dim // max(1, s.get("h", 1))),
        "bmm": lambda: _pair_bmm(s["b"] * heads, s["l"], dim // max(1, s.get("h", 1)), False),
        "baddbmm": lambda: _pair_bmm(s["b"] * heads, s["l"], dim // max(1, s.get("h", 1)), True),
        "softmax": lambda: (
            [softmax(s["b"] * heads * s["l"], s["l"], "fp16")],
            [softmax(s["b"] * heads * s["l"], s["l"], "fp16", True)],
        ),
    }
    return makers[operator]() if operator in makers else None


def _pair_attention(b: int, heads: int, seq: int, size: int) -> Pair:
    return [attention(b, heads, seq, seq, size, "fp16", False)], [
        attention(b, heads, seq, seq, size, "fp16", False, True)
    ]


def _pair_bmm(b: int, seq: int, size: int, scores: bool) -> Pair:
    """Attention's two products: query x key (baddbmm) and probabilities x value (bmm)."""
    m, n, k = (seq, seq, size) if scores else (seq, size, seq)
    return [gemm(b, m, n, k, "fp16", "tn")], [gemm(b, m, k, n, "fp16", "tt"), gemm(b, k, n, m, "fp16", "nn")]
