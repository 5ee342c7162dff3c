"""`check`: what was predicted for a run, what was measured, and where they part."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.train.record import read
from paceline.units import show

#: phases of a step, in order
PHASES = ("forward", "backward", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Seconds per step by phase, predicted and measured (median of the steps after the first few)."""

    title: str
    steps: int
    predicted_s: Mapping[str, float]
    measured_s: Mapping[str, float]

    @property
    def error(self) -> float:
        """Of the step, predicted over measured less one."""
        return self.predicted_s["step"] / self.measured_s["step"] - 1

    @property
    def parts(self) -> str:
        """The phase that explains most of the difference."""
        apart = {phase: self.measured_s[phase] - self.predicted_s[phase] for phase in PHASES if phase in self.predicted_s}
        if not apart:
            return ""
        worst = max(apart, key=lambda phase: abs(apart[phase]))
        more = "longer" if apart[worst] > 0 else "shorter"
        return f"they part most in the {worst} pass: {show(abs(apart[worst]), 'time')} {more} than predicted"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "error": self.error, "parts": self.parts}

    def __rich__(self) -> Any:
        from paceline.report.training import checked

        return checked(self.title, self.parts, (*PHASES, "step"), self.predicted_s, self.measured_s)


def check(run: Path | str, *, skip: int = 5) -> Check:
    """Compares a recorded run with the prediction in its first line; the first `skip` steps (warm-up, watching) do not count."""
    lines = read(run)
    head = next((line for line in lines if line["kind"] == "predicted"), None)
    steps = [line for line in lines if line["kind"] == "step"]
    if head is None:
        raise DataError(f"the run {str(run)!r} holds no prediction; record it with `paceline train --record` and at least {skip + 1} steps")
    counted = [line for line in steps if line["step"] > max(skip, head.get("step", 0))] or steps
    if not counted:
        raise DataError(f"the run {str(run)!r} holds no step")
    names = [f"{phase}_s" for phase in (*PHASES, "step")]
    measured = {name.removesuffix("_s"): statistics.median(line[name] for line in counted) for name in names if name in counted[0]}
    first = lines[0]
    title = f"{first.get('task', 'run')}, {first.get('strategy', '')}, {first.get('world', '?')} ranks, {len(counted)} steps"
    return Check(title=title, steps=len(counted), predicted_s=head["seconds"], measured_s=measured)
