"""Whether a benchmark is fair: the common cheats, each found from the data.

The list is that of the benchmarking chapter of the Hot Chips 2018 tutorial on training (Pedram, Lynch and
Lauterbach): "Common benchmark cheats", "Cheats unique to ML", "Misleading presentation"; and what follows.
A finding needs evidence in the data; what they do not show is listed as not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.bench.audit.axes import check_axes
from paceline.bench.audit.claims import check_claims
from paceline.bench.audit.comparisons import check_baselines, check_normalisation
from paceline.bench.audit.conditions import (
    check_clock,
    check_settings,
    check_test_data,
    check_tuning,
    clock_notes,
)
from paceline.bench.audit.contest import Contest
from paceline.bench.audit.repeats import check_picked, check_seeds
from paceline.bench.audit.targets import check_crossings, check_fixed, check_reachable
from paceline.readers import benchmark
from paceline.spec.audit import Audit, AuditFinding, NotChecked
from paceline.spec.benchmark import BenchmarkReport

CHECKS: tuple[Callable[[Contest], Iterator[AuditFinding | NotChecked]], ...] = (
    check_reachable,
    check_fixed,
    check_claims,
    check_seeds,
    check_picked,
    check_clock,
    check_tuning,
    check_test_data,
    check_baselines,
    check_normalisation,
    check_crossings,
    check_settings,
    check_axes,
)


def audit(source: Path | str | BenchmarkReport) -> Audit:
    """All findings about a report, or about the one in a file or folder."""
    report = source if isinstance(source, BenchmarkReport) else benchmark.read(source)
    contest = Contest(report)
    found = [one for check in CHECKS for one in check(contest)]
    return Audit(
        source=report.source,
        contestants=len(report.names),
        runs=sum(run.repeats for run in report.runs),
        evaluations=sum(len(run.evaluations) for run in report.runs),
        findings=tuple(one for one in found if isinstance(one, AuditFinding)),
        unchecked=tuple(dict.fromkeys(one for one in found if isinstance(one, NotChecked))),
        notes=tuple(clock_notes(contest)),
    )
