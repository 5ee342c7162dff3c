"""Sets of collectives: bus bandwidth of nccl-tests tables, and seconds inside torch programs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.bench import collectives
from paceline.bench.validate.case import Case, PredictedValue
from paceline.cost.collectives import LARGE, bus_factor, collective_s, sigma
from paceline.predict.interval import around

if TYPE_CHECKING:  # the readers of rows use this package
    from paceline.bench.collectives import MeasuredCollective


def busbw(folder: Path, leave_out: bool) -> Iterable[Case] | None:
    """Bus bandwidth (B/s) as nccl-tests defines it, `busbw_small` where latency rules."""
    rows = collectives.published(folder)
    return _cases(rows, bandwidth=True) if rows is not None else None


def fp16_nccl(folder: Path, leave_out: bool) -> Iterable[Case] | None:
    """Seconds of NCCL collectives called from torch."""
    rows = collectives.fp16(folder)
    return _cases(rows, bandwidth=False) if rows is not None else None


def gloo(folder: Path, leave_out: bool) -> Iterable[Case] | None:
    """Seconds of gloo collectives between processes of one host."""
    rows = collectives.gloo(folder)
    return _cases(rows, bandwidth=False) if rows is not None else None


def _cases(rows: Iterable[MeasuredCollective], bandwidth: bool) -> list[Case]:
    cases, together = [], defaultdict(list)
    for row in rows:
        if row.skip is not None or row.group is None or row.cluster is None:
            cases.append(Case(name=row.name, device=row.device, skip=row.skip))
        else:
            together[row.op, row.library, id(row.cluster), row.group].append(row)
    for alike in together.values():
        first = alike[0]
        assert first.group is not None and first.cluster is not None
        sizes = np.array([row.size for row in alike])
        seconds = collective_s(first.op, sizes, first.group, first.cluster, first.library)
        spread = sigma(sizes, first.group, first.cluster, first.library)
        factor = bus_factor(first.op, first.group.size)
        line = min(
            (
                first.cluster.uplink(first.group, i)
                for i in range(len(first.cluster.tiers))
                if first.group.fan(i) > 1
            ),
            default=np.inf,
        )
        for row, value, width in zip(alike, seconds, spread, strict=True):
            cases.append(_case(row, float(value), float(width), factor * row.size, line, bandwidth))
    return cases


def _case(
    row: MeasuredCollective, seconds: float, width: float, traffic: float, line: float, bandwidth: bool
) -> Case:
    """`traffic` bytes over a line rate is what the naive guess knows."""
    metric, measured, value, naive = "seconds", row.seconds, seconds, traffic / line
    if bandwidth:
        metric = "busbw" if row.size >= LARGE else "busbw_small"
        measured, value, naive = traffic / row.seconds, traffic / seconds, line
    answer = PredictedValue(value, *around(value, width))
    return Case(
        name=f"{row.name} {row.system}",
        device=row.device,
        measured={metric: measured},
        predict=lambda: {metric: answer},
        naive=lambda: {metric: naive},
    )
