"""Plans side by side on one cluster: time, what is exposed, memory, and what each may cost in accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from paceline.errors import PlanError, SpecError
from paceline.spec.learning import Learning, TimeToTarget, named
from paceline.spec.plan import Plan
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.synchronisation import PLAIN
from paceline.spec.whatif import BreakEven, Comparison, Row
from paceline.whatif.edits import Edit, apply
from paceline.whatif.subject import Subject

#: factors of the network's rate at which a relaxation is tried, two in a decade, and how near a break-even is
#: found
FACTORS, NEAR = tuple(10 ** (half / 2) for half in range(-8, 7)), 0.005
#: logarithm of the throughput over that of the plain plan from which a relaxation pays: less is rounding
PAYS = 1e-3


def compare(
    subject: Subject, plans: Sequence[str], *, break_even: bool = False, learning: str | None = None
) -> Comparison:
    """Predicts a subject under each of the plans; words of the subject's own plan hold where these do not say
    otherwise. `learning` names a record (`paceline.spec.learning.named`), for times to its target.
    """
    record = named(learning) if learning is not None else None
    rows = []
    for text, plan in [(text, _merged(subject.plan, Plan.parse(text))) for text in plans]:
        try:
            edited = replace(subject, plan=plan)
            found = edited.predict()
            relaxed = break_even and not edited.plan.relax.plain and edited.cluster.nodes > 1
            rows.append(
                Row(
                    plan=text,
                    prediction=found,
                    break_even=find_break_even(edited) if relaxed else None,
                    to_target=_to_target(record, found),
                )
            )
        except PlanError as error:
            rows.append(Row(plan=text, why_not=str(error).removeprefix("plan cannot run: ")))
    return Comparison(subject=f"{subject.model.name} on {subject.cluster.name}", rows=tuple(rows))


def _to_target(record: tuple[Learning, str] | None, found: DistributedPrediction) -> TimeToTarget | None:
    """None also where the record does not know how the plan synchronises, unless it has to."""
    if record is None:
        return None
    learning, curve = record
    try:
        return learning.time(found, curve)
    except SpecError:
        return None


def _merged(base: Plan, given: Plan) -> Plan:
    """A plan with the words of another where it does not say."""
    usual = Plan()
    return replace(
        base,
        **{
            name: value
            for name in Plan.__dataclass_fields__
            if (value := getattr(given, name)) != getattr(usual, name)
        },
    )


def find_break_even(subject: Subject) -> BreakEven:
    """The network's rates at which a relaxed plan is faster than the same plan without the relaxation."""
    plain = replace(subject, plan=replace(subject.plan, relax=PLAIN))
    tier = next((t for t in reversed(subject.cluster.tiers) if t.network), subject.cluster.tiers[-1])

    def pays(factor: float) -> bool:
        edit = Edit(path=f"network.{tier.name}.bandwidth", value=f"x{factor!r}")
        slow, fast = (apply(s, [edit]).predict() for s in (plain, subject))
        return math.log(fast.throughput / slow.throughput) > PAYS

    shared = tier.node_bandwidth_Bps
    rate = shared / subject.cluster.node_devices if shared is not None else tier.bandwidth_Bps
    tried = [(factor, pays(factor)) for factor in FACTORS]
    edges = [
        rate * _edge(pays, before[0], after[0]) for before, after in pairwise(tried) if before[1] != after[1]
    ]
    # where it pays at the lowest rate, the first range has no lower end; where it does at the highest, the
    # last no upper one
    ends = [*([None] if tried[0][1] else []), *edges, *([None] if tried[-1][1] else [])]
    return BreakEven(ranges=tuple(zip(ends[::2], ends[1::2], strict=True)))


def _edge(pays: Callable[[float], bool], low: float, high: float) -> float:
    """The factor between two at which a relaxation begins to pay, or ceases to."""
    first = pays(low)
    while high / low > 1 + NEAR:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) == first else (low, middle)
    return math.sqrt(low * high)
