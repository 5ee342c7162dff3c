"""Checks of the target: whether the comparison can reach it, when it was chosen, how it was seen met."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence

from paceline.bench.audit.contest import Contest, first_cells, plain, seconds
from paceline.spec.audit import AuditFinding, NotChecked
from paceline.spec.benchmark import ReportedRun, ReportedValue

#: evaluations so many times as frequent as the other's are another measurement
FINER = 2.0


def check_reachable(contest: Contest) -> Iterator[AuditFinding | NotChecked]:
    """A target that the challenger reaches in some run, and the baseline in none."""
    stated = any(contest.target(run) for run in contest.report.runs)
    if not stated or not contest.pairings:
        missing = (
            "a target" if not stated else "a claim over a contestant, or one with the role of a baseline"
        )
        yield NotChecked(what="whether the comparison can reach the target", missing=missing)
    seen = set()
    for pair in contest.pairings:
        theirs = contest.runs_of(pair.baseline, pair.claim)
        ours = contest.runs_of(pair.challenger, pair.claim)
        target = next((contest.target(run) for run in theirs if contest.target(run)), None)
        known = [cell for run in theirs for cell in contest.metrics(run)]
        if pair.baseline in seen or target is None or target.number is None or not known:
            continue
        if any(map(contest.ever_reached, theirs)) or not any(map(contest.ever_reached, ours)):
            continue
        seen.add(pair.baseline)
        best = contest.best([cell.number or 0.0 for cell in known])
        shown = [cell for cell in known if cell.number == best]
        yield AuditFinding(
            kind="unreachable-target",
            text=f"{pair.baseline} never reaches the target of {target.text}: its best is {plain(best)} in"
            f" {len(theirs)} runs; any contestant that does looks infinitely faster",
            evidence=(target, *shown[:3]),
            honest=_reachable(contest, ours, theirs),
        )


def _reachable(contest: Contest, ours: Sequence[ReportedRun], theirs: Sequence[ReportedRun]) -> str:
    """A target that every run meets, and the times until then."""
    ends = [[cell.number or 0.0 for cell in contest.metrics(run)] for run in (*ours, *theirs)]
    bests = [contest.best(values) for values in ends if values]
    common = min(bests) if contest.higher_is_better else max(bests)
    times = [_time_to(contest, runs, common) for runs in (ours, theirs)]
    text = f"a target that all reach, such as {plain(common)}"
    if all(math.isfinite(one) for one in times):
        text += f": {seconds(times[0])} against {seconds(times[1])} (medians)"
    return text


def _time_to(contest: Contest, runs: Sequence[ReportedRun], target: float) -> float:
    """Median time to a target of our own choice; infinite where it is not known."""
    found = []
    for run in runs:
        rows = [row for row in run.evaluations if "metric" in row and "seconds" in row]
        reached = (
            row["seconds"].number for row in rows if contest.meets(row["metric"].number or 0.0, target)
        )
        found.append(next((one for one in reached if one is not None), math.inf))
    return statistics.median(found) if found else math.inf


def check_fixed(contest: Contest) -> Iterator[AuditFinding | NotChecked]:
    """A target that was chosen after the runs: said so, or dated after the first of them."""
    when = contest.report.stated.get("target_fixed")
    if when is None:
        if any(contest.target(run) for run in contest.report.runs):
            yield NotChecked(what="when the target was chosen", missing="target_fixed")
        return
    starts = [run.fields["started_at"] for run in contest.report.runs if "started_at" in run.fields]
    first = min(starts, key=lambda cell: cell.text, default=None)
    dated = when.text[:1].isdigit()
    late = first is not None and dated and when.text > first.text
    if when.text.lower().startswith("after") or late:
        yield AuditFinding(
            kind="target-after-runs",
            text=f"the target was fixed {when.text}"
            + (f", and the first run started {first.text}" if late and first is not None else ""),
            evidence=(when, *([first] if late and first is not None else [])),
            honest="a target that was fixed before the first run, or all of the curves",
        )


def check_crossings(contest: Contest) -> Iterator[AuditFinding | NotChecked]:
    """More frequent evaluation than the comparison's, or a target that is crossed once and lost again."""
    if not any(len(run.evaluations) > 1 for run in contest.report.runs):
        yield NotChecked(what="how often the metric was evaluated", missing="a row for each evaluation")
        return
    seen = set()
    for pair in contest.pairings:
        ours = contest.runs_of(pair.challenger, pair.claim)
        theirs = contest.runs_of(pair.baseline, pair.claim)
        mine, others = _interval(ours), _interval(theirs)
        key = (pair.challenger, pair.baseline)
        if mine and others and others >= FINER * mine and key not in seen:
            seen.add(key)
            yield _finer(contest, pair.challenger, pair.baseline, (mine, others), (ours, theirs))
    for name in contest.report.names:
        finding = _lost(contest, name)
        if finding is not None:
            yield finding


def _interval(runs: Sequence[ReportedRun]) -> float:
    """Samples (steps, where no batch is given) between evaluations; 0 where it is not known."""
    found = []
    for run in runs:
        places = [row["step"].number for row in run.evaluations if "step" in row]
        known = [place for place in places if place is not None]
        found += [b - a for a, b in itertools.pairwise(known)]
    batch = next((run.number("batch") for run in runs if run.number("batch")), None) or 1.0
    return statistics.median(found) * batch if found else 0.0


def _finer(
    contest: Contest,
    challenger: str,
    baseline: str,
    intervals: tuple[float, float],
    runs: tuple[Sequence[ReportedRun], Sequence[ReportedRun]],
) -> AuditFinding:
    steps = [[row.get("step") for row in one[0].evaluations[:3]] for one in runs]
    every = round(intervals[1] / intervals[0])
    return AuditFinding(
        kind="first-crossing",
        text=f"{challenger} is evaluated {plain(intervals[1] / intervals[0])} times as often as {baseline}:"
        " it has as many more chances to be above the target by luck, and is seen there earlier",
        evidence=first_cells(itertools.chain(*steps)),
        honest=f"the same interval for both: one in {every} evaluations of {challenger}, and a target that"
        " holds for the evaluations after it",
    )


def _lost(contest: Contest, name: str) -> AuditFinding | None:
    """A contestant most of whose runs are mostly below the target after they have crossed it."""
    lost: list[ReportedValue] = []
    runs = [run for run in contest.report.by_contestant[name] if contest.crossing(run) is not None]
    count = 0
    for run in runs:
        place = contest.crossing(run) or 0
        target = contest.target(run)
        after = [row["metric"] for row in run.evaluations[place + 1 :] if "metric" in row]
        level = target.number if target is not None else None
        below = [cell for cell in after if level is not None and not contest.meets(cell.number or 0.0, level)]
        if len(after) > 1 and 2 * len(below) > len(after):
            count += 1
            lost += [run.evaluations[place]["metric"], *below[:2]]
    if not runs or 2 * count <= len(runs):
        return None
    return AuditFinding(
        kind="first-crossing",
        text=f"{count} of {len(runs)} runs of {name} cross the target and are mostly below it afterwards",
        evidence=tuple(lost[:6]),
        honest="the time from which on the metric stays above the target, or the metric at the end",
    )
