"""Operators as arrays: what the formulas need of each, gathered once per workload.

Each operator becomes one or more entries of a group (`gemm.bf16`, `norm.backward`, ...); a group has
one curve. `owner` says which operator an entry belongs to, `count` how often it runs within it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.spec.vocabulary import Precision
from paceline.spec.workload import ITEMSIZE, Op, Workload

Array = NDArray[np.float64]

#: groups are half precision or fp32 where that is what decides which kernel runs
_HALF = {"fp16": "half", "bf16": "half"}
#: rows above which torch's norm gradient reduces in two passes in place of one chain per column block
NORM_CHAIN_LIMIT = 65536
#: rows past which torch's reduction across rows spreads over more blocks
REDUCE_CHAIN_LIMIT = 1 << 18
#: elements up to which a reduction to one value stays in one block, and bytes it walks at a time
SINGLE_BLOCK_LIMIT = 1 << 16
WORD = 4
#: longest row that torch's softmax keeps in the registers of one warp
WARP_ROW = 1024
#: elements beyond which a product's leading dimensions being a multiple of more makes no difference
MOST_ALIGNED = 16
#: queries and keys that fused attention computes at once
QUERY_TILE, KEY_TILE = 128, 64
#: products left of a 3 x 3 filter computed on 2 x 2 outputs at once (Winograd)
WINOGRAD = 16 / 36
#: channels below which a convolution's input cannot feed the matrix units directly
FEW_CHANNELS = 8


@dataclass(frozen=True, slots=True)
class Labels:
    """Words that repeat: each distinct one once, and its number per entry."""

    names: tuple[str, ...]
    codes: NDArray[np.int64]

    @classmethod
    def of(cls, words: Iterable[str]) -> Labels:
        numbers: dict[str, int] = {}
        codes = [numbers.setdefault(word, len(numbers)) for word in words]
        return cls(tuple(numbers), np.array(codes, dtype=int))

    def map(self, value: Callable[[str], float]) -> Array:
        """`value` of each entry's word."""
        return np.array([value(name) for name in self.names], dtype=float)[self.codes]

    def total(self, weights: NDArray[Any]) -> dict[str, float]:
        """Sum of `weights` by word."""
        sums = np.bincount(self.codes, weights=weights, minlength=len(self.names))
        return {name: float(value) for name, value in zip(self.names, sums, strict=True)}

    def words(self) -> list[str]:
        """The word of each entry."""
        return [self.names[code] for code in self.codes]

    def take(self, keep: NDArray[np.bool_]) -> Labels:
        return Labels(self.names, self.codes[keep])


@dataclass(frozen=True, slots=True)
class MatrixEntries:
    """Products of one group."""

    owner: NDArray[np.int64]
    count: Array
    batch: Array
    m: Array
    n: Array
    k: Array
    traffic: Array
    itemsize: Array
    layout: Labels
    align: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StreamEntries:
    """Memory-bound work of one group; accesses are listed apart, for their cache hits depend on the
    device.
    """

    owner: NDArray[np.int64]
    count: Array
    launches: Array
    written: Array
    elements: Array
    rows: Array
    serial: Array
    access_entry: NDArray[np.int64]
    access_bytes: Array
    access_reuse: Array


@dataclass(frozen=True, slots=True)
class AttentionEntries:
    """Fused attention of one group."""

    owner: NDArray[np.int64]
    count: Array
    flops: Array
    scores: Array
    traffic: Array
    blocks: Array


@dataclass(frozen=True)
class PackedOps:
    """All operators of a workload, in the order of its segments."""

    size: int
    flops: Array
    moved: Array
    matrix: dict[str, MatrixEntries]
    stream: dict[str, StreamEntries]
    attention: dict[str, AttentionEntries]
    dtypes: Labels
    groups: Labels
    kinds: Labels

    @cached_property
    def products(self) -> tuple[Labels, MatrixEntries]:
        """The entries of all matrix groups in one table, and the group of each: one call costs less than one
        per group.
        """
        return _joined(self.matrix)

    @cached_property
    def flows(self) -> tuple[Labels, StreamEntries]:
        """The same of all stream groups; accesses are renumbered."""
        names, entries = _joined(self.stream)
        sizes = [len(e.owner) for e in self.stream.values()]
        before = np.repeat(np.cumsum([0, *sizes[:-1]]), [len(e.access_entry) for e in self.stream.values()])
        return names, replace(entries, access_entry=entries.access_entry + before)


def _joined(groups: Mapping[str, Any]) -> tuple[Labels, Any]:
    sizes = [len(entries.owner) for entries in groups.values()]
    names = Labels(tuple(groups), np.repeat(np.arange(len(sizes)), sizes))
    parts = list(groups.values())
    columns = (
        {f.name: [getattr(entries, f.name) for entries in parts] for f in fields(parts[0])} if parts else {}
    )
    joined = {
        name: (
            Labels.of(word for c in column for word in c.words())
            if isinstance(column[0], Labels)
            else np.concatenate(column)
        )
        for name, column in columns.items()
    }
    return names, type(parts[0])(**joined) if parts else None


class _Builder:
    def __init__(self) -> None:
        self.matrix: dict[str, list[tuple[object, ...]]] = defaultdict(list)
        self.stream: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        self.accesses: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        self.attention: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        self.groups: list[str] = []

    def product(
        self,
        group: str,
        owner: int,
        dims: tuple[float, ...],
        traffic: float,
        itemsize: float,
        count: float = 1.0,
        layout: str = "tt",
        align: int = MOST_ALIGNED,
    ) -> None:
        self.matrix[group].append((owner, count, *dims, traffic, itemsize, layout, align))

    def flow(
        self,
        group: str,
        owner: int,
        op: Op,
        *,
        elements: float = 0.0,
        rows: float = 0.0,
        serial: float = 0.0,
        launches: float = 1.0,
        count: float = 1.0,
    ) -> None:
        entry = len(self.stream[group])
        self.stream[group].append((owner, count, launches, op.bytes_written, elements, rows, serial))
        self.accesses[group] += [(entry, a.bytes, a.reuse) for a in op.reads]

    def build(self, ops: list[Op]) -> PackedOps:
        matrix = {}
        for group, rows in self.matrix.items():
            columns: list[Any] = list(zip(*rows, strict=True))
            count, batch, m, n, k, traffic, itemsize = (np.array(c, dtype=float) for c in columns[1:8])
            matrix[group] = MatrixEntries(
                np.array(columns[0]),
                count,
                batch,
                m,
                n,
                k,
                traffic,
                itemsize,
                Labels.of(columns[8]),
                np.array(columns[9]),
            )
        stream = {}
        for group, rows2 in self.stream.items():
            owner, count, launches, written, elements, walked, serial = np.array(rows2, dtype=float).T
            entry, size, reuse = np.array(self.accesses[group], dtype=float).reshape(-1, 3).T
            stream[group] = StreamEntries(
                owner.astype(int),
                count,
                launches,
                written,
                elements,
                walked,
                serial,
                entry.astype(int),
                size,
                reuse,
            )
        attention = {}
        for group, rows3 in self.attention.items():
            table = np.array(rows3, dtype=float).T
            attention[group] = AttentionEntries(table[0].astype(int), *table[1:])
        return PackedOps(
            len(ops),
            np.array([op.flops for op in ops], dtype=float),
            np.array([op.bytes_read + op.bytes_written for op in ops], dtype=float),
            matrix,
            stream,
            attention,
            Labels.of(op.dtype for op in ops),
            Labels.of(self.groups),
            Labels.of(op.kind for op in ops),
        )


def _gemm(b: _Builder, i: int, op: Op) -> str:
    group = f"gemm.{op.dtype}"
    align = min(MOST_ALIGNED, int(op.tags[1][5:]))
    b.product(
        group,
        i,
        op.dims,
        op.bytes_read + op.bytes_written,
        ITEMSIZE.get(op.dtype, 4),
        layout=op.tags[0],
        align=align,
    )
    return group


def conv_shape(which: str, dims: tuple[int, ...], itemsize: int) -> tuple[float, float, float, float]:
    """The implicit product (batch, m, n, k) of a convolution's forward, data-gradient or filter-gradient
    pass.

    Channels are padded to 16 bytes; with a stride, the data gradient meets each filter tap at one
    input position in stride^2 only. Into few channels it scatters what the forward pass gathers.
    """
    n, c, k, groups, inputs, outputs, taps, stride = dims
    unit = max(1, 16 // itemsize)
    cp, kp = -(-(c // groups) // unit) * unit, -(-(k // groups) // unit) * unit
    if which == "fprop" or (which == "dgrad" and c < FEW_CHANNELS):
        return groups, n * outputs, kp, cp * taps
    if which == "dgrad":
        return groups, n * inputs, cp, max(1.0, kp * taps / stride**2)
    return groups, kp, cp * taps, n * outputs


def _conv(b: _Builder, i: int, op: Op) -> str:
    n, c, k, groups, inputs, outputs, taps, _ = op.dims
    which, layout = op.tags[0], op.tags[1]
    itemsize = ITEMSIZE.get(op.dtype, 4)
    half = _HALF.get(op.dtype, op.dtype)
    if groups == 1:
        # filters of one tap are plain products and limited by memory; larger ones reuse what they read
        kind = "conv" if taps > 1 else "conv1"
        if c < FEW_CHANNELS:
            kind = "stem"
        if op.dtype == Precision.FP32 and taps == 9 and op.dims[7] == 1 and min(c, k) >= 32:
            kind = "winograd"
        if layout == "nchw" and op.dtype != Precision.FP32:
            kind += "-nchw"  # the matrix units want channels last: kernels transpose on the way
        group = f"{kind}.{which}.{op.dtype}"
        batch, rows, columns, depth = conv_shape(which, op.dims, itemsize)
        if kind == "winograd":
            depth = max(1.0, depth * WINOGRAD)
        b.product(group, i, (batch, rows, columns, depth), op.bytes_read + op.bytes_written, itemsize)
        return group
    per_group = c // groups
    most = max(c * inputs, k * outputs)
    points = n * {"fprop": k * outputs, "dgrad": c * inputs}.get(which, most)
    if per_group == 1:
        # channels that do not fill 16 bytes, and filters past 5 x 5, leave the specialised kernels
        shape = "large" if taps > 25 else "plain"
        if c * itemsize % 16:
            shape = "ragged"
        group = f"depthwise-{shape}.{which}.{half}.{layout}"
    else:
        direct = per_group & (per_group - 1) == 0 and per_group <= 64
        group = f"grouped-{'direct' if direct else 'sliced'}.{which}.{half}.{layout}"
        points = n * (c * inputs + k * outputs)
    b.flow(group, i, op, elements=points, rows=points * taps * (per_group if per_group > 1 else 1))
    return group


def _attention(b: _Builder, i: int, op: Op) -> str:
    batch, heads, _, sq, sk, _, _ = op.dims
    causal, half = "causal" in op.tags, op.dtype in _HALF
    # libraries have kernels of their own for masks, and random numbers per score outweigh both
    variant = ".causal" if causal else ".full"
    if "dropout" in op.tags:
        variant = ".dropout"
    masked = ".mask" if "mask" in op.tags else ""
    group = (
        f"attention.{op.tags[0]}.half{masked}{variant}" if half else f"attention.{op.tags[0]}.fp32{masked}"
    )
    # tiles are computed whole: at the ends of a sequence, and on the diagonal of a causal mask
    whole = (
        -(-sq // QUERY_TILE)
        * QUERY_TILE
        / sq
        * -(-sk // KEY_TILE)
        * KEY_TILE
        / sk
        * (1 + 1 / -(-sq // QUERY_TILE) if causal else 1.0)
    )
    scores = batch * heads * sq * sk * (0.5 if causal and sq == sk else 1.0)
    traffic = op.bytes_read + op.bytes_written
    b.attention[group].append(
        (i, 1.0, op.flops * whole, scores * whole, traffic, batch * heads * -(-sq // QUERY_TILE))
    )
    return group


def _recurrent(b: _Builder, i: int, op: Op) -> str:
    """cuDNN's layers: one product for all inputs of a layer, then one small product and one pointwise kernel
    per step.
    """
    stacks, steps, batch, inputs, hidden = op.dims
    gates = int(op.tags[1][5:])
    itemsize = ITEMSIZE.get(op.dtype, 4)
    passes = 1 if op.tags[0] == "forward" else 2
    group = f"rnn.{op.dtype}.{op.tags[0]}"
    for stack in range(stacks):
        wide = inputs if stack < stacks / max(1, int(op.tags[2][6:])) else hidden
        dims = (1.0, float(steps * batch), float(gates * hidden), float(wide))
        b.product(
            group,
            i,
            dims,
            itemsize * (steps * batch * (wide + gates * hidden) + wide * gates * hidden),
            itemsize,
            passes,
        )
        recurrent_weights = itemsize * hidden * gates * hidden
        b.product(
            group,
            i,
            (1.0, float(batch), float(gates * hidden), float(hidden)),
            recurrent_weights,
            itemsize,
            float(steps),
        )
        if passes == 2:  # the filter gradient of the recurrent weights is one product over all steps
            b.product(
                group,
                i,
                (1.0, float(gates * hidden), float(hidden), float(steps * batch)),
                recurrent_weights,
                itemsize,
                1.0,
                "nn",
            )
    small = Op(op.name, "elementwise", op.phase, op.module, op.dtype, 0.0, (), ())
    b.flow("rnn", i, small, elements=batch * gates * hidden, count=float(stacks * steps * passes))
    return "rnn"


def _stream_group(op: Op) -> str:
    kind, tags = op.kind, op.tags
    if kind == "cast":
        if "strided" in tags:
            return "cast.strided"
        return "cast.widen" if op.bytes_written > op.bytes_read else "cast.narrow"
    if kind in ("elementwise", "copy", "cat"):
        return ".".join((kind, *tags[:1]))
    if kind == "batchnorm":
        engine = "native" if op.dtype == Precision.BF16 else "cudnn"
        return f"batchnorm.{tags[0]}.{engine}.{tags[1]}"
    if kind == "norm":
        return f"norm.{tags[0]}" + (".rms" if "rms" in tags else "")
    if kind == "reduce" and op.dims[0] == 1:
        return "reduce.block" if op.dims[1] <= SINGLE_BLOCK_LIMIT else "reduce.all"
    if kind == "softmax":
        return f"softmax.{tags[0]}.{'warp' if op.dims[1] <= WARP_ROW else 'block'}"
    if kind == "reduce":
        return f"reduce.{tags[0]}"
    if kind == "pool":
        return f"pool.{'max' if 'max' in op.name else 'average'}.{tags[0]}"
    if kind in ("gather", "scatter"):
        return f"{kind}.{tags[0]}" if tags else kind
    if kind in ("optimizer", "fused"):
        return f"{kind}.{tags[0]}"
    return kind


def _stream(b: _Builder, i: int, op: Op) -> str:
    group = _stream_group(op)
    elements = rows = serial = 0.0
    launches = 1.0
    if op.kind in ("norm", "softmax"):
        rows, elements = float(op.dims[0]), float(op.dims[0] * op.dims[1])
        if "weights" in op.tags and rows <= NORM_CHAIN_LIMIT:
            serial = rows
    elif op.kind == "reduce":
        # what is walked one by one: the outputs of a reduction along memory, the rows of one across it
        rows, elements = (
            float(op.dims[0] if "inner" in op.tags else min(op.dims[1], REDUCE_CHAIN_LIMIT)),
            float(op.dims[0] * op.dims[1]),
        )
        serial = op.bytes_read / WORD if group == "reduce.block" else 0.0
    elif op.kind == "batchnorm":
        rows, elements = float(op.dims[1]), float(op.dims[0] * op.dims[1])
    elif op.kind == "pool":
        elements, rows = float(op.dims[0]), float(op.dims[0] * op.dims[1])
    elif op.kind == "optimizer":
        launches, elements = float(op.dims[2]), float(op.dims[1])
    elif op.kind == "fused":
        elements, rows, launches = float(op.dims[0]), float(op.dims[2]), float(op.dims[3])
    elif op.kind == "gather" and "single-block" in op.tags:
        serial = float(op.dims[0])
    elif op.dims:
        elements = float(op.dims[0])
    b.flow(group, i, op, elements=elements, rows=rows, serial=serial, launches=launches)
    return group


_PACKERS: dict[str, Callable[[_Builder, int, Op], str]] = {
    "gemm": _gemm,
    "conv": _conv,
    "attention": _attention,
    "rnn": _recurrent,
}


def pack_ops(ops: Iterable[Op]) -> PackedOps:
    """Arrays of any operators, in their order."""
    builder = _Builder()
    listed = list(ops)
    for i, op in enumerate(listed):
        builder.groups.append(_PACKERS.get(op.kind, _stream)(builder, i, op))
    return builder.build(listed)


_CACHE: weakref.WeakKeyDictionary[Workload, PackedOps] = weakref.WeakKeyDictionary()


def pack(workload: Workload) -> PackedOps:
    """Arrays of a workload's operators (each distinct segment once), made on first use."""
    found = _CACHE.get(workload)
    if found is None:
        found = _CACHE[workload] = pack_ops(op for segment in workload.segments for op in segment.ops)
    return found
