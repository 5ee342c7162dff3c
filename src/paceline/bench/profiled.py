"""Profiled training steps (`benchmarks/profile_steps.py`): read them, capture the same step, pair the
operators.

A profile lists, per operator and shape, how often it ran and how long its kernels took. Captured
operators of the same name and size are paired with it; where the counts agree, each gets its share.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.spec.vocabulary import Precision
from paceline.spec.workload import Op, Workload

_PHASE = {"forward": "fwd", "backward": "bwd", "recompute": "bwd", "optimizer": "opt"}
_TYPES = {"c10::BFloat16": "half", "float": "fp32", "c10::Half": "half", "long int": "int64", "bool": "bool"}
#: names under which a GPU runs what capture calls otherwise
_NAMES = {
    "clamp_min_": "relu",
    "clamp_min": "relu",
    "relu_": "relu",
    "add_": "add",
    "mul_": "mul",
    "div_": "div",
    "clamp": "hardtanh",
    "clamp_": "hardtanh",
    "hardtanh_": "hardtanh",
    "silu_": "silu",
    "hardswish_": "hardswish",
    "rsub": "sub",
}


@dataclass(frozen=True, slots=True)
class ProfiledOperator:
    """A captured operator and what it took on the device."""

    op: Op
    seconds: float
    kernels: float


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a profile file, one per configuration."""
    with gzip.open(path, "rt") as f:
        return [json.loads(line) for line in f]


@dataclass
class _Bucket:
    calls: int = 0
    seconds: float = 0.0
    kernels: int = 0
    by_name: dict[str, float] | None = None


def pair(row: dict[str, Any], workload: Workload) -> tuple[list[ProfiledOperator], float]:
    """Captured operators with their measured times, and the share of the step's device time they
    account for.
    """
    profile: dict[Any, _Bucket] = defaultdict(_Bucket)
    for entry in row["ops"]:
        key = _profile_key(entry)
        if key is None:
            continue
        kernels: dict[str, list[float]] = entry[-1]
        main = [count for name, (count, _) in kernels.items() if not name.startswith("Memset")]
        bucket = profile[key]
        bucket.calls += int(max(main, default=0))
        bucket.seconds += sum(t for _, t in kernels.values()) * 1e-6
        bucket.kernels += int(sum(count for count, _ in kernels.values()))
        bucket.by_name = bucket.by_name or {}
        for name, (_, t) in kernels.items():
            bucket.by_name[name] = bucket.by_name.get(name, 0.0) + t * 1e-6
    captured: dict[Any, list[Op]] = defaultdict(list)
    for index in workload.order:
        for op in workload.segments[index].ops:
            key = _op_key(op)
            if key is not None:
                captured[key].append(op)
    out: list[ProfiledOperator] = []
    for key, ops in captured.items():
        if key in profile:
            out += _share(key, ops, profile[key])
    out += _share_optimizer(
        [op for segment in workload.segments for op in segment.ops if op.kind == "optimizer"], profile
    )
    return out, sum(m.seconds for m in out) / row["device_s"]


def _share(key: Any, ops: list[Op], bucket: _Bucket) -> Iterator[ProfiledOperator]:
    if key[1] == "conv" and key[0] == "bwd":
        yield from _share_conv(ops, bucket)
        return
    several = bucket.calls % len(ops) == 0 or ops[0].kind in (
        "attention",
        "scatter",
        "rnn",
        "batchnorm",
        "optimizer",
    )
    if not several and abs(bucket.calls - len(ops)) > 0.25 * len(ops):
        return
    parts = len(ops) if several else bucket.calls
    for op in ops:
        yield ProfiledOperator(op, bucket.seconds / parts, bucket.kernels / parts)


def _share_optimizer(ops: list[Op], profile: dict[Any, _Bucket]) -> Iterator[ProfiledOperator]:
    buckets = [bucket for key, bucket in profile.items() if key[0] == "opt" and len(key) == 2]
    moved = sum(op.bytes_read + op.bytes_written for op in ops)
    seconds, kernels = sum(b.seconds for b in buckets), sum(b.kernels for b in buckets)
    for op in ops:
        share = (op.bytes_read + op.bytes_written) / moved
        yield ProfiledOperator(op, seconds * share, kernels * share)


def _share_conv(ops: list[Op], bucket: _Bucket) -> Iterator[ProfiledOperator]:
    """Split a convolution's backward between data and filter gradient, by the names of the kernels."""
    passes = defaultdict(list)
    for op in ops:
        passes[op.tags[0]].append(op)
    if len(passes) == 1:
        for op in ops:
            yield ProfiledOperator(op, bucket.seconds / len(ops), bucket.kernels / len(ops))
        return
    split = {"dgrad": 0.0, "wgrad": 0.0}
    for name, t in (bucket.by_name or {}).items():
        which = _conv_pass(name)
        if which:
            split[which] += t
    known = sum(split.values())
    if known < 0.8 * bucket.seconds or not all(split.values()):
        # the larger part is of unknown purpose: halves are the honest guess, marked by the tag
        split = {"dgrad": 0.5, "wgrad": 0.5}
        known = 1.0
    for which, members in passes.items():
        for op in members:
            yield ProfiledOperator(
                op, bucket.seconds * split[which] / known / len(members), bucket.kernels / len(ops)
            )


def _conv_pass(kernel: str) -> str | None:
    name = kernel.lower()
    if "dgrad" in name:
        return "dgrad"
    if (
        "wgrad" in name
        or "splitk" in name
        or "reduc" in name
        or re.search(r"_nt[nt]$|_nt_|nt_align|_nt$", name)
    ):
        return "wgrad"
    if re.search(r"_[nt]n[nt]$|_[nt]n_|[nt]n_align|_nn$", name):
        return "dgrad"
    return None


def _elements(dims: Any) -> int:
    if not dims:
        return 1
    return 0 if isinstance(dims[0], list) else math.prod(dims)


def _profile_key(entry: Sequence[Any]) -> Any:
    # a compiled graph's own annotation hides the pass it runs in: that is the backward one, the forward pass
    # is found first
    phase, name = entry[0] if "CompiledFxGraph" not in entry[0] else "bwd", entry[1].split("::")[-1]
    try:
        dims = json.loads(entry[2])
    except ValueError:
        return None
    types = [_TYPES.get(t, t) for t in entry[3].split(",")]
    if name in ("mm", "bmm"):
        a, b = dims[:2]
        return phase, "gemm", math.prod(a[:-2]), a[-2], b[-1], a[-1]
    if name in ("addmm", "baddbmm"):
        a, b = dims[1:3]
        return phase, "gemm", math.prod(a[:-2]), a[-2], b[-1], a[-1]
    if name in ("cudnn_convolution", "convolution_backward"):
        return _profile_conv_key(phase, name, dims, json.loads(entry[5]))
    if "batch_norm" in name:
        return phase, "batchnorm", _elements(dims[0]), dims[0][1]
    if name.startswith(("native_layer_norm", "native_group_norm")):
        return phase, "norm", _elements(dims[0])
    if "attention" in name:
        q = dims[0] if "forward" in name else dims[1]
        return phase, "attention", tuple(sorted(q))
    if "softmax" in name:
        return phase, "softmax", _elements(dims[0])
    if name in ("sum", "mean", "linalg_vector_norm"):
        return phase, "reduce", _elements(dims[0])
    if name == "copy_":
        layout = entry[4][:2]
        contiguous = layout in ("cc", "ll") or any(
            "vectorized" in k or "unrolled" in k or "Memcpy" in k for k in entry[-1]
        )
        same = types[0] == types[1]
        return phase, "copy", _elements(dims[0]), types[0], types[1], contiguous if same else None
    if name == "fill_":
        return phase, "fill", _elements(dims[0])
    if name == "cat":
        return (
            phase,
            "cat",
            sum(_elements(d) for d in dims[0]) if dims[0] and isinstance(dims[0][0], list) else -1,
        )
    if name.startswith(("max_pool2d", "avg_pool2d", "_adaptive_avg_pool2d")):
        return phase, "pool", "max" in name, max(_elements(d) for d in dims if isinstance(d, list))
    if name == "gather":
        return phase, "gather", _elements(dims[2])
    if name == "embedding_dense_backward":
        return phase, "scatter", _elements(dims[0])
    if name.startswith("_cudnn_rnn"):
        return phase, "rnn"
    if name.startswith(("_fused_", "_foreach_")):
        return "opt", name
    return phase, _NAMES.get(name, name), max([_elements(d) for d in dims if isinstance(d, list)], default=1)


def _profile_conv_key(phase: str, name: str, dims: Any, concrete: list[str]) -> Any:
    if name == "cudnn_convolution":
        x, weight = dims[:2]
        padding, stride, dilation = (json.loads(concrete[i]) for i in (2, 3, 4))
        groups = int(concrete[5])
        points = [
            (x[2 + i] + 2 * padding[i] - dilation[i] * (weight[2 + i] - 1) - 1) // stride[i] + 1
            for i in range(len(x) - 2)
        ]
    else:
        grad, x, weight = dims[:3]
        stride, groups, points = json.loads(concrete[4]), int(concrete[9]), grad[2:]
    shape = (
        x[0],
        x[1],
        weight[0],
        groups,
        math.prod(x[2:]),
        math.prod(points),
        math.prod(weight[2:]),
        max(stride),
    )
    return phase, "conv", shape


def _op_key(op: Op) -> Any:
    phase, name = _PHASE[op.phase], op.name.split(".")[-1]
    if op.kind == "gemm":
        return phase, "gemm", *op.dims
    if op.kind == "conv":
        return phase, "conv", op.dims
    if op.kind == "batchnorm":
        return phase, "batchnorm", op.dims[0] * op.dims[1], op.dims[1]
    if op.kind in ("norm", "softmax", "reduce"):
        return phase, op.kind, op.dims[0] * op.dims[1]
    if op.kind == "attention":
        batch, heads, _, sq, _, size, _ = op.dims
        return phase, "attention", tuple(sorted((batch, heads, sq, size)))
    if op.kind in ("copy", "cast") and name != "roll":
        names = {2: "half", 4: "fp32", 8: "int64", 1: "bool"}
        count = max(1, op.dims[0])
        out, source = (names.get(round(a.bytes / count)) for a in (op.writes[0], op.reads[0]))
        return phase, "copy", op.dims[0], out, source, "strided" not in op.tags if op.kind == "copy" else None
    if op.kind == "pool":
        itemsize = 4 if op.dtype == Precision.FP32 else 2
        return phase, "pool", "max" in name, max(op.reads[0].bytes, op.writes[0].bytes) // itemsize
    if op.kind in ("fill", "cat", "gather", "scatter"):
        return phase, op.kind, op.dims[0]
    if op.kind == "rnn":
        return phase, "rnn"
    if op.kind == "optimizer":
        return None
    name = {"convolution": "add", "_softmax_backward_data": "mul"}.get(name, _NAMES.get(name, name))
    return phase, name, op.dims[0]
