"""Before and after: what an edit changes of a step, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.spec.prediction import DistributedPrediction
from paceline.spec.whatif import Change, Reason
from paceline.whatif.edits import Edit, apply
from paceline.whatif.subject import Subject

#: a part of the step that changes by less than this share of it is not a reason
LEAST = 0.002


def change(subject: Subject, edits: Sequence[Edit | str]) -> Change:
    """What becomes of a step when fields are edited."""
    edited = apply(subject, edits)
    before, after = subject.predict(), edited.predict()
    return Change(
        edits=tuple(str(edit) for edit in edits), before=before, after=after, reasons=reasons(before, after)
    )


def reasons(before: DistributedPrediction, after: DistributedPrediction) -> tuple[Reason, ...]:
    """The parts of the critical path whose time changed, by how much; they add up to the change of the
    step.
    """
    found: dict[str, list[Any]] = {}
    for i, prediction in enumerate((before, after)):
        for part in prediction.breakdown:
            found.setdefault(part.name, [part.bound_by, 0.0, 0.0])[1 + i] += part.seconds
    listed = [Reason(part=name, bound_by=kind, before_s=a, after_s=b) for name, (kind, a, b) in found.items()]
    least = LEAST * max(before.step_s, after.step_s)
    return tuple(sorted((r for r in listed if abs(r.saved_s) >= least), key=lambda r: -abs(r.saved_s)))
