"""What an audit of a benchmark found, each with the evidence, and what it could not check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from paceline.spec.benchmark import ReportedValue

#: kind of finding -> what it is called
FINDINGS = {
    "unreachable-target": "the comparison cannot reach the target",
    "best-of-n": "the best of several runs is reported",
    "one-seed": "one seed",
    "evaluation-excluded": "evaluation is left out of the time",
    "unequal-tuning": "tuning budgets differ",
    "favourable-normalisation": "normalised to a favourable metric",
    "nonlinear-axis": "an axis is not linear",
    "cut-axis": "an axis is cut",
    "slow-baseline": "a slow baseline",
    "first-crossing": "the first crossing is picked by frequent evaluation",
    "seeds-picked": "seeds differ",
    "other-batch": "another batch than stated",
    "other-precision": "another precision than stated",
    "other-device": "another device than stated",
    "target-after-runs": "the target was chosen after the runs",
    "tuned-on-test": "tuned on the data of the evaluation",
    "unsupported-claim": "a claim that the runs do not show",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding:
    """Something that makes a benchmark unfair, in the data."""

    kind: str
    #: what is wrong, with figures
    text: str
    #: the cells that show it
    evidence: tuple[ReportedValue, ...]
    #: what an honest report would show instead
    honest: str

    @property
    def title(self) -> str:
        return FINDINGS[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotChecked:
    """A check that the data do not allow, and what is missing."""

    what: str
    missing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """All findings about a report, and what could not be checked."""

    source: str
    contestants: int
    runs: int
    evaluations: int
    findings: tuple[AuditFinding, ...]
    unchecked: tuple[NotChecked, ...]
    #: what is unusual but said openly
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        found = asdict(self)
        for row, finding in zip(found["findings"], self.findings, strict=True):
            row["title"] = finding.title
        return found

    def __rich__(self) -> Any:
        from paceline.report.audit import audit_view

        return audit_view(self)
