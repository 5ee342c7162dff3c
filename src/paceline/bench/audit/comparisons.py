"""Checks of what is compared: the baseline, and what both sides are divided by."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from paceline.bench.audit.claims import claimed_number, per, per_field
from paceline.bench.audit.contest import Contest, Measured, first_cells, plain
from paceline.spec.audit import AuditFinding, NotChecked
from paceline.spec.benchmark import ReportedRow

#: a baseline has to be slower than another by this share to be called slow
SLOWER = 0.1


def check_baselines(contest: Contest) -> Iterator[AuditFinding | NotChecked]:
    """A speedup over a baseline that another baseline, or its own published figure, beats."""
    claims = [claim for claim in contest.report.claims if "over" in claim and contest.quantity(claim)]
    if not claims:
        yield NotChecked(what="whether the baseline is a strong one", missing="claims over a baseline")
    seen = set()
    for claim in claims:
        over = claim["over"].text
        quantity = contest.quantity(claim)
        if (over, quantity) in seen or over not in contest.report.names:
            continue
        for finding in (_beaten(contest, claim, quantity), _published(contest, over)):
            if finding is not None:
                seen.add((over, quantity))
                yield finding
    sources = [contest.report.about(claim["over"].text, "source") for claim in claims]
    if claims and not any(sources):
        yield NotChecked(what="where the baseline comes from", missing="source of the baseline")


def _middle(contest: Contest, name: str, claim: ReportedRow, quantity: str) -> Measured | None:
    found = contest.values(name, claim, per(contest, quantity, None))
    if not found:
        return None
    return Measured(
        value=statistics.median(one.value for one in found),
        cells=tuple(one.cells[0] for one in found if one.cells),
    )


def _beaten(contest: Contest, claim: ReportedRow, quantity: str) -> AuditFinding | None:
    over, challenger = claim["over"], claim["contestant"].text if "contestant" in claim else ""
    used = _middle(contest, over.text, claim, quantity)
    smaller = contest.smaller_is_better(quantity)
    others = {
        name: found
        for name in contest.report.baselines()
        if name not in (over.text, challenger)
        and (found := _middle(contest, name, claim, quantity)) is not None
    }
    if used is None or not others:
        return None
    pick = min if smaller else max
    name = pick(others, key=lambda one: others[one].value)
    strongest = others[name]
    factor = used.value / strongest.value if smaller else strongest.value / used.value
    if factor < 1 + SLOWER:
        return None
    ours = _middle(contest, challenger, claim, quantity)
    honest = f"the comparison with {name}"
    if ours is not None:
        ratio = strongest.value / ours.value if smaller else ours.value / strongest.value
        honest += f": {plain(ratio)} x"
    return AuditFinding(
        kind="slow-baseline",
        text=f"the comparison is with {over.text}; {name}, a baseline of the same report, is"
        f" {plain(factor)} times as good",
        evidence=(over, *strongest.cells[:3], *used.cells[:3]),
        honest=honest,
    )


def _published(contest: Contest, over: str) -> AuditFinding | None:
    """A baseline that is slower here than its own reference figure."""
    said = contest.report.about(over, "reference")
    if said is None or not said.number:
        return None
    kind = contest.report.about(over, "quantity")
    quantity = contest.quantity({"quantity": kind}) if kind is not None else "reached_s"
    found = [contest.measured(run, quantity) for run in contest.report.by_contestant[over]]
    values = [one for one in found if one is not None]
    if not values:
        return None
    middle = statistics.median(one.value for one in values)
    smaller = contest.smaller_is_better(quantity)
    factor = middle / said.number if smaller else said.number / middle
    if factor < 1 + SLOWER:
        return None
    source = contest.report.about(over, "reference_source")
    return AuditFinding(
        kind="slow-baseline",
        text=f"{over} takes {plain(middle)} here, and {said.text} in"
        f" {source.text if source is not None else 'its reference'}: {plain(factor)} times as good",
        evidence=(said, *([source] if source is not None else []), *values[0].cells),
        honest=f"the speedup over {over} as it is published, or why it is slower here",
    )


def check_normalisation(contest: Contest) -> Iterator[AuditFinding | NotChecked]:
    """A claim per watt, dollar or device by which the challenger wins, where it loses without, and no word of
    that.
    """
    for claim in contest.report.claims:
        unit = per_field(claim)
        if unit is None:
            continue
        raw = {name: value for name, value in claim.items() if name != "per"}
        found = claimed_number(contest, raw)
        divided = claimed_number(contest, claim)
        if isinstance(found, NotChecked) or isinstance(divided, NotChecked) or "over" not in claim:
            yield NotChecked(
                what=f"whether {claim['per']} favours one side", missing="the figure itself and its divisor"
            )
            continue
        quantity = contest.quantity(claim)
        ours, theirs = (
            _middle(contest, claim[side].text, claim, quantity) for side in ("contestant", "over")
        )
        if ours is None or theirs is None or _said_openly(contest, claim):
            continue
        smaller = contest.smaller_is_better(quantity)
        ratio = theirs.value / ours.value if smaller else ours.value / theirs.value
        if ratio > 1:
            continue
        who, other = claim["contestant"].text, claim["over"].text
        yield AuditFinding(
            kind="favourable-normalisation",
            text=f"{who} is ahead of {other} per {claim['per'].text.removeprefix('per ')} and behind without:"
            f" {plain(ratio)} x. What is divided by does not scale so",
            evidence=(claim["per"], *first_cells(iter((*ours.cells[:2], *theirs.cells[:2])))),
            honest=f"the figure itself beside it: {plain(ours.value)} against {plain(theirs.value)}",
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
