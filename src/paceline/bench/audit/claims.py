"""Checks of what is claimed against what the runs show."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paceline.bench.audit.contest import (
    BEST_WORDS,
    STATISTICS,
    Contest,
    Measure,
    Measured,
    advantage,
    plain,
    spread,
)
from paceline.spec.audit import AuditFinding, NotChecked
from paceline.spec.benchmark import ReportedRow, ReportedRun, ReportedValue

#: a claim may differ by so much from what it was computed from, besides the rounding of its last digit
TOLERANCE = 0.005
#: what a claim may be divided by -> field of runs
PER = {
    "watts": ("watt", "watts", "w", "power"),
    "devices": ("device", "devices", "gpu", "gpus", "chip", "worker"),
    "usd": ("usd", "dollar", "dollars", "$", "cost"),
    "batch": ("sample", "samples"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedNumber:
    """A claim with what its runs show."""

    claim: ReportedRow
    cell: ReportedValue
    #: whether the number is a ratio to the baseline
    ratio: bool
    quantity: str
    ours: tuple[Measured, ...]
    theirs: tuple[Measured, ...]
    smaller_is_better: bool

    @property
    def number(self) -> float:
        return self.cell.number or 0.0

    def near(self, candidates: Sequence[float]) -> bool:
        """Whether the claim is one of these numbers, rounded."""
        number, allowed = self.number, max(TOLERANCE * abs(self.number), self.cell.rounding)
        known = [one for one in candidates if math.isfinite(one)]
        if self.quantity == "metric" and number > 1.5 and known and max(known) <= 1:
            number, allowed = number / 100, allowed / 100  # per cent of a share
        return any(abs(number - one) <= allowed for one in known)

    def of(self, mine: float, others: float) -> float:
        """The claimed kind of number from one of ours and one of theirs."""
        if not self.ratio:
            return mine
        return advantage(mine, others, self.smaller_is_better)

    @property
    def advantage(self) -> float:
        """How many times as good our median is as theirs; not a number where it cannot be said."""
        if not self.theirs:
            return math.nan
        mine, others = (statistics.median(one.value for one in side) for side in (self.ours, self.theirs))
        return advantage(mine, others, self.smaller_is_better)

    def statistics(self) -> list[Callable[[Sequence[float]], float]]:
        """The one that is stated, else those that are usual."""
        said = self.claim["statistic"].text.lower() if "statistic" in self.claim else ""
        return [STATISTICS[said]] if said in STATISTICS else [STATISTICS["median"], STATISTICS["mean"]]

    def honest(self, ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
        """What the claim may be: a statistic of all runs, or of the ratios seed by seed."""
        found = [self.of(one(ours), one(theirs) if theirs else 1.0) for one in self.statistics()]
        if self.ratio and len(ours) == len(theirs):
            pairs = [self.of(*pair) for pair in zip(ours, theirs, strict=True)]
            found += [one(pairs) for one in self.statistics()]
        return found

    def best(self, ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
        """What it is if the best of our runs stands for all."""
        mine = min(ours) if self.smaller_is_better else max(ours)
        others = [one(theirs) for one in self.statistics()] + [min(theirs), max(theirs)] if theirs else [1.0]
        return [self.of(mine, one) for one in others]


def per_field(claim: ReportedRow) -> str | None:
    """The field by which a claim is divided; None where it is not, empty where it is not known."""
    if "per" not in claim:
        return None
    said = claim["per"].text.lower().removeprefix("per ")
    return next((name for name, words in PER.items() if said in words), "")


def per(contest: Contest, quantity: str, unit: str | None) -> Measure:
    """A quantity of a run, divided by (a time: multiplied with) what it is normalised to."""

    def measure(run: ReportedRun) -> Measured | None:
        found = contest.measured(run, quantity)
        if unit is None or found is None:
            return found
        divisor = run.number(unit)
        if not divisor:
            return None
        share = divisor if contest.smaller_is_better(quantity) else 1 / divisor
        return Measured(value=found.value * share, cells=(*found.cells, run.fields[unit]))

    return measure


def claimed_number(contest: Contest, claim: ReportedRow) -> ClaimedNumber | NotChecked:
    """A claim with the numbers behind it, or why there are none."""
    cell = claim.get("speedup") or claim.get("value")
    if cell is None or cell.number is None:
        return NotChecked(what="a claim", missing="a number: its value or its speedup")
    what = f"the claim of {cell.text} ({cell.column})"
    quantity, unit = contest.quantity(claim), per_field(claim)
    if not quantity or "contestant" not in claim or claim["contestant"].text not in contest.report.names:
        return NotChecked(what=what, missing="the contestant and the quantity that it is about")
    measure = per(contest, quantity, unit)
    ours = contest.values(claim["contestant"].text, claim, measure)
    theirs = contest.values(claim["over"].text, claim, measure) if "over" in claim else []
    if not ours or unit == "" or ("speedup" in claim and not theirs):
        return NotChecked(what=what, missing=f"{quantity} of every run it is about")
    return ClaimedNumber(
        claim=claim,
        cell=cell,
        ratio="speedup" in claim,
        quantity=quantity,
        ours=tuple(ours),
        theirs=tuple(theirs),
        smaller_is_better=contest.smaller_is_better(quantity),
    )


def check_claims(contest: Contest) -> Iterator[AuditFinding | NotChecked]:
    """Best of n, evaluation left out, and claims that nothing supports."""
    if not contest.report.claims:
        yield NotChecked(what="claims: best of n, speedups, evaluation left out", missing="claims")
    for claim in contest.report.claims:
        found = claimed_number(contest, claim)
        if isinstance(found, NotChecked):
            yield found
            continue
        finding = _checked(contest, found)
        if finding is not None:
            yield finding


def _checked(contest: Contest, found: ClaimedNumber) -> AuditFinding | None:
    ours = [one.value for one in found.ours]
    theirs = [one.value for one in found.theirs] if found.ratio else []
    if theirs and not any(map(math.isfinite, theirs)):
        return None  # the target that the comparison cannot reach is a finding of its own
    said = found.claim["statistic"].text.lower() if "statistic" in found.claim else ""
    if said in BEST_WORDS and len(ours) > 1:
        return _best(found, ours, theirs)
    if found.near(found.honest(ours, theirs)):
        return None
    if len(ours) > 1 and found.near(found.best(ours, theirs)):
        return _best(found, ours, theirs)
    finite = [one for one in ours if math.isfinite(one)]
    if 0 < len(finite) < len(ours) and found.near(found.honest(finite, theirs)):
        return _survivors(found, ours)
    return _excluded(contest, found, ours, theirs) or _unsupported(found, ours, theirs)


def _fair(found: ClaimedNumber, ours: Sequence[float], theirs: Sequence[float]) -> str:
    fair = found.honest(ours, theirs)[0]
    if not found.ratio:
        return f"{spread(ours)}"
    return f"{plain(fair)} x: {spread(ours)} against {spread(theirs)}"


def _evidence(found: ClaimedNumber) -> tuple[ReportedValue, ...]:
    cells = itertools.chain.from_iterable(one.cells[:1] for one in (*found.ours, *found.theirs))
    return (found.cell, *itertools.islice(cells, 10))


def _best(found: ClaimedNumber, ours: Sequence[float], theirs: Sequence[float]) -> AuditFinding:
    return AuditFinding(
        kind="best-of-n",
        text=f"{found.cell.text} is the best of {len(ours)} runs of {found.claim['contestant'].text}, not"
        " what to expect of one",
        evidence=_evidence(found),
        honest=f"the median with its range: {_fair(found, ours, theirs)}",
    )


def _survivors(found: ClaimedNumber, ours: Sequence[float]) -> AuditFinding:
    failed = sum(not math.isfinite(one) for one in ours)
    return AuditFinding(
        kind="best-of-n",
        text=f"{found.cell.text} leaves out {failed} of {len(ours)} runs that did not reach the target",
        evidence=_evidence(found),
        honest=f"all runs: {failed} of {len(ours)} not reached, and a median over all of them",
    )


def _excluded(
    contest: Contest, found: ClaimedNumber, ours: Sequence[float], theirs: Sequence[float]
) -> AuditFinding | None:
    """The claim, where it is right for times without evaluation only."""
    claim = found.claim
    if found.quantity != "reached_s" or "per" in claim:
        return None
    mine = contest.values(claim["contestant"].text, claim, contest.without_evaluation)
    other = contest.values(claim["over"].text, claim, contest.without_evaluation) if found.ratio else []
    less, others = [one.value for one in mine], [one.value for one in other]
    if not less or not any(found.near(found.honest(less, one)) for one in (theirs, others or theirs)):
        return None
    spent = [a - b for a, b in zip(ours, less, strict=True)]
    return AuditFinding(
        kind="evaluation-excluded",
        text=f"{found.cell.text} leaves out the evaluations until the target: {spread(spent)} s a run",
        evidence=(found.cell, *mine[0].cells),
        honest=f"the time that a user waits, evaluations included: {_fair(found, ours, theirs)}",
    )


def _unsupported(found: ClaimedNumber, ours: Sequence[float], theirs: Sequence[float]) -> AuditFinding:
    return AuditFinding(
        kind="unsupported-claim",
        text=f"{found.cell.text} is neither the median nor the mean of the runs that it is about",
        evidence=_evidence(found),
        honest=f"what the runs show: {_fair(found, ours, theirs)}",
    )
