"""What follows from the runs of a report: who reached the target when, who is compared with whom, and what a
claim should have been.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.spec.benchmark import LESS_IS_BETTER, BenchmarkReport, ReportedRow, ReportedRun, ReportedValue

#: what a claim may be about -> words for it
QUANTITIES = {
    "reached_s": ("time to target", "time to accuracy", "tta", "ttt", "time", "reached_s"),
    "metric": ("metric", "accuracy", "score", "top-1", "top1"),
    "throughput": ("throughput", "samples/s", "images/s", "tokens/s"),
    "seconds": ("seconds", "training time", "run time", "duration"),
    "evaluation_s": ("evaluation", "evaluation time"),
}
#: what a statistic is called -> how it is computed; `best` and `worst` depend on the quantity
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "median": statistics.median,
    "mean": statistics.fmean,
    "average": statistics.fmean,
}
#: words for the most favourable of several runs
BEST_WORDS = ("best", "fastest", "max", "maximum", "min", "minimum", "peak", "highest", "lowest", "record")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A number that a run shows, and the cells that show it."""

    value: float
    cells: tuple[ReportedValue, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """Two contestants that are compared on a task, and the claim that does; without a claim, roles do."""

    challenger: str
    baseline: str
    claim: ReportedRow | None
    #: the task on which they are; empty where there is but one
    task: str = ""


Measure = Callable[[ReportedRun], Measured | None]


class Contest:
    """A report with what can be computed from it."""

    def __init__(self, report: BenchmarkReport) -> None:
        self.report = report

    # -- target and metric -------------------------------------------------------------------------

    @cached_property
    def metric_name(self) -> str:
        """What the metric is called, as far as it is said."""
        said = self.report.stated.get("metric_name")
        if said is not None:
            return said.text.lower()
        for run in self.report.runs:
            for row in (*run.evaluations, run.fields):
                if "metric" in row:
                    return row["metric"].column.rpartition(".")[2].lower()
        return ""

    @cached_property
    def higher_is_better(self) -> bool:
        said = self.report.stated.get("better")
        if said is not None:
            return said.text.lower() in ("higher", "more", "up")
        return not any(word in self.metric_name for word in LESS_IS_BETTER)

    def target(self, run: ReportedRun) -> ReportedValue | None:
        return run.get("target") or self.report.stated.get("target")

    def level(self, run: ReportedRun) -> float | None:
        """The target as a number on the scale of the metric: 97 is 0.97 where the metric is a share."""
        target = self.target(run)
        number = target.number if target is not None else None
        if number is None or not self._largest_metric:
            return number
        if number > 1.5 and self._largest_metric <= 1:
            return number / 100
        return number * 100 if number <= 1 and self._largest_metric > 1.5 and self._shares else number

    @cached_property
    def _shares(self) -> bool:
        """Whether the metric is one that goes up to 1 or 100."""
        return any(word in self.metric_name for word in ("acc", "top", "f1", "share"))

    @cached_property
    def _largest_metric(self) -> float:
        return max(
            (cell.number or 0.0 for run in self.report.runs for cell in self.metrics(run)), default=0.0
        )

    def meets(self, value: float, target: float) -> bool:
        return value >= target if self.higher_is_better else value <= target

    def best(self, values: Sequence[float]) -> float:
        """The best of several metrics."""
        return max(values) if self.higher_is_better else min(values)

    def metrics(self, run: ReportedRun) -> list[ReportedValue]:
        """All values of the metric in a run, in order."""
        rows = [*run.evaluations, *([run.fields] if "metric" in run.fields else [])]
        return [row["metric"] for row in rows if "metric" in row and row["metric"].number is not None]

    def crossing(self, run: ReportedRun) -> int | None:
        """The first evaluation that meets the target."""
        level = self.level(run)
        for number, row in enumerate(run.evaluations if level is not None else ()):
            value = row["metric"].number if "metric" in row else None
            if value is not None and level is not None and self.meets(value, level):
                return number
        return None

    def ever_reached(self, run: ReportedRun) -> bool:
        """Whether a run shows the target in any of its numbers."""
        level = self.level(run)
        if run.number("reached_s") is not None:
            return True
        values = [value.number for value in self.metrics(run)]
        return level is not None and any(self.meets(one, level) for one in values if one is not None)

    # -- quantities --------------------------------------------------------------------------------

    def evaluation_s(self, run: ReportedRun, last: int | None = None) -> float:
        """Seconds of the evaluations up to one of them."""
        rows = run.evaluations if last is None else run.evaluations[: last + 1]
        found = [row["evaluation_s"].number or 0.0 for row in rows if "evaluation_s" in row]
        return sum(found) if rows else run.number("evaluation_s") or 0.0

    def measured(self, run: ReportedRun, quantity: str) -> Measured | None:
        """A quantity of a run."""
        if quantity == "metric":
            values = self.metrics(run)
            return _measured(values[-1]) if values else None
        if quantity == "reached_s":
            return self._reached(run)
        if quantity == "seconds" and "seconds" not in run.fields and run.evaluations:
            return _measured(run.evaluations[-1].get("seconds"))
        return _measured(run.get(quantity))

    def _reached(self, run: ReportedRun) -> Measured | None:
        if run.number("reached_s") is not None:
            return _measured(run.get("reached_s"))
        place = self.crossing(run)
        return _measured(run.evaluations[place].get("seconds")) if place is not None else None

    def without_evaluation(self, run: ReportedRun) -> Measured | None:
        """The time to the target, less the evaluations until then."""
        place, reached = self.crossing(run), self._reached(run)
        if reached is None or place is None or "reached_s" in run.fields:
            return None
        rows = run.evaluations[: place + 1]
        cells = tuple(row["evaluation_s"] for row in rows if "evaluation_s" in row)
        spent = self.evaluation_s(run, place)
        return Measured(value=reached.value - spent, cells=(*reached.cells, *cells)) if cells else None

    # -- comparisons -------------------------------------------------------------------------------

    @cached_property
    def pairings(self) -> tuple[Pairing, ...]:
        """Who is compared with whom: by claims, and everyone with those who have the role of a baseline. Each
        pair once a task, by its first claim.
        """
        found: dict[tuple[str, str, str], Pairing] = {}
        for challenger, baseline, claim in (*self._claimed, *self._by_role):
            named = claim["task"].text if claim is not None and "task" in claim else ""
            for task in [named] if named else self._tasks:
                pair = Pairing(challenger=challenger, baseline=baseline, claim=claim, task=task)
                found.setdefault((challenger, baseline, task), pair)
        return tuple(found.values())

    @cached_property
    def _claimed(self) -> list[tuple[str, str, ReportedRow | None]]:
        known = set(self.report.names)
        rows = [claim for claim in self.report.claims if "contestant" in claim and "over" in claim]
        found = [(claim["contestant"].text, claim["over"].text, claim) for claim in rows]
        return [one for one in found if {one[0], one[1]} <= known and one[0] != one[1]]

    @cached_property
    def _by_role(self) -> list[tuple[str, str, ReportedRow | None]]:
        baselines = list(self.report.baselines())
        others = [name for name in self.report.names if name not in baselines]
        return [(name, baseline, None) for baseline in baselines for name in others]

    @cached_property
    def _tasks(self) -> list[str]:
        return list(dict.fromkeys(run.text("task") for run in self.report.runs))

    def sides(self, pair: Pairing) -> tuple[list[ReportedRun], list[ReportedRun]]:
        """The runs of both contestants of a pairing, on its task."""
        chosen = (self.runs_of(name, pair.claim) for name in (pair.challenger, pair.baseline))
        ours, theirs = ([run for run in runs if run.text("task") in ("", pair.task)] for runs in chosen)
        return ours, theirs

    def runs_of(self, contestant: str, claim: ReportedRow | None = None) -> list[ReportedRun]:
        """The runs of a contestant; with a claim, those of the task, batch and precision that it names."""
        chosen = list(self.report.by_contestant.get(contestant, ()))
        for name in ("task", "batch", "precision", "devices") if claim is not None else ():
            wanted = claim.get(name) if claim is not None else None
            if wanted is not None:
                chosen = [run for run in chosen if run.text(name) in ("", wanted.text)]
        return chosen

    @cached_property
    def cells(self) -> Mapping[tuple[str, tuple[str, ...]], Sequence[ReportedRun]]:
        """Repetitions: runs of one contestant with equal settings."""
        found: dict[tuple[str, tuple[str, ...]], list[ReportedRun]] = {}
        for run in self.report.runs:
            found.setdefault((run.contestant, run.settings), []).append(run)
        return found

    @cached_property
    def statistical(self) -> bool:
        """Whether the report is about learning, whose results vary with the seed."""
        return any(
            self.metrics(run) or "reached_s" in run.fields or self.target(run) for run in self.report.runs
        )

    # -- claims ------------------------------------------------------------------------------------

    def quantity(self, claim: ReportedRow) -> str:
        """The field that a claim is about; empty where it is not known."""
        said = claim["quantity"].text.lower().replace("_", " ") if "quantity" in claim else ""
        for name, words in QUANTITIES.items():
            if said in words or said == name.replace("_", " "):
                return name
        return ""

    def smaller_is_better(self, quantity: str) -> bool:
        return not self.higher_is_better if quantity == "metric" else quantity != "throughput"

    def values(self, contestant: str, claim: ReportedRow, measure: Measure) -> list[Measured]:
        """What a claim's runs of a contestant show; a run that never reached the target took forever."""
        found = []
        for run in self.runs_of(contestant, claim):
            one = measure(run)
            if one is None and self.quantity(claim) == "reached_s" and not self.ever_reached(run):
                one = Measured(value=math.inf, cells=first_cells(iter(self.metrics(run)[-1:])))
            if one is None:
                return []
            found.append(one)
        return found


def _measured(cell: ReportedValue | None) -> Measured | None:
    number = cell.number if cell is not None else None
    return Measured(value=number, cells=(cell,)) if cell is not None and number is not None else None


def advantage(one: float, other: float, smaller_is_better: bool) -> float:
    """How many times as good the one is as the other; not a number where it cannot be said."""
    above, below = (other, one) if smaller_is_better else (one, other)
    return above / below if below and math.isfinite(above) and math.isfinite(below) else math.nan


def distinct(runs: Sequence[ReportedRun]) -> int:
    """Independent repetitions: distinct seeds where they are given, else runs."""
    seeds = {run.text("seed") for run in runs if run.text("seed")}
    return len(seeds) if seeds else sum(run.repeats for run in runs)


def plain(value: float) -> str:
    """A number for a sentence."""
    return f"{value:.4g}"


def seconds(value: float) -> str:
    """A time for a sentence."""
    return f"{value:.4g} s"


def spread(values: Sequence[float]) -> str:
    """Median and range of a few values."""
    middle = plain(statistics.median(values))
    return f"{middle} (median of {len(values)}, {plain(min(values))} to {plain(max(values))})"


def first_cells(rows: Iterator[ReportedValue | None], most: int = 6) -> tuple[ReportedValue, ...]:
    """The first few cells that are there."""
    return tuple(cell for cell in rows if cell is not None)[:most]
