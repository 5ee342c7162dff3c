"""Times to a target as predicted: steps from the law of large batches, seconds of a step from what a rank
does alone and from the link.

Held out, so that a prediction never sees the times that it is compared with: steps come from the first two
fifths of the seeds of the smallest and the largest batch. Seconds of steps come from the facts, and from the
same seeds of the baseline: by what factor and by how much its steps there were longer than the facts say
holds for every step of the task. Compared are the medians of the other seeds, and of every seed of the
batches between.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paceline.bench.tta.outcome import TargetRow, TargetRun, TargetTable
from paceline.cost.learning import fitted_law
from paceline.spec.learning import Learning, LearningCurve
from paceline.spec.synchronisation import PLAIN

if TYPE_CHECKING:
    from paceline.train.probe import Machine
    from paceline.train.profile import Profile

#: share of the seeds from which steps are predicted
_SEEN = 0.4
HELD_OUT = (
    "steps: the law of large batches through seeds {seen} of batches {ends}; compared with the other seeds"
    " there, and with all seeds of the batches between. Seconds of steps: a rank alone, the link and the"
    " encoders, corrected by a factor and a constant for each task, from the same seeds of {base}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a row is expected to take. Seconds."""

    steps: float
    step_s: float
    evaluations: float
    evaluation_s: float

    @property
    def seconds(self) -> float:
        return self.steps * self.step_s + self.evaluations * self.evaluation_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Correction:
    """Seconds that were measured, from those that the facts say: a factor for what other work takes of the
    machine, and a constant for what the facts do not know of.
    """

    factor: float = 1.0
    constant_s: float = 0.0

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> _Correction:
        """Through (said, measured) of the shortest and the longest; where the machine would be faster than
        said a constant alone, where the line would start below zero a factor alone.
        """
        (low, low_s), (high, high_s) = min(points), max(points)
        factor = (high_s - low_s) / (high - low) if high > low else 1.0
        if factor < 1.0:
            return cls(constant_s=max(0.0, statistics.fmean(m - said for said, m in points)))
        constant_s = low_s - factor * low
        if constant_s < 0:
            return cls(factor=max(1.0, statistics.fmean(m / said for said, m in points)))
        return cls(factor=factor, constant_s=constant_s)

    def __call__(self, said_s: float) -> float:
        return self.factor * said_s + self.constant_s


@dataclass(frozen=True, kw_only=True)
class _Basis:
    """What a table is predicted from."""

    table: TargetTable
    lines: Sequence[Mapping[str, Any]]
    #: the smallest and the largest batch, and how many seeds of them are seen
    ends: tuple[int, int]
    seen: int
    #: by task, of steps and of evaluations
    corrections: Mapping[str, tuple[_Correction, _Correction]] = field(default_factory=dict)

    def facts(self, row: TargetRow) -> list[Mapping[str, Any]]:
        """Of the task and batch of a row."""
        return [line for line in self.lines if line["kind"] == "facts" and _place(line) == row.place]

    def unseen(self, row: TargetRow) -> tuple[TargetRun, ...]:
        """The runs of a row that its prediction has not seen."""
        return tuple(run for run in row.runs if row.batch not in self.ends or run.seed >= self.seen)

    def bare(self, row: TargetRow) -> tuple[float, float]:
        """Seconds of a step and of an evaluation by the facts alone, of which the median counts."""
        facts = self.facts(row)
        steps = (step_seconds(row.strategy, row.optimizer, one, self.table.world) for one in facts)
        return statistics.median(steps), statistics.median(one["evaluation_s"] for one in facts)

    def corrected(self) -> _Basis:
        """With what the seen runs of the baseline say."""
        steps: dict[str, list[tuple[float, float]]] = {}
        looks: dict[str, list[tuple[float, float]]] = {}
        for row in self.table.rows:
            if row.contestant != self.table.baseline or row.batch not in self.ends or not self.facts(row):
                continue
            seen = [run for run in row.runs if run.seed < self.seen]
            step_s, look_s = self.bare(row)
            measured = statistics.median((run.wall_s - run.evaluation_s) / run.steps for run in seen)
            looked = statistics.median(run.evaluation_s / max(1, len(run.evaluations)) for run in seen)
            steps.setdefault(row.task, []).append((step_s, measured))
            looks.setdefault(row.task, []).append((look_s, looked))
        found = {task: (_Correction.through(steps[task]), _Correction.through(looks[task])) for task in steps}
        return replace(self, corrections=found)

    def expected(self, row: TargetRow, law: tuple[float, float]) -> Expected:
        """Of a row, by the law of its contestant."""
        least, critical = law
        steps = least * (1 + critical / row.batch)
        step_s, evaluation_s = self.bare(row)
        of_steps, of_looks = self.corrections.get(row.task, (_Correction(), _Correction()))
        return Expected(
            steps=steps,
            step_s=of_steps(step_s),
            evaluations=steps / self.table.rules[row.task].steps("every", row.batch),
            evaluation_s=of_looks(evaluation_s),
        )


def predicted(table: TargetTable, lines: Sequence[Mapping[str, Any]]) -> TargetTable:
    """The same table with a prediction beside each row whose curve could be fitted."""
    batches = sorted({row.batch for row in table.rows})
    if len(batches) < 2:
        return table
    ends, seen = (batches[0], batches[-1]), max(1, int(_SEEN * table.seeds))
    basis = _Basis(table=table, lines=lines, ends=ends, seen=seen).corrected()
    laws = {key: _law(rows, ends, seen) for key, rows in _curves(table).items()}
    rows = [_with(row, laws[row.task, row.contestant], basis) for row in table.rows]
    words = HELD_OUT.format(
        seen=" ".join(map(str, range(seen))), ends=" and ".join(map(str, ends)), base=table.baseline
    )
    done = replace(table, rows=tuple(rows), held_out=words)
    return replace(done, errors=_errors(done, basis))


def _curves(table: TargetTable) -> dict[tuple[str, str], list[TargetRow]]:
    found: dict[tuple[str, str], list[TargetRow]] = {}
    for row in table.rows:
        found.setdefault((row.task, row.contestant), []).append(row)
    return found


def _points(rows: Sequence[TargetRow], batches: Sequence[int], seeds: int) -> list[tuple[float, float]]:
    """(batch, steps) of runs that met the target."""
    return [
        (row.batch, run.steps)
        for row in rows
        if row.batch in batches
        for run in row.runs
        if run.seed < seeds and run.reached_s is not None
    ]


def _law(rows: Sequence[TargetRow], batches: Sequence[int], seeds: int) -> tuple[float, float] | None:
    points = _points(rows, batches, seeds)
    return fitted_law(points) if len({batch for batch, _ in points}) > 1 else None


def _with(row: TargetRow, law: tuple[float, float] | None, basis: _Basis) -> TargetRow:
    if law is None or not basis.facts(row):
        return row
    one, compared = basis.expected(row, law), basis.unseen(row)
    return replace(
        row,
        predicted_s=one.seconds,
        predicted_steps=one.steps,
        predicted_step_s=one.step_s,
        compared_s=statistics.median(map(_time, compared)) if compared else math.nan,
    )


def _place(line: Mapping[str, Any]) -> tuple[str, int]:
    return line["task"], line["batch"]


def _time(run: TargetRun) -> float:
    return math.inf if run.reached_s is None else run.reached_s


def step_seconds(strategy: str, optimizer: str, facts: Mapping[str, Any], world: int) -> float:
    """Seconds of a step by the model that `auto` decides with, and of what a loop does besides."""
    from paceline.train.parallel import strategy_in
    from paceline.train.probe import Machine, Rates
    from paceline.train.profile import Profile
    from paceline.train.strategies.estimate import Setting, step_s

    found = facts["profiles"][optimizer]
    profile = Profile.from_dict(found)
    machine = Machine(**facts["machine"])
    setting = Setting(
        machine=machine,
        world=world,
        rates=Rates(**facts["rates"]),
        cores=facts["cores"],
        threads=facts["threads"],
    )
    besides = max(0.0, float(found["step_s"]) - profile.compute_s)
    if strategy_in(strategy) == "ps-async":
        return besides + _served_s(profile, machine, world, world * facts["cores"])
    return besides + step_s(strategy, profile, setting)


def _served_s(profile: Profile, machine: Machine, world: int, cores: int) -> float:
    """A worker's step through a server on the same machine: gradients up, an update there, parameters down.

    Workers and server share the cores: their work is the least that a step takes.
    """
    way_s = machine.latency_s + profile.bytes / machine.link_Bps
    alone_s = profile.compute_s + 2 * way_s
    served_s = profile.update_s + 2 * way_s
    return max(alone_s, world * (profile.compute_s + way_s + served_s) / cores)


def _errors(table: TargetTable, basis: _Basis) -> dict[str, float]:
    """Mean absolute errors of parts of the predictions, and where a batch is held out with all its seeds."""
    steps, seconds, bare = list[float](), list[float](), list[float]()
    for row in table.rows:
        if row.predicted_steps is None or row.predicted_step_s is None:
            continue
        seconds.append(row.predicted_step_s / row.step_s - 1)
        bare.append(basis.bare(row)[0] / row.step_s - 1)
        found = [run.steps for run in basis.unseen(row) if run.reached_s is not None]
        if found:
            steps.append(row.predicted_steps / statistics.median(found) - 1)
    errors = {
        "steps to the target": _mean(steps),
        "seconds of a step": _mean(seconds),
        "seconds of a step without correction": _mean(bare),
    }
    for batch in sorted({row.batch for row in table.rows}):
        errors[f"steps at batch {batch}, held out with all its seeds"] = _mean(_left_out(table, batch))
    return {name: value for name, value in errors.items() if value is not None}


def _left_out(table: TargetTable, batch: int) -> list[float]:
    """Errors of the steps at a batch by laws through all the others."""
    found = []
    for rows in _curves(table).values():
        others = [row.batch for row in rows if row.batch != batch]
        law = _law(rows, others, table.seeds)
        own = next((row for row in rows if row.batch == batch), None)
        if law is not None and own is not None and math.isfinite(own.steps):
            found.append(law[0] * (1 + law[1] / batch) / own.steps - 1)
    return found


def _mean(errors: Sequence[float]) -> float | None:
    return statistics.fmean(map(abs, errors)) if errors else None


def learning(table: TargetTable, task: str, lines: Sequence[Mapping[str, Any]]) -> Learning | None:
    """The record of a task from all its runs; None where no curve could be fitted."""
    rules = table.rules[task]
    curves = {}
    for (name, contestant), rows in _curves(table).items():
        curve = _curve(contestant, rows, table, lines) if name == task else None
        if curve is not None:
            curves[contestant] = curve
    if not curves:
        return None
    return Learning(task=task, metric="accuracy", target=rules.target, fixed=rules.fixed, curves=curves)


def _curve(
    name: str, rows: Sequence[TargetRow], table: TargetTable, lines: Sequence[Mapping[str, Any]]
) -> LearningCurve | None:
    batches = sorted(row.batch for row in rows)
    points = _points(rows, batches, table.seeds)
    law = _law(rows, batches, table.seeds)
    if law is None:
        return None
    apart = [math.log(steps / (law[0] * (1 + law[1] / batch))) for batch, steps in points]
    first = rows[0]
    return LearningCurve(
        name=name,
        synchronisation=_word(first.strategy),
        optimizer=first.optimizer,
        least_steps=law[0],
        critical_batch=law[1],
        batches=(batches[0], batches[-1]),
        seeds=table.seeds,
        spread=math.sqrt(statistics.fmean(one * one for one in apart)),
        how=f"paceline bench tta, {len(points)} runs on {table.world} ranks",
        noise_scale=_noise(first.task, name, lines),
    )


def _word(strategy: str) -> str:
    """A strategy as plans call it; exact averages are one word."""
    name = strategy.partition(":")[0]
    return PLAIN.average if name in ("ddp", "allreduce", "overlap", "priority", "auto", "ps-sync") else name


def _noise(task: str, name: str, lines: Sequence[Mapping[str, Any]]) -> float | None:
    """The median over the second halves of the runs that measured it."""
    found = [
        one
        for line in lines
        if line["kind"] == "noise" and (line["task"], line["contestant"]) == (task, name)
        for one in line["noise_samples"]
    ]
    return statistics.median(found) if found else None
