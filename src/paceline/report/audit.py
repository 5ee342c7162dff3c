"""An audit for a terminal: findings with their evidence, and what could not be checked."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.spec.audit import Audit, AuditFinding

#: cells of evidence that a terminal shows; --json has all
MOST_CELLS = 6


def audit_view(found: Audit) -> RenderableType:
    """Findings first, then notes, then what the data do not show."""
    counted = f"{_many(found.contestants, 'contestant')}, {_many(found.runs, 'run')}"
    if found.evaluations:
        counted += f", {_many(found.evaluations, 'evaluation')}"
    verdict = Text("no finding", style="bold green")
    if found.findings:
        verdict = Text(_many(len(found.findings), "finding"), style="bold red")
    parts: list[RenderableType] = [Text.assemble((found.source, "bold"), f": {counted}: ", verdict)]
    for finding in found.findings:
        parts += [Text(), *_finding(finding)]
    if found.notes:
        parts += [Text(), *(Text(f"note: {note}") for note in found.notes)]
    if found.unchecked:
        parts += [Text(), Text("not checked, as the report does not have:", style="dim")]
        parts += [Text(f"  {one.missing}: {one.what}", style="dim") for one in found.unchecked]
    return Group(*parts)


def _finding(finding: AuditFinding) -> Iterator[Text]:
    yield Text.assemble((finding.title, "bold"), f" ({finding.kind})")
    yield Text(f"  {finding.text}")
    for cell in finding.evidence[:MOST_CELLS]:
        yield Text(f"    {cell}", style="dim")
    if len(finding.evidence) > MOST_CELLS:
        yield Text(f"    and {len(finding.evidence) - MOST_CELLS} more cells: --json", style="dim")
    yield Text(f"  honest: {finding.honest}", style="green")


def _many(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"
