"""A table of times to a target: all runs, medians with their intervals, tests, and what was predicted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from paceline.bench.tta.rules import RaceRules
from paceline.bench.tta.significance import holm, median_coverage, rank_sum_p

#: a p-value below this counts
SIGNIFICANT = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRun:
    """One run: when it met the target, on a clock that includes evaluations; None: it did not."""

    seed: int
    lr: float
    steps: int
    reached_s: float | None
    wall_s: float
    #: step, seconds on the clock, metric, and seconds that the evaluation took, of each
    evaluations: tuple[Mapping[str, float], ...]
    started_at: str
    #: seconds of making the model and meeting, before the clock starts
    set_up_s: float
    train_samples: int
    eval_samples: int
    #: of the machine, and seconds of work that is the same beside every run
    load: float
    reference_s: float

    @property
    def evaluation_s(self) -> float:
        """Seconds of evaluations until the end."""
        return sum(one["evaluation_s"] for one in self.evaluations)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """One contestant on one task at one batch."""

    task: str
    contestant: str
    strategy: str
    optimizer: str
    batch: int
    lr: float
    #: learning rates that were tried
    trials: int
    runs: tuple[TargetRun, ...]
    #: against the baseline at the same batch, of all contestants together (Holm); None of the baseline
    p: float | None = None
    #: seconds to the target, steps, and seconds of a step and of an evaluation, as they were predicted
    predicted_s: float | None = None
    predicted_steps: float | None = None
    predicted_step_s: float | None = None
    #: median of the runs that the prediction has not seen
    compared_s: float | None = None

    @property
    def place(self) -> tuple[str, int]:
        """Rows with the same place are compared."""
        return self.task, self.batch

    @property
    def times(self) -> list[float | None]:
        """Seconds of each run; None where it missed the target."""
        return [run.reached_s for run in self.runs]

    @property
    def reached(self) -> int:
        return sum(one is not None for one in self.times)

    @property
    def median_s(self) -> float:
        """Runs that missed the target count as later than all others; infinite where most did."""
        return statistics.median(math.inf if one is None else one for one in self.times)

    @property
    def range_s(self) -> tuple[float, float]:
        values = [math.inf if one is None else one for one in self.times]
        return min(values), max(values)

    @property
    def steps(self) -> float:
        """Median of runs that met the target; not a number where none did."""
        found = [run.steps for run in self.runs if run.reached_s is not None]
        return statistics.median(found) if found else math.nan

    @property
    def step_s(self) -> float:
        """Median seconds of a step, without evaluations."""
        return statistics.median((run.wall_s - run.evaluation_s) / run.steps for run in self.runs)

    @property
    def error(self) -> float | None:
        """Of the predicted time to the target, relative to the median of the runs that it has not seen."""
        if self.predicted_s is None or self.compared_s is None or not math.isfinite(self.compared_s):
            return None
        return self.predicted_s / self.compared_s - 1


@dataclass(frozen=True, kw_only=True)
class TargetTable:
    """All rows, and the rules that they were run by."""

    rows: tuple[TargetRow, ...]
    rules: Mapping[str, RaceRules]
    baseline: str
    world: int
    seeds: int
    machine: str
    #: what predictions were made from, and what was held out
    held_out: str = ""
    #: further errors of predictions, by what was held out
    errors: Mapping[str, float] | None = None

    @cached_property
    def places(self) -> Mapping[tuple[str, int], Sequence[TargetRow]]:
        """Rows by task and batch."""
        found: dict[tuple[str, int], list[TargetRow]] = {}
        for row in self.rows:
            found.setdefault(row.place, []).append(row)
        return found

    def best(self, row: TargetRow) -> bool:
        """Whether a row has the least median of its task and batch."""
        return row.median_s == min(other.median_s for other in self.places[row.place])

    @property
    def coverage(self) -> float:
        """How often the range of the runs holds the median."""
        return median_coverage(self.seeds)

    @property
    def mean_error(self) -> float | None:
        """Mean absolute relative error of the predicted times; None where nothing was predicted."""
        found = [abs(row.error) for row in self.rows if row.error is not None]
        return statistics.fmean(found) if found else None

    @property
    def pace(self) -> tuple[float, float]:
        """Least and greatest seconds of the reference work beside the runs: how noisy the machine was."""
        found = [run.reference_s for row in self.rows for run in row.runs]
        return min(found), max(found)

    @property
    def load(self) -> tuple[float, float]:
        """Median and greatest load of the machine beside the runs."""
        found = [run.load for row in self.rows for run in row.runs]
        return statistics.median(found), max(found)

    def tested(self) -> TargetTable:
        """The same with tests of each contestant against the baseline of its place."""
        rows = [row for group in self.places.values() for row in self._tested(group)]
        return replace(self, rows=tuple(rows))

    def _tested(self, group: Sequence[TargetRow]) -> Iterator[TargetRow]:
        base = next((row for row in group if row.contestant == self.baseline), None)
        others = {row.contestant: row for row in group if row is not base}
        found = {name: rank_sum_p(row.times, base.times) for name, row in others.items()} if base else {}
        adjusted = holm(found)
        for row in group:
            yield replace(row, p=adjusted.get(row.contestant))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        rows = [
            {
                **asdict(row),
                "median_s": row.median_s,
                "range_s": list(row.range_s),
                "reached": row.reached,
                "steps": row.steps,
                "step_s": row.step_s,
                "error": row.error,
            }
            for row in self.rows
        ]
        return {
            "rows": rows,
            "rules": {name: asdict(rules) for name, rules in self.rules.items()},
            "baseline": self.baseline,
            "world": self.world,
            "seeds": self.seeds,
            "machine": self.machine,
            "coverage": self.coverage,
            "mean_error": self.mean_error,
            "held_out": self.held_out,
            "errors": dict(self.errors or {}),
        }

    def __rich__(self) -> Any:
        from paceline.bench.tta.view import table_view

        return table_view(self)
