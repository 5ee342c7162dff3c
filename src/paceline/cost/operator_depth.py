"""Work and depth of a captured operator, by the formulas of `work_depth`.

A capture keeps products of sizes: the points of a kernel or of an image are taken as a square where they are
one, else as one dimension. That changes a depth by one level at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.capture.optimizer import RULES
from paceline.cost import work_depth as wd
from paceline.cost.work_depth import ConvolutionSize, Evaluation, WorkDepth
from paceline.spec.workload import ITEMSIZE, Op

#: kinds that only move data or write constants: one operation per element, all at the same time
MOVES = ("cast", "copy", "fill", "cat", "gather", "scatter", "sync")
#: the evaluation that a convolution's tag names
_EVALUATIONS = {"fprop": Evaluation.OUTPUT, "dgrad": Evaluation.INPUT, "wgrad": Evaluation.WEIGHTS}
#: points of the input that one point of an interpolation reads
_INTERPOLATED = {"nearest": 1, "linear1d": 2, "bilinear": 4, "grid_sampler": 4, "bicubic": 16}


def operator_work_depth(op: Op) -> WorkDepth:
    """Work and depth of one operator; what has no formula, or no sizes for it, counts as pointwise."""
    sizes, formula = _FORMULAS.get(op.kind, (0, None))
    if formula is not None and len(op.dims) == sizes:
        return formula(op)
    return wd.pointwise(op.dims[0] if op.dims else op.bytes_written / ITEMSIZE[op.dtype])


def convolution_size(op: Op) -> ConvolutionSize:
    """The sizes of a captured convolution."""
    samples, c_in, c_out, groups, points, outputs, taps, stride = op.dims
    return ConvolutionSize(
        samples=samples,
        c_in=c_in,
        c_out=c_out,
        output=sides(outputs),
        kernel=sides(taps),
        groups=groups,
        stride=stride,
        input_points=points,
    )


def sides(points: int) -> tuple[int, ...]:
    """The two sides of a square of so many points; one side where it is none."""
    side = math.isqrt(points)
    return (side, side) if side * side == points else (points,)


def evaluation(op: Op) -> Evaluation:
    """What a captured convolution evaluates."""
    return next((_EVALUATIONS[tag] for tag in op.tags if tag in _EVALUATIONS), Evaluation.OUTPUT)


def _backward(op: Op) -> bool:
    return "backward" in op.tags


def _gemm(op: Op) -> WorkDepth:
    batch, m, n, k = op.dims
    return wd.product(batch, m, n, k)


def _conv(op: Op) -> WorkDepth:
    return wd.convolution_direct(convolution_size(op), evaluation(op))


def _attention(op: Op) -> WorkDepth:
    batch, heads, _, queries, keys, head, value = op.dims
    left = 0.5 if "causal" in op.tags and queries == keys else 1.0
    scores = batch * heads * queries * keys * left
    size = wd.AttentionSize(scores=scores, queries=queries, keys=keys, head=head, value=value)
    return wd.attention(size, backward=_backward(op))


def _recurrent(op: Op) -> WorkDepth:
    stacked, steps, samples, inputs, hidden = op.dims
    said = {tag.rstrip("0123456789"): int(tag.lstrip("abcdefghijklmnopqrstuvwxyz")) for tag in op.tags[1:3]}
    layers = said.get("layers", 1)
    size = wd.RecurrentSize(
        samples=samples,
        steps=steps,
        inputs=inputs,
        hidden=hidden,
        gates=said.get("gates", 1),
        layers=layers,
        directions=stacked // layers,
    )
    return wd.recurrent(size, backward=_backward(op))


def _norm(op: Op) -> WorkDepth:
    rows, columns = op.dims
    formula = wd.rms_norm if "rms" in op.tags else _layer_norm
    found = formula(rows, columns, backward=_backward(op))
    if "weights" not in op.tags:
        return found
    # gradients of weight and bias are sums over the rows, beside that of the input
    return found.beside(WorkDepth(work=2.0 * rows * columns, depth=1.0 + wd.levels(rows)))


def _layer_norm(rows: float, columns: float, *, backward: bool = False) -> WorkDepth:
    return wd.batch_norm(columns, rows, backward=backward)


def _pool(op: Op) -> WorkDepth:
    outputs, window = op.dims
    if "adaptive" in op.name:
        # the window follows from the sizes: the capture keeps the output's
        points = max(op.bytes_read, op.bytes_written) / max(1, min(op.bytes_read, op.bytes_written))
        window = max(1, round(points))
    for name, points_read in _INTERPOLATED.items():
        if name in op.name:
            window = points_read
    if _backward(op) and op.reads and op.bytes_written:
        # the capture keeps the points of the input's gradient; windows are those of the output's
        outputs = round(outputs * op.reads[0].bytes / op.bytes_written)
    return wd.pooling(outputs, sides(window))


def _move(op: Op) -> WorkDepth:
    elements = op.dims[0]
    moved = wd.pointwise(elements)
    rows = next((int(tag[4:]) for tag in op.tags if tag.startswith("rows")), 1)
    if op.kind == "scatter":  # rows of the same index are added up; at worst all are of one
        return WorkDepth(work=moved.work, depth=max(moved.depth, float(wd.levels(rows))))
    if (
        "single-block" in op.tags and "backward" not in op.name
    ):  # the loss: a value of each row, then their mean
        return moved.then(wd.reduction(1, elements))
    return moved


def _optimizer(op: Op) -> WorkDepth:
    rule = RULES.get(op.name.partition(".")[2].rpartition("-")[0]) or RULES.get(op.name.partition(".")[2])
    steps = len(rule.foreach) if rule is not None and "fused" in op.tags else 1
    return wd.pointwise(op.dims[1], steps)


def _softmax(op: Op) -> WorkDepth:
    return wd.softmax(*op.dims, backward=_backward(op))


def _batch_norm(op: Op) -> WorkDepth:
    rows, channels = op.dims
    if "inference" in op.tags:
        return wd.pointwise(rows * channels)
    return wd.batch_norm(rows, channels, backward=_backward(op))


#: kind -> how many sizes a capture gives, and the formula
_FORMULAS: dict[str, tuple[int, Callable[[Op], WorkDepth]]] = {
    "gemm": (4, _gemm),
    "conv": (8, _conv),
    "attention": (7, _attention),
    "rnn": (5, _recurrent),
    "norm": (2, _norm),
    "batchnorm": (2, _batch_norm),
    "softmax": (2, _softmax),
    "pool": (2, _pool),
    "reduce": (2, lambda op: wd.reduction(*op.dims)),
    "scan": (1, lambda op: wd.prefix_sum(op.dims[0])),
    "sort": (2, lambda op: wd.sort(op.dims[0])),
    "optimizer": (3, _optimizer),
    **dict.fromkeys(MOVES, (1, _move)),
}
