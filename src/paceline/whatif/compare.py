"""Plans side by side on one cluster: time, what is exposed, memory, and what each may cost in accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import PlanError
from paceline.spec.plan import Plan
from paceline.spec.whatif import BreakEven, Comparison, Row
from paceline.sync import without
from paceline.whatif.edits import Edit, apply
from paceline.whatif.subject import Subject, read_plan

#: factors of the network's rate between which a break-even is looked for, and how near it is found
RANGE, NEAR = (1e-4, 1e3), 0.005


def compare(subject: Subject, plans: Sequence[str], *, break_even: bool = False) -> Comparison:
    """Predicts a subject under each of the plans; words of the subject's own plan hold where these do not say otherwise."""
    rows = []
    for text, plan in [(text, _merged(subject.plan, read_plan(text))) for text in plans]:
        try:
            edited = replace(subject, plan=plan)
            found = edited.predict()
            relaxed = break_even and not edited.plan.relax.plain and edited.cluster.nodes > 1
            rows.append(Row(plan=text, prediction=found, break_even=find_break_even(edited) if relaxed else None))
        except PlanError as error:
            rows.append(Row(plan=text, why_not=str(error).removeprefix("plan cannot run: ")))
    return Comparison(subject=f"{subject.model.name} on {subject.cluster.name}", rows=tuple(rows))


def _merged(base: Plan, given: Plan) -> Plan:
    """A plan with the words of another where it does not say."""
    usual = Plan()
    return replace(base, **{name: value for name in Plan.__dataclass_fields__ if (value := getattr(given, name)) != getattr(usual, name)})


def find_break_even(subject: Subject) -> BreakEven:
    """The network's rate at which a relaxed plan takes as long as the same plan without the relaxation."""
    plain = replace(subject, plan=without(subject.plan))
    tier = next((t for t in reversed(subject.cluster.tiers) if t.network), subject.cluster.tiers[-1])

    def gain(factor: float) -> float:
        edit = Edit(path=f"network.{tier.name}.bandwidth", value=f"x{factor!r}")
        slow, fast = (apply(s, [edit]).predict(closed=True) for s in (plain, subject))
        return math.log(fast.throughput / slow.throughput)

    low, high = RANGE
    at_low, at_high = gain(low), gain(high)
    if at_low <= 0 or at_high >= 0:
        return BreakEven(bandwidth_Bps=None, always=at_high > 0 and at_low > 0)
    while high / low > 1 + NEAR:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    rate = tier.node_bandwidth_Bps / subject.cluster.node_devices if tier.node_bandwidth_Bps is not None else tier.bandwidth_Bps
    return BreakEven(bandwidth_Bps=math.sqrt(low * high) * rate)


