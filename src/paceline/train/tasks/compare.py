"""Strategies on a task: accuracy over seeds with its spread, and time to the task's target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import SpecError
from paceline.train.launch import run

#: two-sided 95 % points of Student's distribution, by degrees of freedom
_STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """One strategy, one run per seed."""

    strategy: str
    accuracies: tuple[float, ...]
    seconds: tuple[float, ...]
    #: until the target was reached; None: it was not
    reached_s: tuple[float | None, ...]

    @property
    def accuracy(self) -> float:
        """The mean."""
        return statistics.fmean(self.accuracies)

    @property
    def interval(self) -> float:
        """Half of the 95 % interval of the mean."""
        count = len(self.accuracies)
        return _STUDENT.get(count - 1, 1.96) * statistics.stdev(self.accuracies) / math.sqrt(count) if count > 1 else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """All strategies."""

    task: str
    world: int
    target: float
    rows: tuple[Runs, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        rows = [{**asdict(row), "accuracy": row.accuracy, "interval": row.interval if len(row.accuracies) > 1 else None} for row in self.rows]
        return {**asdict(self), "rows": rows}

    def __rich__(self) -> Any:
        from paceline.report.training import trained

        rows = [(row.strategy, row.accuracy, row.interval, row.seconds, row.reached_s) for row in self.rows]
        return trained(f"{self.task} on {self.world} ranks, target {self.target:.0%}", rows)


def compare(
    task: str, strategies: Sequence[str], *, world: int = 2, seeds: int = 1, steps: int | None = None, batch: int | None = None,
    lr: float | None = None, optimizer: str = "sgd", warmup: int = 0, record: Path | None = None, checkpoint: Path | None = None,
    servers: int | None = None, staleness: int | None = None, timeout_s: float = 3600.0,
) -> Compared:
    """Trains each strategy with each seed, all in the same processes."""
    from paceline.train.tasks import get

    chosen = get(task)
    if world < 1 or seeds < 1:
        raise SpecError(f"world and seeds count from 1; got {world} and {seeds}")
    names = [name.replace(";", ",") for name in strategies]
    for name, value in (("servers", servers), ("staleness", staleness)):
        if value is not None and not any(name in _options(one, servers, staleness) for one in names):
            raise SpecError(f"--{name} is for parameter servers (ps-async, ps-bounded, easgd...); got {', '.join(names)}")
        if value is not None and value < (1 if name == "servers" else 0):
            raise SpecError(f"--{name} must be {1 if name == 'servers' else 0} or more, got {value}")
    if len(names) * seeds > 1 and checkpoint is not None:
        raise SpecError("checkpoints are of one run: name one strategy and one seed")
    runs = [
        {"task": task, "strategy": name, "seed": seed, "steps": steps, "batch": batch, "lr": lr, "optimizer": optimizer, "warmup": warmup,
         "record": str(record / f"{name.partition(':')[0]}-{seed}" if len(names) * seeds > 1 else record) if record else None,
         "checkpoint": str(checkpoint) if checkpoint else None, "evaluate_every": 10, "options": _options(name, servers, staleness)}
        for seed in range(seeds) for name in names
    ]
    found = run("paceline.train.tasks.loop:several", world=world, arguments={"runs": runs}, timeout_s=timeout_s)[0]
    rows = []
    for name in names:
        mine = [result for request, result in zip(runs, found, strict=True) if request["strategy"] == name]
        rows.append(Runs(strategy=name, accuracies=tuple(m["accuracy"] for m in mine), seconds=tuple(m["seconds"] for m in mine),
                         reached_s=tuple(m["reached"]["seconds"] if m["reached"] else None for m in mine)))
    return Compared(task=task, world=world, target=chosen.target, rows=tuple(rows))


def _options(strategy: str, servers: int | None, staleness: int | None) -> dict[str, Any]:
    """What of these a strategy takes."""
    from paceline.train import asynchronous

    given = {name: value for name, value in (("servers", servers), ("staleness", staleness)) if value is not None}
    if strategy not in asynchronous.NAMES:
        return {}
    from paceline.train.asynchronous.wrap import options_of

    return options_of(strategy, given)
