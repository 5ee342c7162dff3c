"""`check`: what was predicted for a run, what was measured, and where they part."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.sim.timeline import Span, Timeline
from paceline.train.record import NAME, TRACE, read
from paceline.units import show

#: beside the record: measured and predicted steps in one trace
OVERLAY = "check.json"

#: phases of a step, in order
PHASES = ("forward", "backward", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Seconds per step by phase, predicted and measured (median of the steps after the first few)."""

    title: str
    steps: int
    predicted_s: Mapping[str, float]
    measured_s: Mapping[str, float]
    #: bytes of the fullest device at its peak, where a plan predicts them and the run says them
    predicted_bytes: float | None = None
    measured_bytes: float | None = None
    #: trace file with both, where the run holds a timeline
    trace: str | None = None

    @property
    def error(self) -> float:
        """Of the step, predicted over measured less one."""
        return self.predicted_s["step"] / self.measured_s["step"] - 1

    @property
    def parts(self) -> str:
        """The phase that explains most of the difference."""
        both = [phase for phase in PHASES if phase in self.predicted_s and phase in self.measured_s]
        apart = {phase: self.measured_s[phase] - self.predicted_s[phase] for phase in both}
        found = []
        if apart:
            worst = max(apart, key=lambda phase: abs(apart[phase]))
            more = "longer" if apart[worst] > 0 else "shorter"
            found.append(
                f"they part most in the {worst} pass: {show(abs(apart[worst]), 'time')} {more} than predicted"
            )
        if self.predicted_bytes and self.measured_bytes:
            found.append(
                f"memory: {show(self.predicted_bytes, 'bytes')} predicted,"
                f" {show(self.measured_bytes, 'bytes')} measured"
            )
        if self.trace:
            found.append(f"both, step by step: {self.trace}")
        return "; ".join(found)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "error": self.error, "parts": self.parts}

    def __rich__(self) -> Any:
        from paceline.report.training import checked

        return checked(self.title, self.parts, (*PHASES, "step"), self.predicted_s, self.measured_s)


def runs(folder: Path) -> list[Path]:
    """The run that a folder (or file) is, or those in it: where there are several, each strategy and seed has
    a folder of its own.
    """
    return (
        [folder]
        if (folder / NAME).exists()
        else sorted(path.parent for path in folder.glob(f"*/{NAME}")) or [folder]
    )


def check(run: Path | str, plan: Path | str | None = None, *, skip: int = 5) -> Check:
    """Compares a recorded run with the prediction in its first line, or with a `plan.json` that `paceline
    plan --emit` wrote; the first `skip` steps (warm-up, watching) do not count."""
    lines = read(run)
    head = (
        planned(plan)
        if plan is not None
        else next((line for line in lines if line["kind"] == "predicted"), None)
    )
    steps = [line for line in lines if line["kind"] == "step"]
    if head is None:
        raise DataError(
            f"the run {str(run)!r} holds no prediction; record it with `paceline train --record` and at least"
            f" {skip + 1} steps"
        )
    size = lines[0].get("batch")  # of the start, which the prediction is for: it may have grown
    counted = [
        line
        for line in steps
        if line["step"] > max(skip, head.get("step", 0)) and line.get("batch", size) == size
    ] or steps
    if not counted:
        raise DataError(f"the run {str(run)!r} holds no step")
    names = [f"{phase}_s" for phase in (*PHASES, "step")]
    measured = {
        name.removesuffix("_s"): statistics.median(line[name] for line in counted)
        for name in names
        if name in counted[0]
    }
    if "step" not in measured:
        raise DataError(f"the run {str(run)!r} has steps without step_s, their seconds")
    first = lines[0]
    title = (
        head.get("title")
        or f"{first.get('task', 'run')}, {first.get('strategy', '')}, {first.get('world', '?')} ranks"
    )
    peaks = [float(line["peak_bytes"]) for line in steps if line.get("peak_bytes")]
    return Check(
        title=f"{title}, {len(counted)} steps",
        steps=len(counted),
        predicted_s=head["seconds"],
        measured_s=measured,
        predicted_bytes=head.get("peak_bytes"),
        measured_bytes=max(peaks, default=None),
        trace=_overlay(Path(run), head),
    )


def _overlay(run: Path, head: Mapping[str, Any]) -> str | None:
    """Writes the measured timeline with the predicted phases of each of its steps beside it; the file, None
    where there is nothing to lay over.
    """
    path = run / TRACE
    if not path.exists() or not all(phase in head["seconds"] for phase in PHASES):
        return None
    measured = Timeline.load(path)
    both = Timeline(
        (*measured.spans, *predicted_spans(measured, head)), f"{measured.title}; predicted beside it"
    )
    both.save(run / OVERLAY)
    return str(run / OVERLAY)


def predicted_spans(measured: Timeline, head: Mapping[str, Any]) -> list[Span]:
    """The phases as predicted, from the start of each measured step on; what the backward pass takes beyond
    its arithmetic is waiting.
    """
    seconds = head["seconds"]
    alone = min(seconds["backward"], head.get("compute_backward_s", seconds["backward"]))
    parts = [
        ("forward", seconds["forward"]),
        ("backward", alone),
        ("wait for gradients", seconds["backward"] - alone),
        ("update", seconds["update"]),
    ]
    out = []
    for begin in (
        span.start_s for span in measured.spans if span.name == PHASES[0] and span.stream == "compute"
    ):
        at = begin
        for name, took in parts:
            if took > 0:
                out.append(Span(name, "predicted", at, at + took, "predicted", {}, 0))
                at += took
    return out


def planned(path: Path | str) -> dict[str, Any]:
    """What a `plan.json` predicts, as the line of a run: waits for other ranks come at the end of the
    backward pass, so they count to it.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        found = data["prediction"]
        step = float(found["step_s"])
        parts = {part["name"]: float(part["seconds"]) for part in found["breakdown"]}
        peak = max(float(stage["memory"]["peak_bytes"]) for stage in found["stages"])
    except OSError as error:
        raise DataError(
            f"no plan at {str(path)!r}: {error.strerror}; give the plan.json that `paceline plan --emit`"
            " wrote"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a plan.json of `paceline plan --emit`: {type(error).__name__} {error}"
        ) from None
    seconds = {"step": step}
    if "forward" in parts and "optimizer" in parts and "pipeline bubble" not in parts:
        forward, update = parts["forward"], parts["optimizer"]
        seconds = {"forward": forward, "backward": step - forward - update, "update": update, "step": step}
    return {"title": f"{data.get('model')} on {data.get('cluster')}", "seconds": seconds, "peak_bytes": peak}
