"""Checks of what is compared: the baseline, and what both sides are divided by."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace

from paceline.bench.audit.claims import ClaimedNumber, claimed_number
from paceline.bench.audit.contest import Contest, advantage, plain
from paceline.spec.audit import AuditFinding, NotChecked
from paceline.spec.benchmark import ReportedRow

#: a baseline has to be slower than another by this share to be called slow
SLOWER = 0.1


def check_baselines(contest: Contest) -> Iterator[AuditFinding | NotChecked]:
    """A speedup over a baseline that another baseline, or its own published figure, beats."""
    known = set(contest.report.names)
    claims = [one for one in contest.report.claims if "over" in one and one["over"].text in known]
    if not claims:
        yield NotChecked(what="whether the baseline is a strong one", missing="claims over a baseline")
    elif not any(contest.report.about(claim["over"].text, "source") for claim in claims):
        yield NotChecked(what="where the baseline comes from", missing="source of the baseline")
    found = {
        (claim["over"].text, contest.quantity(claim)): _beaten(contest, claim) for claim in reversed(claims)
    }
    published = {claim["over"].text: _published(contest, claim["over"].text) for claim in claims}
    yield from (one for one in (*found.values(), *published.values()) if one is not None)


def _beaten(contest: Contest, claim: ReportedRow) -> AuditFinding | None:
    """The strongest baseline of the report, where the claim is over a slower one, and none is over that."""
    used = claimed_number(contest, claim)
    if isinstance(used, NotChecked) or not used.theirs:
        return None
    others = {}
    for name in contest.report.baselines():
        other = claimed_number(contest, {**claim, "over": replace(claim["over"], value=name)})
        if isinstance(other, ClaimedNumber) and name not in (claim["over"].text, claim["contestant"].text):
            others[name] = other
    # the strongest is the one that leaves the smallest advantage
    name = min(others, key=lambda one: others[one].advantage, default="")
    if not name or _claimed_over(contest, claim, name):
        return None
    factor = used.advantage / others[name].advantage if others[name].advantage else math.nan
    if not factor >= 1 + SLOWER:
        return None
    cells = [one.cells[0] for one in (*others[name].theirs[:3], *used.theirs[:3]) if one.cells]
    return AuditFinding(
        kind="slow-baseline",
        text=f"the comparison is with {claim['over'].text}; {name}, a baseline of the same report, is"
        f" {plain(factor)} times as good",
        evidence=(claim["over"], *cells),
        honest=f"the comparison with {name}: {plain(others[name].advantage)} x",
    )


def _claimed_over(contest: Contest, claim: ReportedRow, name: str) -> bool:
    """Whether the same is claimed over another contestant, too."""
    same = ("contestant", "quantity", "per")
    return any(
        _text(other, "over") == name and all(_text(other, one) == _text(claim, one) for one in same)
        for other in contest.report.claims
    )


def _published(contest: Contest, over: str) -> AuditFinding | None:
    """A baseline that is slower here than its own reference figure."""
    said, kind = (contest.report.about(over, name) for name in ("reference", "quantity"))
    quantity = contest.quantity({"quantity": kind}) if kind is not None else "reached_s"
    measured = [contest.measured(run, quantity) for run in contest.report.by_contestant[over]]
    values = [one for one in measured if one is not None]
    if said is None or said.number is None or not values:
        return None
    middle = statistics.median(one.value for one in values)
    factor = advantage(said.number, middle, contest.smaller_is_better(quantity))
    if not factor >= 1 + SLOWER:
        return None
    source = contest.report.about(over, "reference_source")
    where = source.text if source is not None else "its reference"
    return AuditFinding(
        kind="slow-baseline",
        text=f"{over} has {plain(middle)} here, and {said.text} in {where}: {plain(factor)} times as good",
        evidence=(said, *([source] if source is not None else []), *values[0].cells),
        honest=f"the speedup over {over} as it is published, or why it is slower here",
    )


def check_normalisation(contest: Contest) -> Iterator[AuditFinding | NotChecked]:
    """A claim per watt, dollar or device by which the challenger wins, where it loses without, and no word of
    that.
    """
    for claim in contest.report.claims:
        whole = claimed_number(contest, {name: cell for name, cell in claim.items() if name != "per"})
        divided = claimed_number(contest, claim)
        if "per" not in claim or "over" not in claim:
            continue
        if isinstance(whole, NotChecked) or isinstance(divided, NotChecked):
            missing = "the figure itself and its divisor, of every run"
            yield NotChecked(what=f"whether {claim['per'].text} favours one side", missing=missing)
        elif divided.advantage > 1 >= whole.advantage and not _said_openly(contest, claim):
            yield _favourable(claim, whole)


def _favourable(claim: ReportedRow, whole: ClaimedNumber) -> AuditFinding:
    who, other = claim["contestant"].text, claim["over"].text
    ours, theirs = (statistics.median(one.value for one in side) for side in (whole.ours, whole.theirs))
    cells = [one.cells[0] for one in (*whole.ours[:2], *whole.theirs[:2]) if one.cells]
    return AuditFinding(
        kind="favourable-normalisation",
        text=f"{who} is ahead of {other} per {claim['per'].text.removeprefix('per ')} and behind without:"
        f" {plain(whole.advantage)} x. What is divided by does not scale so",
        evidence=(claim["per"], *cells),
        honest=f"the figure itself beside it: {plain(ours)} against {plain(theirs)}",
    )


def _said_openly(contest: Contest, claim: ReportedRow) -> bool:
    """Whether another claim gives the same comparison without the divisor."""
    same = ("contestant", "over", "quantity")
    return any(
        "per" not in other and all(_text(other, name) == _text(claim, name) for name in same)
        for other in contest.report.claims
    )


def _text(row: ReportedRow, name: str) -> str:
    return row[name].text if name in row else ""
