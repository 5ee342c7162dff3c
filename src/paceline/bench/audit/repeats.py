"""Checks of repetitions: how many seeds there are, and whether all contestants have the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.bench.audit.contest import Contest, distinct, first_cells
from paceline.spec.audit import AuditFinding, NotChecked
from paceline.spec.benchmark import ReportedRun


def check_seeds(contest: Contest) -> Iterator[AuditFinding | NotChecked]:
    """One seed per contestant in a comparison of what was learned."""
    compared = len(contest.report.names) > 1 or contest.report.claims
    if not compared or not contest.statistical:
        return
    single = [runs for runs in _largest(contest) if distinct(runs) == 1]
    if not single:
        return
    names = list(dict.fromkeys(runs[0].contestant for runs in single))
    cells = (run.get("seed") or run.get("count") or run.get("contestant") for runs in single for run in runs)
    yield AuditFinding(
        kind="one-seed",
        text=f"{_listed(names)} {'has' if len(names) == 1 else 'have'} one seed: what separates contestants"
        " may be the luck of an initialisation",
        evidence=first_cells(cells),
        honest="at least three, better five seeds of each contestant, the same for all, with the spread",
    )


def _largest(contest: Contest) -> Iterator[Sequence[ReportedRun]]:
    """The repetitions of each contestant and task, at the settings with most runs: others may have been
    tried on the way.
    """
    groups: dict[tuple[str, str], list[Sequence[ReportedRun]]] = {}
    for (name, _), runs in contest.cells.items():
        groups.setdefault((name, runs[0].text("task")), []).append(runs)
    for several in groups.values():
        yield max(several, key=distinct)


def check_picked(contest: Contest) -> Iterator[AuditFinding | NotChecked]:
    """Seeds that differ between contestants, or fewer runs than stated."""
    if any("seed" in run.fields for run in contest.report.runs):
        yield from _fewer(contest)
        found = [_apart(runs, others) for runs, others in _comparable(contest)]
        yield from (finding for finding in found if finding is not None)
    elif contest.statistical:
        yield NotChecked(what="whether all contestants have the same seeds", missing="seed of each run")


def _apart(runs: Sequence[ReportedRun], others: Sequence[ReportedRun]) -> AuditFinding | None:
    mine, theirs = ({run.text("seed") for run in each} for each in (runs, others))
    if mine == theirs or "" in mine | theirs or min(len(mine), len(theirs)) < 2:
        return None
    alone = [run.fields["seed"] for run in (*runs, *others) if run.text("seed") in mine ^ theirs]
    return AuditFinding(
        kind="seeds-picked",
        text=f"{runs[0].contestant} has the seeds {_sorted(mine)}, {others[0].contestant}"
        f" {_sorted(theirs)}: runs may have been picked, and cannot be compared seed by seed",
        evidence=tuple(alone[:8]),
        honest=f"all contestants with the seeds {_sorted(mine | theirs)}, every run shown",
    )


def _fewer(contest: Contest) -> Iterator[AuditFinding]:
    stated = contest.report.stated.get("count")
    wanted = stated.number if stated is not None else None
    if stated is None or wanted is None:
        return
    few = [runs for runs in _largest(contest) if 1 < distinct(runs) < wanted]
    if few:
        names = _listed([runs[0].contestant for runs in few])
        yield AuditFinding(
            kind="seeds-picked",
            text=f"{stated.text} seeds are stated; {names} {'has' if len(few) == 1 else 'have'}"
            f" {distinct(few[0])}: which were left out, and why, is not said",
            evidence=(stated, *first_cells(run.get("seed") for run in few[0])),
            honest="every run that was made, also those that failed",
        )


def _comparable(contest: Contest) -> Iterator[tuple[Sequence[ReportedRun], Sequence[ReportedRun]]]:
    """Repetitions of two contestants that are compared: by a pairing, else those with equal settings."""
    if contest.pairings:
        sides = map(contest.sides, contest.pairings)
        yield from ((runs, others) for runs, others in sides if runs and others)
        return
    by_settings: dict[tuple[str, ...], list[Sequence[ReportedRun]]] = {}
    for (_, settings), repetitions in contest.cells.items():
        by_settings.setdefault(settings, []).append(repetitions)
    for several in by_settings.values():
        yield from ((several[0], other) for other in several[1:])


def _sorted(seeds: set[str]) -> str:
    return " ".join(sorted(seeds, key=lambda seed: (len(seed), seed)))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
