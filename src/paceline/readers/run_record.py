"""Our own records of runs (`paceline train --record`): a JSON object a line, `kind` run, step or end.

Format: `paceline.train.record`. A last line that was cut off is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from paceline.readers.training_logs import LoggedStep, TrainingLog


def read(lines: Iterable[str], path: str) -> TrainingLog | None:
    """The log; None where its lines are not those of a record."""
    steps: list[LoggedStep] = []
    run: dict[str, Any] = {}
    for line in lines:
        entry = _entry(line)
        if entry is None and not run:
            return None
        if entry is None:
            continue
        if entry["kind"] == "run":
            run = entry
        elif entry["kind"] == "step":
            steps.append(_step(entry))
    if not run:
        return None
    return TrainingLog(
        path=path,
        program="paceline",
        steps=tuple(steps),
        devices=_whole(run.get("world")),
        global_batch=_whole(run.get("batch")),
        arguments={key: str(value) for key, value in run.items() if key not in ("kind", "world", "batch")},
    )


def _entry(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and "kind" in found else None


def _step(entry: dict[str, Any]) -> LoggedStep:
    lasted = entry.get("step_s")
    seconds = float(lasted) if isinstance(lasted, int | float) and lasted > 0 else None
    batch = _whole(entry.get("batch"))
    return LoggedStep(
        number=_whole(entry.get("step")),
        seconds=seconds,
        samples_per_s=batch / seconds if batch and seconds else None,
    )


def _whole(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0
