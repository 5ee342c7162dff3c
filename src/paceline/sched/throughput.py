"""Throughput against devices from a profile of at most two nodes, as a scheduler asks for it.

The model is `queueing.synchronous`: local work, a ring over the network that two nodes share one connection
of, a barrier. Here it becomes the `Speed` of a job, and is scored on the measurements of the Pollux study:
fitted to what ran on one or two nodes, asked for four and more.

    python -m paceline.sched.throughput DATA/traces/pollux
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.queueing.synchronous import MeasuredStep, SynchronousModel
from paceline.sched.pollux import APPLICATIONS
from paceline.sched.speed import OnePhaseSpeed
from paceline.spec.tables import Row, csv_rows


@dataclass(frozen=True, slots=True, eq=False)
class ProfiledSpeed(OnePhaseSpeed):
    """The speed of a job whose model was fitted to a profile: samples per second at a fixed global batch,
    split over the devices.
    """

    model: SynchronousModel
    batch: int
    #: samples on one device: more are run in several passes, fewer are not worth a device
    most_local: float = math.inf
    least_local: float = 1.0
    #: step time on a kind of device over that on the profiled kind
    kinds: Mapping[str, float] | None = None
    _memo: dict[tuple[int, ...], float] = field(default_factory=dict, repr=False)

    def rate(self, counts: tuple[int, ...], kind: str, phase: int, adaptive: bool) -> float:
        if counts not in self._memo:
            self._memo[counts] = self._rate(counts)
        return self._memo[counts] / (self.kinds or {}).get(kind, 1.0)

    def _rate(self, counts: tuple[int, ...]) -> float:
        devices, widest = sum(counts), max(counts)
        local = self.batch / devices
        if local < self.least_local:
            return 0.0
        passes = max(1, math.ceil(local / self.most_local - 1e-9))
        step_s = float(self.model.step_s(len(counts), devices, local / passes, widest))
        if passes > 1:  # only the last pass synchronises
            step_s += (passes - 1) * float(self.model.local_s(local / passes, widest))
        return self.batch / step_s


def measured(folder: Path) -> list[MeasuredStep]:
    """All that was measured of one application of the Pollux study."""
    rows = []
    for row in csv_rows(folder / "placements.csv", ("placement", "local_bsz", "step_time")):
        counts = [int(digit) for digit in row["placement"]]
        rows.append(_measured(row, len(counts), sum(counts), max(counts)))
    for row in csv_rows(folder / "scalability.csv", ("num_nodes", "num_replicas", "local_bsz", "step_time")):
        nodes, replicas = int(row["num_nodes"]), int(row["num_replicas"])
        rows.append(_measured(row, nodes, replicas, -(-replicas // nodes)))
    return rows


def _measured(row: Row, nodes: int, replicas: int, widest: int) -> MeasuredStep:
    return MeasuredStep(
        nodes=nodes,
        replicas=replicas,
        widest=widest,
        batch=float(row["local_bsz"]),
        step_s=float(row["step_time"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputScore:
    """How far predictions of throughput are off, mean and worst of |predicted / measured - 1|."""

    fitted: int
    asked: int
    mean: float
    worst: float


def score(rows: Iterable[MeasuredStep], most_nodes: int = 2, from_nodes: int = 4) -> ThroughputScore:
    """Fitted to rows of at most `most_nodes`, scored on those of at least `from_nodes`."""
    rows = list(rows)
    known = [row for row in rows if row.nodes <= most_nodes]
    asked = [row for row in rows if row.nodes >= from_nodes]
    model = SynchronousModel.fit(known)
    off = [
        abs(row.step_s / float(model.step_s(row.nodes, row.replicas, row.batch, row.widest)) - 1)
        for row in asked
    ]
    return ThroughputScore(fitted=len(known), asked=len(asked), mean=sum(off) / len(off), worst=max(off))


def main(folder: Path) -> None:
    """Prints the score of each application."""
    for name in APPLICATIONS:
        found = score(measured(folder / name))
        print(
            f"{name:12} {found.fitted:4} rows of one or two nodes -> {found.asked:4} of four and more: "
            f"mean error {100 * found.mean:.1f} %, worst {100 * found.worst:.0f} %"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
