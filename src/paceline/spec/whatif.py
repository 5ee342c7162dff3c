"""Answers to what-if questions: a change with its reasons, a sweep, bottlenecks, plans side by side, a whole
job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.spec.learning import TimeToTarget
from paceline.spec.prediction import DistributedPrediction, Evidence
from paceline.spec.vocabulary import BoundBy
from paceline.units import show


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One part of the critical path, before and after; seconds."""

    part: str
    bound_by: str
    before_s: float
    after_s: float

    @property
    def saved_s(self) -> float:
        return self.before_s - self.after_s

    def __str__(self) -> str:
        name = (
            f"exposed {self.part}"
            if self.bound_by == BoundBy.COMMUNICATION and self.part != "contention"
            else self.part
        )
        if not self.before_s or not self.after_s:
            return (
                f"{name} {'appeared' if self.after_s else 'went'}:"
                f" {show(self.after_s or self.before_s, 'time')}"
            )
        return f"{name} {'fell' if self.saved_s > 0 else 'rose'} by {show(abs(self.saved_s), 'time')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Two predictions of the same question with some fields edited."""

    edits: tuple[str, ...]
    before: DistributedPrediction
    after: DistributedPrediction
    reasons: tuple[Reason, ...]

    @property
    def speedup(self) -> float:
        """Throughput after over before."""
        return self.after.throughput / self.before.throughput

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        reasons = [
            {
                "part": r.part,
                "before_s": r.before_s,
                "after_s": r.after_s,
                "saved_s": r.saved_s,
                "text": str(r),
            }
            for r in self.reasons
        ]
        return {
            "edits": list(self.edits),
            "speedup": self.speedup,
            "step_s_before": self.before.step_s,
            "step_s_after": self.after.step_s,
            "reasons": reasons,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
        }

    def __rich__(self) -> Any:
        from paceline.report.whatif import change_view

        return change_view(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Throughput in units per second at so many devices."""

    unit: str
    #: weak: each replica keeps its batch; strong: the whole batch is fixed
    kind: str
    devices: tuple[int, ...]
    throughput: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    ideal: tuple[float, ...]
    naive: tuple[float, ...]
    efficiency: tuple[float, ...]
    #: share of the first points' throughput per device that each step to the next point brings per device
    #: added
    marginal: tuple[float, ...]
    #: the last number of devices up to which adding more paid, None: it always did
    pays_to: int | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            name: list(value) if isinstance(value := getattr(self, name), tuple) else value
            for name in self.__dataclass_fields__
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A value of the field swept, and the step there; or why it cannot run."""

    value: str
    number: float
    prediction: DistributedPrediction | None = None
    why_not: str = ""
    #: seconds of an all-reduce of all gradients at the line rate of the network, for the naive guess
    line_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A field swept through values."""

    field: str
    subject: str
    points: tuple[Point, ...]
    #: where the field is the number of nodes
    scaling: Scaling | None = None

    @property
    def found(self) -> list[tuple[Point, DistributedPrediction]]:
        """Points that can run."""
        return [(point, point.prediction) for point in self.points if point.prediction is not None]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        rows = [
            {
                "value": p.value,
                "number": p.number,
                **(_point(p.prediction) if p.prediction is not None else {"why_not": p.why_not}),
            }
            for p in self.points
        ]
        curve = {"scaling": self.scaling.to_dict()} if self.scaling is not None else {}
        return {"field": self.field, "subject": self.subject, "points": rows, **curve}

    def __rich__(self) -> Any:
        from paceline.report.whatif import sweep_view

        return sweep_view(self)


def _point(p: DistributedPrediction) -> dict[str, Any]:
    return {
        "step_s": p.step_s,
        "step_s_low": p.step_s_low,
        "step_s_high": p.step_s_high,
        "throughput": p.throughput,
        "mfu": p.mfu,
        "exposed_s": p.exposed_s,
        "bubble_s": p.bubble_s,
        "bound_by": p.bound_by,
        "peak_bytes": p.peak_bytes,
        "fits": p.fit.fits,
        "devices": p.devices,
        "batch": p.batch,
        "plan": p.plan,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """One resource: what it costs the step. Seconds."""

    name: str
    #: the edit that relieves it
    edit: str
    elasticity: float
    saved_s: float
    #: the step without it, and the resource that would save most then
    step_s: float
    then: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What every resource costs a step, most first; elasticities, and what no resource changes."""

    step_s: float
    bottlenecks: tuple[Bottleneck, ...]

    @property
    def fixed(self) -> float:
        """The share of the step in latencies that no resource changes, and in what rates cannot express."""
        return 1.0 - sum(b.elasticity for b in self.bottlenecks)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        rows = [{name: getattr(b, name) for name in b.__dataclass_fields__} for b in self.bottlenecks]
        return {"step_s": self.step_s, "bottlenecks": rows, "fixed": self.fixed}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A collective that a device takes part in `count` times a step; `size` in bytes as nccl-tests counts
    them, seconds of all of them.
    """

    op: str
    axis: str
    ranks: int
    size: float
    count: int
    algorithm: str
    alpha_s: float
    beta_s: float
    #: bytes that a device sends in all
    bytes: float

    @property
    def seconds(self) -> float:
        return self.alpha_s + self.beta_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """One resource: FLOPs per byte of the step, the FLOP/s of a device that it allows, and its share of the
    step if it were never idle.
    """

    name: str
    intensity: float | None
    ceiling: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConcurrency:
    """Work and depth of a part of the step, on one device; in operations, over one micro-batch."""

    name: str
    count: int
    work: float
    depth: float

    @property
    def parallelism(self) -> float:
        """Average parallelism: operations that could run at the same time."""
        return self.work / max(1.0, self.depth)


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """A step of one device: FLOPs, bytes through its memory, what it sends, and its layers."""

    flops: float
    moved_bytes: float
    achieved: float
    roofs: tuple[Roof, ...]
    sent: tuple[Sent, ...]
    layers: tuple[LayerConcurrency, ...]
    compute_s: float
    step_s: float

    @property
    def bsp(self) -> dict[str, float]:
        """Work w (s), h (bytes), g (s/byte), supersteps s, l (s), and the seconds that they add up to."""
        h, count = sum(s.bytes for s in self.sent), sum(s.count for s in self.sent)
        beta, alpha = sum(s.beta_s for s in self.sent), sum(s.alpha_s for s in self.sent)
        return {
            "w_s": self.compute_s,
            "h_bytes": h,
            "g_s_per_byte": beta / h if h else 0.0,
            "supersteps": float(count),
            "l_s": alpha / count if count else 0.0,
            "seconds": self.compute_s + alpha + beta,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""

        def plain(rows: Sequence[Any]) -> list[dict[str, Any]]:
            return [{name: getattr(row, name) for name in row.__dataclass_fields__} for row in rows]

        layers = [
            {**row, "parallelism": layer.parallelism}
            for row, layer in zip(plain(self.layers), self.layers, strict=True)
        ]
        return {
            "flops": self.flops,
            "moved_bytes": self.moved_bytes,
            "achieved_flops_per_s": self.achieved,
            "roofline": plain(self.roofs),
            "collectives": plain(self.sent),
            "bsp": self.bsp,
            "layers": layers,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """The rates of the outermost network, in B/s of one device, at which a relaxed plan is faster than the
    same plan without.

    Each range is (from, to), in rising order; None where it has no such end. No range: the plan is slower at
    every rate.
    """

    ranges: tuple[tuple[float | None, float | None], ...]

    @property
    def always(self) -> bool:
        """Whether it is faster at every rate."""
        return self.ranges == ((None, None),)

    @property
    def bandwidth_Bps(self) -> float | None:
        """The rate below which it is faster; None where that is not so of one rate."""
        return self.ranges[0][1] if len(self.ranges) == 1 and self.ranges[0][0] is None else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "bandwidth_Bps": self.bandwidth_Bps,
            "always": self.always,
            "ranges_Bps": [list(ends) for ends in self.ranges],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan; or why it cannot run."""

    plan: str
    prediction: DistributedPrediction | None = None
    why_not: str = ""
    break_even: BreakEven | None = None
    #: by a record of learning; None where none was given, or it does not know the plan's way of synchronising
    to_target: TimeToTarget | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Plans on one cluster, in the order given."""

    subject: str
    rows: tuple[Row, ...]

    @property
    def best(self) -> Row | None:
        """The fastest that fits: to the target, where times to it are known, else by throughput."""
        fitting = [row for row in self.rows if row.prediction is not None and row.prediction.fit.fits]
        known = [row for row in fitting if row.to_target is not None]
        if known:
            return min(known, key=lambda row: row.to_target.value_s if row.to_target else 0.0)
        return max(
            fitting, key=lambda row: row.prediction.throughput if row.prediction else 0.0, default=None
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        rows = []
        for row in self.rows:
            p = row.prediction
            found: dict[str, Any] = {"why_not": row.why_not} if p is None else p.to_dict()
            rows.append(
                {
                    **found,
                    "plan": row.plan,
                    **({"break_even": row.break_even.to_dict()} if row.break_even is not None else {}),
                    **({"time_to_target": row.to_target.to_dict()} if row.to_target is not None else {}),
                }
            )
        return {
            "subject": self.subject,
            "rows": rows,
            "best": self.best.plan if self.best is not None else None,
        }

    def __rich__(self) -> Any:
        from paceline.report.whatif import comparison_view

        return comparison_view(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRange:
    """A figure with its range."""

    value: float
    low: float
    high: float

    def times(self, factor: float, low: float | None = None, high: float | None = None) -> FigureRange:
        return FigureRange(
            value=self.value * factor,
            low=self.low * (factor if low is None else low),
            high=self.high * (factor if high is None else high),
        )

    def to_dict(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCost:
    """Time to train and what it takes. Seconds, joules, USD."""

    unit: str
    units: float
    steps: int
    step_s: float
    devices: int
    #: of the units, those that a batch above the critical one needs besides
    extra: float
    training_s: FigureRange
    evaluation_s: float
    checkpoint_s: float
    checkpoint_bytes: float
    interval_s: float
    interrupted_s: float
    goodput: FigureRange
    time_s: FigureRange
    device_hours: FigureRange
    money: FigureRange | None
    energy_j: FigureRange | None
    watts: float | None
    provenance: tuple[Evidence, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        out: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, FigureRange):
                value = value.to_dict()
            elif name == "provenance":
                value = [{"what": e.what, "kind": e.kind, "source": e.source} for e in value]
            out[name] = value
        return out

    def __rich__(self) -> Any:
        from paceline.report.whatif import job_view

        return job_view(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One form of parallelism: the degree used, the most there is, bytes that a device sends for it per step,
    and what limits it.
    """

    name: str
    used: int
    most: float
    sent_bytes: float
    limit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A step with what bounds it. `watts` of one device on average."""

    prediction: DistributedPrediction
    resources: Resources
    anatomy: Anatomy
    forms: tuple[Form, ...]
    watts: float | None = None
    watts_source: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        forms = [{name: getattr(form, name) for name in form.__dataclass_fields__} for form in self.forms]
        return {
            "prediction": self.prediction.to_dict(),
            **self.resources.to_dict(),
            "anatomy": self.anatomy.to_dict(),
            "parallelism": forms,
            "watts": self.watts,
            "watts_source": self.watts_source,
        }

    def __rich__(self) -> Any:
        from paceline.report.whatif import explanation_view

        return explanation_view(self)
