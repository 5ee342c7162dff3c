"""Times to a target beside predicted steps."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.spec.learning import TimeToTarget
from paceline.units import show


def to_target_view(found: TimeToTarget) -> RenderableType:
    """The time with its interval, and the steps that it is made of."""
    head = Text.assemble(
        (f"{show(found.value_s, 'time')}", "bold"),
        f" to {target_words(found)} (90 %: {show(found.low_s, 'time')} to {show(found.high_s, 'time')}),"
        " without evaluations",
    )
    steps = (
        f"{found.steps:,.0f} steps of {found.batch:,} samples: curve {found.curve}, {found.how}; spreads of"
        " the step and of the runs"
    )
    lines = [head, Text(steps, style="dim")]
    if not found.measured:
        words = f"batch {found.batch:,} lies beyond those that the curve was measured at: extrapolated"
        lines.append(Text(words, style="yellow"))
    return Group(*lines)


def target_words(found: TimeToTarget) -> str:
    """The target for people."""
    return f"{found.target:.4g} {found.metric} of {found.task}"
