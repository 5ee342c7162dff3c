"""Checks of what contestants were given: tuning, evaluation in the clock, batch, precision, device."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from paceline.bench.audit.contest import Contest, Pairing, first_cells, seconds
from paceline.spec.audit import AuditFinding, NotChecked
from paceline.spec.benchmark import ReportedRun, ReportedValue

#: settings that a report states once -> finding where a run has another
STATED = {"batch": "other-batch", "precision": "other-precision", "device": "other-device"}
#: less of the run's time than this is no matter
LEAST_SHARE = 0.01
#: words of a report that says openly that its clock stops for evaluation
TRAINING_CLOCK = ("training", "train", "without evaluation", "excluded", "evaluation excluded")


def check_tuning(contest: Contest) -> Iterator[AuditFinding | NotChecked]:
    """More tuning for the challenger than for the baseline; without pairs, for the better of two."""
    report = contest.report
    known = {name: report.about(name, "tuning_trials") for name in report.names}
    trials = {name: cell for name, cell in known.items() if cell is not None and cell.number is not None}
    if len(trials) < 2:
        yield NotChecked(what="tuning budgets", missing="tuning_trials of each contestant")
        return
    for name, other in dict.fromkeys(_favoured(contest)):
        if name not in trials or other not in trials:
            continue
        mine, theirs = trials[name], trials[other]
        if (mine.number or 0) > (theirs.number or 0):
            yield AuditFinding(
                kind="unequal-tuning",
                text=f"{name} was tuned in {mine.text} trials, {other} in {theirs.text}: part of what"
                " separates them is the search",
                evidence=(mine, theirs),
                honest=f"the same number of trials for each, {mine.text} for {other} too, and stated",
            )


def _favoured(contest: Contest) -> Iterator[tuple[str, str]]:
    """(who is presented as better, who as worse)."""
    if contest.pairings:
        yield from ((pair.challenger, pair.baseline) for pair in contest.pairings)
        return
    names = [name for name in contest.report.names if _score(contest, name) is not None]
    ranked = sorted(names, key=lambda name: _score(contest, name) or 0.0, reverse=True)
    yield from ((better, worse) for place, better in enumerate(ranked) for worse in ranked[place + 1 :])


def _score(contest: Contest, name: str) -> float | None:
    """More is better: less time to the target, else a better metric."""
    for quantity in ("reached_s", "metric", "throughput"):
        found = [contest.measured(run, quantity) for run in contest.report.by_contestant[name]]
        values = [one.value for one in found if one is not None]
        if values:
            middle = statistics.median(values)
            return -middle if contest.smaller_is_better(quantity) else middle
    return None


def check_test_data(contest: Contest) -> Iterator[AuditFinding | NotChecked]:
    """Hyperparameters chosen on the data that the result is shown on."""
    report = contest.report
    shown = report.stated.get("evaluated_on")
    found = [report.stated.get("tuned_on"), *(report.about(name, "tuned_on") for name in report.names)]
    tuned = [cell for cell in found if cell is not None]
    if not tuned or shown is None:
        yield NotChecked(what="which data was tuned on", missing="tuned_on and evaluated_on")
        return
    same = [cell for cell in tuned if cell.text.lower() == shown.text.lower()]
    if same:
        yield AuditFinding(
            kind="tuned-on-test",
            text=f"settings were chosen on {shown.text}, on which the results are shown: they fit this data,"
            " and may not hold on other",
            evidence=(*dict.fromkeys(same), shown),
            honest="settings chosen on a split of its own, and the result on data that was used once",
        )


def check_clock(contest: Contest) -> Iterator[AuditFinding | NotChecked]:
    """Runs whose reported time is that of the whole run less its evaluations."""
    runs = contest.report.runs
    if not any("evaluation_s" in row for run in runs for row in (*run.evaluations, run.fields)):
        yield NotChecked(what="whether times include evaluation", missing="evaluation_s")
        return
    clock = contest.report.stated.get("clock")
    if clock is not None and clock.text.lower() in TRAINING_CLOCK:
        return
    found = [(run, cells) for run in runs if (cells := _left_out(contest, run))]
    if not found:
        return
    run, cells = found[0]
    spent = contest.evaluation_s(run)
    whole = run.number("wall_s") or 0.0
    yield AuditFinding(
        kind="evaluation-excluded",
        text=f"{len(found)} runs report times without evaluation: of {run.contestant}"
        f" {seconds(whole - spent)} are reported, and the run took {seconds(whole)}",
        evidence=cells,
        honest=f"times that include evaluation, for all: {seconds(whole)} here",
    )


def _left_out(contest: Contest, run: ReportedRun) -> tuple[ReportedValue, ...]:
    """The cells that show it: wall-clock time, reported time, and evaluations that make up the difference.
    A single one, at the end, belongs to no time until then.
    """
    if len(run.evaluations) == 1:
        return ()
    whole, spent = run.get("wall_s"), contest.evaluation_s(run)
    reported = contest.measured(run, "seconds")
    if whole is None or whole.number is None or reported is None or spent < LEAST_SHARE * whole.number:
        return ()
    gap = whole.number - reported.value
    if abs(gap - spent) > 0.1 * spent:
        return ()
    rows = (*run.evaluations, run.fields)
    return (whole, *reported.cells, *first_cells((row.get("evaluation_s") for row in rows), 3))


def clock_notes(contest: Contest) -> Iterator[str]:
    """What an openly said clock leaves out."""
    clock = contest.report.stated.get("clock")
    if clock is not None and clock.text.lower() in TRAINING_CLOCK:
        yield f"times are of training alone, as the report says ({clock})"


def check_settings(contest: Contest) -> Iterator[AuditFinding | NotChecked]:
    """Runs with another batch, precision or device than stated, or compared across them without a word."""
    for name, kind in STATED.items():
        known = [run.fields[name] for run in contest.report.runs if name in run.fields]
        if not known:
            yield NotChecked(
                what=f"whether runs have the {name} that is stated", missing=f"{name} of each run"
            )
            continue
        findings = [*_against_stated(contest, name, kind)]
        yield from findings or _across(contest, name, kind)


def _against_stated(contest: Contest, name: str, kind: str) -> Iterator[AuditFinding]:
    for contestant in contest.report.names:
        stated = _said(contest, contestant, name)
        if stated is None:
            continue
        allowed = {word.strip(",;").lower() for word in stated.text.split()} | {stated.text.lower()}
        runs = contest.report.by_contestant[contestant]
        other = [run.fields[name] for run in runs if run.text(name) and run.text(name).lower() not in allowed]
        if other:
            yield AuditFinding(
                kind=kind,
                text=f"{name} {stated.text} is stated; {len(other)} of {len(runs)} runs of {contestant} have"
                f" {other[0].text}",
                evidence=(stated, *other[:4]),
                honest=f"{contestant} at {name} {stated.text}, or {name} {other[0].text} for all and stated",
            )


def _said(contest: Contest, contestant: str, name: str) -> ReportedValue | None:
    """What is stated of a contestant: in its own row, else of all."""
    for row in contest.report.contestants:
        if name in row and "contestant" in row and row["contestant"].text == contestant:
            return row[name]
    return contest.report.stated.get(name)


def _across(contest: Contest, name: str, kind: str) -> Iterator[AuditFinding]:
    """A claim over a contestant whose runs have another setting, which the claim does not name."""
    seen = set()
    for pair in contest.pairings:
        key = (pair.challenger, pair.baseline)
        mine, theirs = _settings(contest, pair, name)
        if pair.claim is None or name in pair.claim or not mine or not theirs or key in seen:
            continue
        if _said(contest, pair.challenger, name) or _said(contest, pair.baseline, name):
            continue
        if not {cell.text for cell in mine} & {cell.text for cell in theirs}:
            seen.add(key)
            yield AuditFinding(
                kind=kind,
                text=f"{pair.challenger} runs at {name} {mine[0].text}, {pair.baseline} at {theirs[0].text};"
                " the comparison does not say so",
                evidence=(mine[0], theirs[0]),
                honest=f"both at the same {name}, or each at its best with both stated",
            )


def _settings(contest: Contest, pair: Pairing, name: str) -> tuple[list[ReportedValue], list[ReportedValue]]:
    mine, theirs = contest.sides(pair)
    return (
        [run.fields[name] for run in mine if name in run.fields],
        [run.fields[name] for run in theirs if name in run.fields],
    )
