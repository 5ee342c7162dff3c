"""How well a task learns at which batch: steps to a target, measured once, that any predicted step can be
multiplied with.

    [task]
    name = "digits-shifted"
    metric = "accuracy"
    target = 0.9
    fixed = "2026-11-19"

    [curves.sgd]
    synchronisation = "allreduce"       # the word of plans; every exact way of averaging shares a curve
    optimizer = "sgd"
    least_steps = 41.2
    critical_batch = 620.0              # samples, of all ranks together
    batches = [64, 4096]                # measured; beyond them the law is extrapolated
    seeds = 5
    spread = 0.12                       # relative, of runs round the law
    noise_scale = 480.0                 # of the gradients, in samples; optional
    how = "paceline bench tta"
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import SpecError, UnknownName, nearest
from paceline.spec.facts import read_text
from paceline.spec.plan import Plan
from paceline.spec.prediction import DistributedPrediction, Prediction
from paceline.spec.synchronisation import PLAIN, Relaxation
from paceline.spec.vocabulary import Mode

#: standard deviations of a normal distribution on each side of its middle 90 %
_NINETY = 1.645
#: how far from the critical batch a batch may be that is tried: there, samples or steps are within 3 % of
#: their fewest
_FAR = 32.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningCurve:
    """Steps to the target against the batch, S_min (1 + B_crit / B) (McCandlish et al. 2018); in samples.

    >>> curve = LearningCurve(name="sgd", synchronisation="allreduce", optimizer="sgd", least_steps=100.0,
    ...                       critical_batch=1000.0, batches=(64, 4096), seeds=5, spread=0.1, how="doctest")
    >>> curve.steps(1000), curve.samples(1000)
    (200.0, 200000.0)
    """

    name: str
    #: as `Relaxation.label` has it
    synchronisation: str
    optimizer: str
    #: steps that no batch goes below
    least_steps: float
    #: the batch that needs twice these steps, and twice the fewest samples
    critical_batch: float
    #: smallest and largest batch that were measured, and runs of each
    batches: tuple[int, int]
    seeds: int
    #: relative standard deviation of runs round the law
    spread: float
    how: str
    #: of the gradients, measured during training; None: it was not
    noise_scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("least_steps", "critical_batch", "spread"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (name == "least_steps" and not value):
                raise SpecError(f"curve {self.name}: {name} must be a number above zero, got {value!r}")

    def steps(self, batch: float) -> float:
        """Steps to the target at a batch."""
        return self.least_steps * (1 + self.critical_batch / batch)

    def samples(self, batch: float) -> float:
        """Samples to the target at a batch."""
        return self.steps(batch) * batch

    def candidates(self) -> tuple[int, ...]:
        """Batches worth a look: powers of two up to `_FAR` times the critical batch on both sides of it, and
        no further than was measured.
        """
        low = max(self.critical_batch / _FAR, self.batches[0])
        high = min(self.critical_batch * _FAR, self.batches[1])
        powers = range(math.ceil(math.log2(max(1.0, low))), math.floor(math.log2(max(1.0, high))) + 1)
        return tuple(2**power for power in powers) or self.batches

    def measured(self, batch: float) -> bool:
        """Whether a batch lies between those that were measured."""
        return self.batches[0] <= batch <= self.batches[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeToTarget:
    """Predicted steps times a predicted step. Seconds; the interval holds 90 %."""

    task: str
    curve: str
    metric: str
    target: float
    batch: int
    steps: float
    samples: float
    value_s: float
    low_s: float
    high_s: float
    #: whether the batch lies between those that the curve was measured at
    measured: bool
    how: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __rich__(self) -> Any:
        from paceline.report.learning import to_target_view

        return to_target_view(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """A task's target and its curves, by contestant."""

    task: str
    metric: str
    target: float
    fixed: str
    curves: Mapping[str, LearningCurve]
    source: str = ""

    def curve(self, relax: Relaxation, name: str = "") -> LearningCurve:
        """The curve called `name`, or that of the way in which a plan synchronises."""
        if name:
            if name not in self.curves:
                known = ", ".join(self.curves)
                raise UnknownName("curve", name, self.curves, f"{self.source} has {known}")
            return self.curves[name]
        wanted = label(relax)
        for curve in self.curves.values():
            if curve.synchronisation == wanted:
                return curve
        known = ", ".join(f"{curve.name} ({curve.synchronisation})" for curve in self.curves.values())
        raise SpecError(
            f"{self.source} has no curve of {wanted}, only {known}; name one, as in {self.source}:NAME, or"
            " measure it: paceline bench tta"
        )

    def time(self, step: Prediction | DistributedPrediction, name: str = "") -> TimeToTarget:
        """The time to the target with a predicted step; `name` is a curve's, by default that of its plan."""
        relax = Plan.parse(step.plan).relax if isinstance(step, DistributedPrediction) else PLAIN
        curve = self.curve(relax, name)
        steps = curve.steps(step.batch)
        below, above = (
            math.hypot(math.log(high / low), _NINETY * curve.spread)
            for low, high in ((step.step_s_low, step.step_s), (step.step_s, step.step_s_high))
        )
        return TimeToTarget(
            task=self.task,
            curve=curve.name,
            metric=self.metric,
            target=self.target,
            batch=step.batch,
            steps=steps,
            samples=steps * step.batch,
            value_s=steps * step.step_s,
            low_s=steps * step.step_s * math.exp(-below),
            high_s=steps * step.step_s * math.exp(above),
            measured=curve.measured(step.batch),
            how=curve.how,
        )

    def to_toml(self) -> str:
        """What `read` takes."""
        head = {"name": self.task, "metric": self.metric, "target": self.target, "fixed": self.fixed}
        parts = ["[task]", *_lines(head)]
        for curve in self.curves.values():
            words = {key: getattr(curve, key) for key in curve.__dataclass_fields__ if key != "name"}
            parts += ["", f"[curves.{_key(curve.name)}]", *_lines(words)]
        return "\n".join(parts) + "\n"


def label(relax: Relaxation) -> str:
    """How a plan synchronises, as far as it changes what is learnt: exact averages are all one."""
    exact = relax.mode in (Mode.REPLICAS, Mode.PS_SYNC) and not relax.compress
    return PLAIN.average if exact else relax.label


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() else f'"{name}"'


def _lines(words: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_written(value)}" for key, value in words.items() if value is not None]


def _written(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_written, value)) + "]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def read(path: Path | str) -> Learning:
    """The record in a file."""
    where = str(path)
    try:
        data = tomllib.loads(read_text(path, "learning"))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{where}: not valid TOML: {error}") from None
    task, curves = data.get("task"), data.get("curves")
    if not isinstance(task, dict) or not isinstance(curves, dict) or not curves:
        raise SpecError(f"{where}: a record of learning has [task] and [curves.NAME]; see docs/benchmarks.md")
    names = ("name", "metric", "target", "fixed")
    if missing := [name for name in names if name not in task]:
        raise SpecError(f"{where}: [task] lacks {', '.join(missing)}")
    return Learning(
        task=str(task["name"]),
        metric=str(task["metric"]),
        target=float(task["target"]),
        fixed=str(task["fixed"]),
        curves={name: _curve(where, name, words) for name, words in curves.items()},
        source=where,
    )


def named(text: str) -> tuple[Learning, str]:
    """What `FILE` or `FILE:CURVE` says: the record, and the name of a curve or nothing."""
    path, _, name = text.rpartition(":")
    if path and not Path(text).exists():
        return read(path), name
    return read(text), ""


def _curve(where: str, name: str, words: Any) -> LearningCurve:
    fields = LearningCurve.__dataclass_fields__
    known = [field for field in fields if field != "name"]
    if not isinstance(words, dict):
        raise SpecError(f"{where}: [curves.{name}] must be a table, got {words!r}")
    for key in words:
        if key not in known:
            near = nearest(key, known)
            hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(known)}"
            raise SpecError(f"{where}: [curves.{name}]: unknown key {key!r}; {hint}")
    if missing := [key for key in known if key not in words and key != "noise_scale"]:
        raise SpecError(f"{where}: [curves.{name}] lacks {', '.join(missing)}")
    try:
        low, high = (int(size) for size in words["batches"])
    except (TypeError, ValueError):
        got = words["batches"]
        raise SpecError(f"{where}: [curves.{name}]: batches are [smallest, largest], got {got!r}") from None
    return LearningCurve(**{**words, "name": name, "batches": (low, high)})
