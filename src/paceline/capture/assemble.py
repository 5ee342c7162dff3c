"""From the log of a step to the segments of a workload."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from paceline.capture.record import LogEntry, StepRecorder
from paceline.spec.vocabulary import Phase
from paceline.spec.workload import Op, Segment


@dataclass
class _Run:
    """Consecutive events of one scope, or one repetition of a folded block."""

    scope: int
    events: list[LogEntry] = field(default_factory=list)
    repeat_of: int = -1


def segments(recorder: StepRecorder, backward_start: int) -> tuple[list[Segment], list[int]]:
    """The distinct segments, and for each stretch of the step, in order, which of them it is.

    `backward_start` is the position in the log at which the backward pass began.
    """
    runs = _runs(recorder)
    kinds = memory_kinds(recorder.events, backward_start)
    patterns = {run.repeat_of for run in runs if run.repeat_of >= 0}
    merged: dict[int, list[LogEntry]] = defaultdict(list)
    longest: dict[int, _Run] = {}
    for run in runs:
        if run.scope in patterns:
            merged[run.scope] += run.events
            if run.scope not in longest or len(run.events) > len(longest[run.scope].events):
                longest[run.scope] = run
    out: list[Segment] = []
    order: list[int] = []
    index_of: dict[int, int] = {}
    # repetitions met before their pattern: backward runs last block first
    waiting: list[tuple[int, int]] = []
    for run in runs:
        if run.repeat_of >= 0:
            order.append(index_of.get(run.repeat_of, -1))
            if order[-1] < 0:
                waiting.append((len(order) - 1, run.repeat_of))
            continue
        if run.scope in patterns:
            if run is not longest[run.scope]:
                continue  # a smaller part of a pattern: merged into its largest
            index_of[run.scope] = len(out)
            events = merged[run.scope]
        else:
            events = run.events
        if not events:
            continue
        scope = recorder.scopes[run.scope]
        out.append(_segment(scope.path, scope.phase, events, kinds))
        order.append(len(out) - 1)
    for position, scope_index in waiting:
        order[position] = index_of[scope_index]
    return out, order


def _settled(recorder: StepRecorder) -> list[LogEntry]:
    """The log without the releases that a pattern counts for the blocks that repeat it."""
    freed = {e.tensor: recorder.scopes[e.segment] for e in recorder.events if e.what == "free"}

    def counted(number: int) -> bool:
        return any(
            twin in freed and freed[twin].path == path and freed[twin].phase != Phase.FORWARD
            for path, twin in recorder.twins.get(number, ())
        )

    return [e for e in recorder.events if e.what != "free" or not counted(e.tensor)]


def _runs(recorder: StepRecorder) -> list[_Run]:
    scopes = {(s.path, s.phase, s.call): i for i, s in enumerate(recorder.scopes)}
    runs: list[_Run] = []
    for event in _settled(recorder):
        if event.what == "fold":
            _, source, phase, call = event.data
            runs.append(_Run(-1, repeat_of=scopes[source, phase, call]))
        elif not runs or runs[-1].scope != event.segment:
            runs.append(_Run(event.segment, [event]))
        else:
            runs[-1].events.append(event)
    return _joined(runs)


def _joined(runs: list[_Run]) -> list[_Run]:
    """Calls that launch nothing and keep nothing go with the run before them; those after a repetition, its
    pattern has.
    """
    out: list[_Run] = []
    for run in runs:
        idle = run.repeat_of < 0 and all(e.op is None and e.what not in ("alloc", "free") for e in run.events)
        if not (idle and out):
            out.append(run)
        elif out[-1].repeat_of < 0:
            out[-1].events += run.events
    return out


def memory_kinds(events: list[LogEntry], backward_start: int) -> dict[int, tuple[str, int]]:
    """Kind and size of each storage that the step allocates."""
    kinds: dict[int, tuple[str, int]] = {}
    freed_at = {e.tensor: i for i, e in enumerate(events) if e.what == "free"}
    gradients = {e.tensor for e in events if e.what == "ready"}
    for i, event in enumerate(events):
        if event.what not in ("alloc", "known"):
            continue
        end = freed_at.get(event.tensor, len(events))
        if event.tensor in gradients:
            kind = "gradients"
        elif i < backward_start <= end:
            kind = "activations"
        else:
            kind = "temporary"
        kinds[event.tensor] = (kind, event.bytes)
    return kinds


def _segment(path: str, phase: str, events: list[LogEntry], kinds: dict[int, tuple[str, int]]) -> Segment:
    ops: list[Op] = []
    live: dict[str, int] = defaultdict(int)
    total = best = calls = modules = 0
    peak: dict[str, int] = {}
    for event in events:
        calls += event.what == "call"
        modules += event.what == "module"
        if event.op is not None:
            ops.append(event.op)
            continue
        if event.what not in ("alloc", "free") or event.tensor not in kinds:
            continue
        kind, size = kinds[event.tensor]
        change = size if event.what == "alloc" else -size
        live[kind] += change
        total += change
        if total > best:
            best, peak = total, dict(live)
    return Segment(path, phase, tuple(ops), {k: v for k, v in live.items() if v}, peak, calls, modules)
