"""Constants of fused kernels, from training steps profiled under torch.compile.

A profile names each kernel after what was fused into it and lists its arguments, not what it reads
and writes of them; so kernels are compared in sums: all that walk the same number of elements in the
same pass of the same step, measured against what `capture.fuse` says runs there.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.bench import models, profiled
from paceline.bench.fit.solve import robust_nnls
from paceline.catalog import devices
from paceline.cost.chip import chip
from paceline.cost.curves import from_tables
from paceline.cost.operators import features, times
from paceline.cost.pack import pack, pack_ops
from paceline.spec.vocabulary import Phase
from paceline.spec.workload import Workload

#: kernels over fewer elements are a matter of launching: one sum per pass
SMALL = 1 << 20
#: constants, each with the (group, column of the stream formula) it multiplies; launching and special
#: functions cost the same everywhere
_TERMS: tuple[tuple[tuple[str, int], ...], ...] = (
    (("fused.pointwise", 0), ("fused.row", 0), ("fused.column", 0)),
    (("fused.pointwise", 1), ("fused.row", 1), ("fused.column", 1)),
    (("fused.pointwise", 3), ("fused.row", 3), ("fused.column", 3)),
    (("fused.row", 2),),
    (("fused.column", 2),),
)
_FIELDS = ("launch_s", "traffic", "element", "row", "step")


def fit(path: Path, tables: dict[str, Any], report: list[str]) -> None:
    """Add to the tables of the eager fit: stream curves of the fused groups, and what a mask adds to
    attention.
    """
    measured: dict[Any, float] = defaultdict(float)
    table: dict[Any, Any] = defaultdict(lambda: np.zeros(len(_TERMS)))
    masked: list[profiled.ProfiledOperator] = []
    for number, row in enumerate(profiled.read(path)):
        if row["compile"]:
            workload = models.h200_step(row)
            for (phase, elements), taken in _kernels(row):
                measured[number, phase, elements] += taken
            for (phase, elements), terms in _predicted(workload):
                table[number, phase, elements] += terms
            masked += [
                p for p in profiled.pair(row, workload)[0] if p.op.kind == "attention" and "mask" in p.op.tags
            ]
    both = [key for key in measured if key in table]
    seconds = np.array([measured[key] for key in both])
    rows = np.array([table[key] for key in both])
    # a step is a sum: buckets count by their time
    solution = robust_nnls(rows, seconds, np.sqrt(seconds / seconds.mean()))
    error = np.abs(rows @ solution / seconds - 1)
    report.append(
        f"{'fused':40s} sums {len(both):6d}  median {100 * np.median(error):5.1f} %  total"
        f" {(rows @ solution).sum() / seconds.sum():.3f}"
    )
    for value, places in zip(solution, _TERMS, strict=True):
        for group, column in places:
            curve = tables["stream"].setdefault(group, {"launch_s": 0.0, "traffic": 0.0})
            curve[_FIELDS[column]] = float(f"{value:.4g}")
            tables["kernels"][group] = 1.0
    _masks(masked, tables, report)


def _masks(masked: Sequence[profiled.ProfiledOperator], tables: dict[str, Any], report: list[str]) -> None:
    """Under torch.compile, transformers hands attention a mask where eager code would say "causal": scores
    are read as well as computed.
    """
    plain = from_tables("fit", {"fit": {"source": "", **tables}})
    for which in ("forward", "backward"):
        rows = [m for m in masked if m.op.tags[0] == which]
        if rows:
            packed = pack_ops(m.op for m in rows)
            group = next(iter(packed.attention)).partition(".mask")[0] + ".mask"
            scale = sum(m.seconds for m in rows) / times(packed, chip(devices.get("h200")), plain).busy.sum()
            tables["scale"][group] = float(f"{scale:.3g}")
            report.append(f"{group:40s} rows {len(rows):6d}  scale {tables['scale'][group]}")


def _bucket(elements: int) -> int:
    return elements if elements >= SMALL else 0


def _kernels(row: dict[str, Any]) -> Iterator[tuple[tuple[bool, int], float]]:
    """(forward?, elements walked) and seconds of each fused kernel of a profile."""
    for entry in row["ops"]:
        forward, name, shapes = entry[0] == "fwd", entry[1], json.loads(entry[2])
        if not name.startswith(("triton", "aten::sum")):
            continue
        elements = max((math.prod(shape) for shape in shapes if shape), default=1)
        yield (forward, _bucket(elements)), sum(t for _, t in entry[-1].values()) * 1e-6


def _predicted(workload: Workload) -> Iterator[tuple[tuple[bool, int], Any]]:
    """The same of each fused operator, as weights of the constants."""
    packed = pack(workload)
    runs = np.bincount(workload.order, minlength=len(workload.segments))
    where: Sequence[tuple[Any, int]] = [
        (op, int(n)) for segment, n in zip(workload.segments, runs, strict=True) for op in segment.ops
    ]
    target = chip(devices.get("h200"))
    for group, entries in packed.stream.items():
        if not group.startswith("fused"):
            continue
        for owner, terms in zip(entries.owner, features(entries, target), strict=True):
            op, count = where[owner]
            forward, more = op.phase != Phase.BACKWARD, terms[0] - 1
            weights = np.array([sum(terms[c] for g, c in places if g == group) for places in _TERMS])
            finishing = np.zeros(len(_TERMS))
            finishing[0] = more
            yield (forward, _bucket(op.dims[0])), count * (weights - finishing)
            yield (forward, 0), count * finishing
