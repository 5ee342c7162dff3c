"""The answer to "what is the best plan": the winner, those that came near and why they lost, and the
certificate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.spec.cluster import Cluster
from paceline.spec.device import Device
from paceline.spec.facts import Fact
from paceline.spec.learning import TimeToTarget
from paceline.spec.plan import Plan
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A plan with its prediction; `lost` names the term in which it is worse than the winner."""

    plan: Plan
    cluster: Cluster
    prediction: DistributedPrediction
    #: what the objective counts: seconds, dollars or joules of a step (per sample where plans differ in
    #: batch)
    value: float
    #: seconds that it takes at least
    bound_s: float
    lost: str = ""
    #: what it may change in the result of training; empty where nothing does
    lossy: str = ""
    #: features of it that no measured step had
    unmeasured: tuple[str, ...] = ()
    #: seconds of a step as it ran, and as it was predicted before the measurements; None where it was not run
    measured_s: float | None = None
    first_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        p = self.prediction
        return {
            "plan": str(self.plan),
            "cluster": self.cluster.name,
            "devices": p.devices,
            "step_s": p.step_s,
            "step_s_low": p.step_s_low,
            "step_s_high": p.step_s_high,
            "throughput": p.throughput,
            "mfu": p.mfu,
            "peak_bytes": p.peak_bytes,
            "value": self.value,
            "cost_per_step": self.cost,
            "energy_j": p.energy_j,
            "bound_s": self.bound_s,
            "lost": self.lost,
            "lossy": self.lossy,
            "unmeasured": list(self.unmeasured),
            "measured_s": self.measured_s,
            "first_s": self.first_s,
            "breakdown": {part.name: part.seconds for part in p.breakdown},
        }

    @property
    def uncertainty(self) -> float:
        """By what share the step may be longer than predicted (90 %)."""
        return self.prediction.step_s_high / self.prediction.step_s - 1

    @property
    def cost(self) -> float | None:
        """Dollars of a step, where the device has a price."""
        price = self.cluster.device.price_per_s
        return price * self.prediction.devices * self.prediction.step_s if price else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Over what factors of one quantity (bandwidth, memory, batch) the winner stays the winner, and who wins
    beyond.
    """

    what: str
    low: float | None
    high: float | None
    below: str = ""
    above: str = ""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The best plan of a space, with its certificate: no plan of the space is better by more than `gap_pct`
    percent, as the model predicts.
    """

    model: str
    objective: str
    gbs: int
    seq: int
    space: int
    by_memory: int
    by_bound: int
    #: plans simulated, and plans whose bound would allow them to be better by up to `gap_pct`
    by_evaluation: int
    undecided: int
    gap_pct: float
    elapsed_s: float
    top: tuple[Ranked, ...]
    #: the best plan of features that were all measured, where the winner has one that was not
    measured: Ranked | None = None
    ranges: tuple[Range, ...] = ()
    pareto: tuple[Ranked, ...] = ()
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    #: steps of the whole job, where tokens were given
    steps: float | None = None
    #: how a module was captured; and the sizes of a transformer, which was not
    settings: Mapping[str, Any] = field(default_factory=dict)
    sizes: Transformer | None = None
    #: what running some plans taught: seconds of computation and of communication over those predicted first
    calibration: Mapping[str, float] = field(default_factory=dict)

    @property
    def best(self) -> Ranked:
        return self.top[0]

    @property
    def settled(self) -> bool:
        """Whether the winner has only measured features, or wins over the best that has by more than its
        uncertainty.
        """
        best, other = self.best, self.measured
        if not best.unmeasured:
            return True
        return other is not None and best.value * (1 + best.uncertainty) < other.value

    @property
    def doubt(self) -> str:
        """One line about a winner with features that no measured step had; empty where it has none."""
        best, other = self.best, self.measured
        if not best.unmeasured:
            return ""
        text = f"no step with {' or '.join(best.unmeasured)} was ever measured"
        if other is None:
            return f"{text}, and no plan that fits was found without"
        gain = f"wins by {100 * (1 - best.value / other.value):.1f} %"
        against = "more" if self.settled else "less"
        return (
            f"{text}: the plan {gain} over the best of measured features ({other.plan}), {against} than the "
            f"{100 * best.uncertainty:.0f} % by which its prediction may be off"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        best = self.best.to_dict()
        if self.steps:
            best |= {
                "job_s": self.steps * self.best.prediction.step_s,
                "job_cost": self.steps * self.best.cost if self.best.cost else None,
            }
        return {
            "model": self.model,
            "objective": self.objective,
            "gbs": self.gbs,
            "seq": self.seq,
            "space": self.space,
            "excluded": {
                "memory": self.by_memory,
                "bound": self.by_bound,
                "evaluation": self.by_evaluation,
                "undecided": self.undecided,
            },
            "gap_pct": self.gap_pct,
            "elapsed_s": self.elapsed_s,
            "best": best,
            "top": [ranked.to_dict() for ranked in self.top],
            "ranges": [asdict(r) for r in self.ranges],
            "pareto": [ranked.to_dict() for ranked in self.pareto],
            "doubt": self.doubt,
            "settled": self.settled,
            "measured": self.measured.to_dict() if self.measured else None,
            "notes": list(self.notes),
            "interrupted": self.interrupted,
            "calibration": dict(self.calibration),
            "price": _price(self.best.cluster.device),
        }

    def __rich__(self) -> Any:
        from paceline.report.plan import planned_view

        return planned_view(self)

    def _repr_html_(self) -> str:
        from paceline.report.plan import planned_html

        return planned_html(self)


def _price(device: Device) -> dict[str, Any] | None:
    """USD per hour of a device, how it is known, where from and of what date; None where there is none."""
    if device.price_per_s is None:
        return None
    fact = device.facts.get("price.hour", Fact(value=device.price_per_s, kind="declared", source=device.name))
    rate = 3600 * device.price_per_s
    return {"usd_per_hour": rate, "kind": fact.kind, "source": fact.source, "date": fact.date or None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One model, and where and with what batch it is to be planned; `options` are further words of
    `paceline.plan`.
    """

    model: str
    cluster: str | None = None
    gpus: str | None = None
    device: str | None = None
    gbs: int | None = None
    seq: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """What was said."""
        said = {name: getattr(self, name) for name in ("model", "cluster", "gpus", "device", "gbs", "seq")}
        return {name: value for name, value in (said | dict(self.options)).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The best plan for a question, or why there is none."""

    question: Question
    planned: Planned | None = None
    error: str = ""
    #: of the best plan, by a record of learning; None where none was given
    to_target: TimeToTarget | None = None
    #: False where all plans need more memory than there is
    fits: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the answer as that of a single question, with the question beside it."""
        found = {"error": self.error} if self.planned is None else self.planned.to_dict()
        target = {} if self.to_target is None else {"time_to_target": self.to_target.to_dict()}
        return {"question": self.question.to_dict(), **found, **target}


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Answers to many questions, in their order."""

    answers: tuple[Answer, ...]
    engine: str
    elapsed_s: float
    #: ended by Ctrl-C before all questions had their answers
    interrupted: bool = False

    @property
    def soonest(self) -> Answer | None:
        """The answer that is at the target first; None where no record of learning was given."""
        known = [answer for answer in self.answers if answer.to_target is not None]
        return min(known, key=lambda one: one.to_target.value_s if one.to_target else 0.0, default=None)

    def to_dict(self) -> list[dict[str, Any]]:
        """Plain data for `--json`: a list."""
        return [
            {**answer.to_dict(), **({"soonest": answer is self.soonest} if answer.to_target else {})}
            for answer in self.answers
        ]

    def __rich__(self) -> Any:
        from paceline.report.plan import study_view

        return study_view(self)

    def _repr_html_(self) -> str:
        from paceline.report.plan import study_html

        return study_html(self)
