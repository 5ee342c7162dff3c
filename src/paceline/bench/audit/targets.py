"""Checks of the target: whether the comparison can reach it, when it was chosen, how it was seen met."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence

from paceline.bench.audit.contest import Contest, Pairing, first_cells, plain, seconds
from paceline.spec.audit import AuditFinding, NotChecked
from paceline.spec.benchmark import ReportedRun, ReportedValue

#: evaluations so many times as frequent as the other's are another measurement
FINER = 2.0


def check_reachable(contest: Contest) -> Iterator[AuditFinding | NotChecked]:
    """A target that the challenger reaches in some run, and the baseline in none."""
    what = "whether the comparison can reach the target"
    if not any(contest.target(run) for run in contest.report.runs):
        yield NotChecked(what=what, missing="a target")
    elif not contest.pairings:
        yield NotChecked(what=what, missing="a claim over a contestant, or one with the role of a baseline")
    seen = set()
    for pair in contest.pairings:
        finding = _never_reached(contest, pair) if (pair.baseline, pair.task) not in seen else None
        if finding is not None:
            seen.add((pair.baseline, pair.task))
            yield finding


def _never_reached(contest: Contest, pair: Pairing) -> AuditFinding | None:
    ours, theirs = contest.sides(pair)
    target = next((contest.target(run) for run in theirs if contest.level(run) is not None), None)
    known = [cell for run in theirs for cell in contest.metrics(run)]
    reached = [any(map(contest.ever_reached, side)) for side in (ours, theirs)]
    if target is None or not known or reached != [True, False]:
        return None
    best = contest.best([cell.number or 0.0 for cell in known])
    return AuditFinding(
        kind="unreachable-target",
        text=f"{pair.baseline} never reaches the target of {target.text}: its best is {plain(best)} in"
        f" {len(theirs)} runs; any contestant that does looks infinitely faster",
        evidence=(target, *[cell for cell in known if cell.number == best][:3]),
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
    found = [_finer(contest, pair) for pair in contest.pairings]
    found += [_lost(contest, name) for name in contest.report.names]
    yield from (finding for finding in found if finding is not None)


def _intervals(runs: Sequence[ReportedRun]) -> tuple[float, float]:
    """Steps and samples between evaluations (medians); 0 where they are not known."""
    steps, samples = [], []
    for run in runs:
        places = [row["step"].number for row in run.evaluations if "step" in row]
        apart = [b - a for a, b in itertools.pairwise(place for place in places if place is not None)]
        steps += apart
        samples += [one * (run.number("batch") or 1.0) for one in apart]
    return (statistics.median(steps), statistics.median(samples)) if steps else (0.0, 0.0)


def _finer(contest: Contest, pair: Pairing) -> AuditFinding | None:
    """A challenger that is evaluated more often than the baseline, by steps and by samples."""
    ours, theirs = contest.sides(pair)
    apart = list(zip(_intervals(ours), _intervals(theirs), strict=True))
    finer = min((other / mine if mine > 0 else 0.0) for mine, other in apart)
    if finer < FINER:
        return None
    rows = [row for runs in (ours, theirs) for row in runs[0].evaluations[:3]]
    return AuditFinding(
        kind="first-crossing",
        text=f"{pair.challenger} is evaluated {plain(finer)} times as often as {pair.baseline}: it has as"
        " many more chances to be above the target by luck, and is seen there earlier",
        evidence=first_cells(row.get("step") for row in rows),
        honest=f"the same interval for both: one in {round(finer)} evaluations of {pair.challenger}, and a"
        " target that holds for the evaluations after it",
    )


def _lost(contest: Contest, name: str) -> AuditFinding | None:
    """A contestant most of whose runs are mostly below the target after they have crossed it."""
    runs = [run for run in contest.report.by_contestant[name] if contest.crossing(run) is not None]
    lost = [cells for run in runs if (cells := _below_again(contest, run))]
    if not runs or 2 * len(lost) <= len(runs):
        return None
    return AuditFinding(
        kind="first-crossing",
        text=f"{len(lost)} of {len(runs)} runs of {name} cross the target and are mostly below it afterwards",
        evidence=tuple(itertools.chain.from_iterable(lost))[:6],
        honest="the time from which on the metric stays above the target, or the metric at the end",
    )


def _below_again(contest: Contest, run: ReportedRun) -> list[ReportedValue]:
    """The crossing and the first evaluations below the target behind it, if most of those are."""
    place, level = contest.crossing(run), contest.level(run)
    if place is None or level is None:
        return []
    after = [row["metric"] for row in run.evaluations[place + 1 :] if "metric" in row]
    below = [cell for cell in after if cell.number is not None and not contest.meets(cell.number, level)]
    lost = len(after) > 1 and 2 * len(below) > len(after)
    return [run.evaluations[place]["metric"], *below[:2]] if lost else []
