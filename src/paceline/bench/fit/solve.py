"""Least squares for the three shapes of cost formula, on relative errors and robust to outliers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from paceline.cost.attention import AttentionCurve
from paceline.cost.chip import Chip
from paceline.cost.matrix import MatrixCurve, matrix_time
from paceline.cost.operators import features
from paceline.cost.pack import AttentionEntries, MatrixEntries, StreamEntries
from paceline.cost.stream import StreamCurve

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FitQuality:
    """How well a curve meets the rows it was fitted to."""

    rows: int
    median: float
    mean: float


def _quality(predicted: Array, measured: Array) -> FitQuality:
    error = np.abs(predicted / measured - 1)
    return FitQuality(len(measured), float(np.median(error)), float(error.mean()))


def robust_nnls(table: Array, measured: Array, weight: Array) -> Array:
    """Non-negative least squares on relative errors, reweighted towards the median."""
    scale = weight / measured
    solution, _ = nnls(table * scale[:, None], measured * scale)
    for _ in range(12):
        residual = np.abs(table @ solution / measured - 1)
        reweighted = scale / np.sqrt(np.maximum(residual, 0.06))
        solution, _ = nnls(table * reweighted[:, None], measured * reweighted)
    # the median of a skewed group is not its mean, and a step adds operators up: meet the sum as well
    return np.asarray(solution * np.clip(measured.sum() / (table @ solution).sum(), 0.85, 1.15))


def _weight(measured: Array) -> Array:
    """Longer operators matter more to a step; half-way between counting rows and counting seconds."""
    return np.asarray(measured**0.4 / np.mean(measured**0.4))


def fit_stream(
    chip: Chip, entries: StreamEntries, measured: Array, terms: Sequence[bool] = (True,) * 5
) -> tuple[StreamCurve, FitQuality]:
    """Constants of a stream group; `terms` switches off those that a group has no use for."""
    return fit_stream_table(features(entries, chip), measured, terms)


def fit_stream_table(
    table: Array, measured: Array, terms: Sequence[bool] = (True,) * 5
) -> tuple[StreamCurve, FitQuality]:
    """The same from features, which may come from several chips."""
    table = table * np.array(terms, dtype=float)
    solution = robust_nnls(table, measured, _weight(measured))
    launch_s, traffic, element, row, step = (float(value) for value in solution)
    curve = StreamCurve(launch_s=launch_s, traffic=traffic, element=element, row=row, step=step)
    return curve, _quality(table @ solution, measured)


def fit_attention(
    chip: Chip, peak: float, entries: AttentionEntries, measured: Array
) -> tuple[AttentionCurve, FitQuality]:
    """Constants of an attention group."""
    waves = entries.blocks / chip.sms
    filled = np.where(waves > 4, 1.0, np.maximum(1.0, np.ceil(waves) / np.maximum(waves, 1e-9)))
    # steps hold too few shapes to tell launching from the rest
    launch_s = min(ATTENTION_LAUNCH_S, 0.5 * float(measured.min()))
    table = np.stack(
        (
            entries.flops / peak * filled,
            entries.scores / chip.sm_hz * filled,
            entries.traffic / chip.bandwidth,
        ),
        axis=1,
    )
    solution = robust_nnls(table, measured - launch_s, _weight(measured))
    efficiency = 1 / solution[0] if solution[0] > 0 else 1.0
    curve = AttentionCurve(
        launch_s=launch_s, efficiency=float(efficiency), score=float(solution[1]), traffic=float(solution[2])
    )
    return curve, _quality(launch_s + table @ solution, measured)


#: of the one to three kernels of fused attention
ATTENTION_LAUNCH_S = 6e-6
_START = MatrixCurve(
    efficiency=0.75,
    intensity=50.0,
    slope=0.9,
    tile_s=0.3e-6,
    memory=0.8,
    cache=4.0,
    launch_s=1.5e-6,
    split_s=1.5e-6,
    reduction=1.0,
    power=2.0,
    quantisation=0.6,
)
#: field -> (least, most)
_BOUNDS = {
    "efficiency": (0.02, 1.0),
    "intensity": (10.0, 128.0),
    "slope": (0.0, 2.0),
    "tile_s": (0.0, 8e-6),
    "memory": (0.1, 1.0),
    "cache": (0.3, 10.0),
    "launch_s": (0.3e-6, 30e-6),
    "split_s": (0.0, 12e-6),
    "reduction": (0.1, 10.0),
    "power": (1.0, 8.0),
    "quantisation": (0.0, 1.0),
}


#: vector units take their operands through the caches: their traffic, not DRAM's, limits all but the largest
#: tiles
_VECTOR_START = replace(_START, cache=0.8, memory=0.9)
_VECTOR_BOUNDS = {**_BOUNDS, "cache": (0.3, 2.0), "power": (1.0, 3.0)}


@dataclass(frozen=True, slots=True)
class MeasuredProducts:
    """Products measured on one chip; `host` numbers the classes of rows that share an unknown host time."""

    chip: Chip
    peak: float
    entries: MatrixEntries
    measured: Array
    host: NDArray[np.int64] | None = None
    weight: float = 1.0


def fit_matrix(
    blocks: Sequence[MeasuredProducts],
    *,
    start: MatrixCurve | None = None,
    layouts: Sequence[str] = (),
    alignments: Sequence[str] = (),
    fixed: Sequence[str] = (),
    vector: bool = False,
) -> tuple[MatrixCurve, FitQuality, Array]:
    """Constants of a matrix group over one or several chips, and the host time of each class of row.

    `layouts` and `alignments` name those whose share of the efficiency is fitted too; `fixed` names
    fields kept at `start`, for groups with too few rows to tell them apart; `vector` says that no matrix
    units are used.
    """
    base = start or (_VECTOR_START if vector else _START)
    bounds = _VECTOR_BOUNDS if vector else _BOUNDS
    free = [name for name in bounds if name not in fixed]
    classes = max((int(b.host.max()) + 1 for b in blocks if b.host is not None), default=0)
    codes = [
        (
            b.entries.layout.map(lambda v: layouts.index(v) + 1 if v in layouts else 0).astype(int),
            np.array([alignments.index(str(v)) + 1 if str(v) in alignments else 0 for v in b.entries.align]),
        )
        for b in blocks
    ]
    low = np.array([bounds[n][0] for n in free] + [0.05] * (len(layouts) + len(alignments)) + [0.0] * classes)
    high = np.array(
        [bounds[n][1] for n in free] + [1.3] * len(layouts) + [1.0] * len(alignments) + [2e-4] * classes
    )
    guess = np.array(
        [getattr(base, n) for n in free] + [0.9] * len(layouts) + [0.5] * len(alignments) + [3e-5] * classes
    )
    span = high - low
    measured = np.concatenate([b.measured for b in blocks])

    def unpack(x: Array) -> tuple[MatrixCurve, Array, Array, Array]:
        constants: dict[str, Any] = {name: float(value) for name, value in zip(free, x, strict=False)}
        curve = replace(base, **constants)
        at = len(free)
        by_layout = np.concatenate([[1.0], x[at : at + len(layouts)]])
        at += len(layouts)
        return (
            curve,
            by_layout,
            np.concatenate([[1.0], x[at : at + len(alignments)]]),
            x[at + len(alignments) :],
        )

    def predict(unit: Array) -> Array:
        curve, by_layout, by_align, hosts = unpack(low + np.clip(unit, 0, 1) * span)
        parts = []
        for block, (layout, align) in zip(blocks, codes, strict=True):
            e = block.entries
            t = matrix_time(
                block.chip,
                block.peak,
                curve,
                batch=e.batch,
                m=e.m,
                n=e.n,
                k=e.k,
                traffic=e.traffic,
                itemsize=e.itemsize,
                share=by_layout[layout] * by_align[align],
            )
            parts.append(t if block.host is None else t + hosts[block.host])
        return np.concatenate(parts)

    weight = np.concatenate([b.weight * _weight(b.measured) for b in blocks])
    best = None
    for factor in (1.0, 0.75, 1.3):
        unit = np.clip(
            (guess * np.where(np.arange(len(guess)) < len(free), factor, 1.0) - low) / span, 0.01, 0.99
        )
        found = least_squares(
            lambda u: weight * np.log(predict(u) / measured),
            unit,
            bounds=(0, 1),
            loss="soft_l1",
            f_scale=0.1,
            diff_step=3e-3,
            max_nfev=150,
        )
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None
    curve, by_layout, by_align, hosts = unpack(low + best.x * span)
    curve = replace(
        curve,
        layouts={name: float(by_layout[i + 1]) for i, name in enumerate(layouts)},
        alignment={name: float(by_align[i + 1]) for i, name in enumerate(alignments)},
    )
    return curve, _quality(predict(best.x), measured), hosts
