"""Findings about communication: what no computation hides, and who is waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.diagnose.activity import Activity
from paceline.diagnose.findings import Finding, RankTime, TracePlace
from paceline.readers.kineto import Floats
from paceline.units import show

_PLACES = 3
#: share of the collectives that a rank has to come last to, to be called a straggler
OFTEN = 0.5


def exposed(activity: Activity, waits_s: float) -> Iterator[Finding]:
    """Collectives with nothing beside them; `waits_s` of them are waits for other ranks."""
    sent = np.flatnonzero(activity.communicates)
    seconds = activity.exclusive_s[sent]
    total = float(seconds.sum())
    if total <= 0:
        return
    by_op: dict[str, list[float]] = defaultdict(list)
    for place, exposed_s in zip(sent.tolist(), seconds.tolist(), strict=True):
        by_op[call_name(activity, place)].append(exposed_s)
    ranked = sorted(by_op.items(), key=lambda item: -sum(item[1]))[:_PLACES]
    evidence = [f"{name}: {len(lost)} calls, {show(sum(lost), 'time')} exposed" for name, lost in ranked]
    if waits_s > 0:
        evidence.append(f"{show(waits_s, 'time')} of all calls are waits for slower ranks")
    work = activity.work
    longest = sent[np.argsort(-seconds)[:_PLACES]]
    yield Finding(
        kind="exposed-communication",
        title=f"communication that no computation hides ({100 * total / activity.step_s:.0f} % of the step)",
        saves_s=total,
        basis="all of it: the least of a step with communication hidden",
        advice="overlap it (buckets, prefetch), send less of it (compression, hierarchical sharding, larger"
        " micro-batches), or a faster link; `paceline plan` compares these",
        evidence=tuple(evidence),
        places=tuple(
            TracePlace(float(work.start_s[i]), float(work.end_s[i]), call_name(activity, int(i)))
            for i in longest
        ),
    )


def call_name(activity: Activity, place: int) -> str:
    """A collective by its operation, and where it is known, its group."""
    trace = activity.trace
    detail = int(activity.work.detail[place]) if activity.on_device else -1
    if detail < 0:
        name: str = trace.names[activity.work.name[place]]
        return name.split("(")[0][:60]
    call = trace.calls[detail]
    return f"{call.op} of {call.group_size} ranks" + (f" ({call.group})" if call.group else "")


@dataclass(frozen=True, slots=True)
class Meeting:
    """Collectives of one kind and group on the ranks that take part: places of the ranks, a row of"
    " seconds each."""

    ranks: tuple[int, ...]
    seconds: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    #: whether all ranks show as many of them
    complete: bool

    @property
    def waits_s(self) -> Floats:
        """Of each rank: what its calls last beyond those of the rank that came last."""
        waits: Floats = (self.seconds - self.seconds.min(axis=0)).sum(axis=1)
        return waits


def meetings(activities: Sequence[Activity]) -> tuple[Meeting, ...]:
    """The collectives that several of the ranks that were read have in common, in their order."""
    found = [_calls(activity) for activity in activities]
    out = []
    for key in dict.fromkeys(key for calls in found for key in calls):
        ranks = tuple(i for i, calls in enumerate(found) if key in calls)
        counts = [len(found[i][key]) for i in ranks]
        if len(ranks) > 1:
            rows = np.array([found[i][key][: min(counts)] for i in ranks], dtype=float)
            out.append(Meeting(ranks, rows, len(set(counts)) == 1))
    return tuple(out)


def _calls(activity: Activity) -> dict[str, list[float]]:
    """Seconds of the collectives by name and group, in the order in which they ran; without those of a part
    of the ranks that does not say which.
    """
    out: dict[str, list[float]] = defaultdict(list)
    trace, work = activity.trace, activity.work
    places = np.flatnonzero(activity.communicates)
    for place in places[np.argsort(work.start_s[places], kind="stable")].tolist():
        detail = int(work.detail[place]) if activity.on_device else -1
        members = trace.calls[detail].members if detail >= 0 else ""
        partial = detail >= 0 and 0 < trace.calls[detail].group_size < trace.ranks
        if members or not partial:
            out[f"{call_name(activity, place)} {members}"].append(
                float(work.end_s[place] - work.start_s[place])
            )
    return out


def rank_times(activities: Sequence[Activity], met: Sequence[Meeting]) -> tuple[RankTime, ...]:
    """Of each rank; a collective lasts as long as on the rank that comes last, the rest is waiting."""
    waits = np.zeros(len(activities))
    for meeting in met:
        waits[list(meeting.ranks)] += meeting.waits_s
    return tuple(
        RankTime(
            rank=activity.trace.rank,
            step_s=activity.step_s,
            compute_s=sum(share.seconds for share in activity.shares if share.group != "communication"),
            waits_s=float(waits[i]),
        )
        for i, activity in enumerate(activities)
    )


def _last(met: Sequence[Meeting], ranks: int) -> Floats:
    """Share of its collectives to which each rank comes last."""
    came, all_of = np.zeros(ranks), np.zeros(ranks)
    for meeting in met:
        columns = meeting.seconds.shape[1]
        last = np.bincount(meeting.seconds.argmin(axis=0), minlength=len(meeting.ranks))
        came[list(meeting.ranks)] += last
        all_of[list(meeting.ranks)] += columns
    share: Floats = came / np.maximum(all_of, 1)
    return share


def stragglers(activities: Sequence[Activity], met: Sequence[Meeting]) -> Iterator[Finding]:
    """A rank that the others wait for in most collectives."""
    if not met:
        return
    times = rank_times(activities, met)
    last = _last(met, len(times))
    slow = int(last.argmax())
    own, others = times[slow], [time for i, time in enumerate(times) if i != slow]
    lost = float(np.median([time.waits_s for time in others])) - own.waits_s
    if last[slow] < OFTEN or lost <= 0:
        return
    usual = float(np.median([time.compute_s for time in others]))
    evidence = [
        f"rank {own.rank} comes last to {100 * last[slow]:.0f} % of the collectives that it takes part in",
        f"it computes for {show(own.compute_s, 'time')}, the others for {show(usual, 'time')} (median)",
    ]
    if not all(meeting.complete for meeting in met):
        evidence.append("ranks do not show equally many collectives: the first ones of each were compared")
    yield Finding(
        kind="straggler",
        title=f"the other ranks wait for rank {own.rank}",
        saves_s=lost,
        basis="median of the others' waits in collectives, less its own",
        advice=(
            "compare clocks, temperature and ECC errors of its device (nvidia-smi), its host's load, and"
            " how much data or how many tokens it gets"
        ),
        evidence=tuple(evidence),
    )
