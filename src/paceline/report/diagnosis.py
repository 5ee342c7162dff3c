"""A diagnosis in a terminal: the account of a step, and what to change."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.diagnose.activity import CAUSES
from paceline.diagnose.comparison import StepComparison
from paceline.diagnose.findings import Diagnosis, Finding, title
from paceline.units import show

_LEAST = 0.001


def diagnosis_view(found: Diagnosis) -> RenderableType:
    """Headline, where the time goes, what to change, what to know."""
    blocks: list[RenderableType] = [_headline(found), Text(), _account(found)]
    if len(found.ranks) > 1:
        blocks += [Text(), _ranks(found)]
    blocks += [
        Text(),
        Text("what to change, by the time of a step that it may save (two may claim the same)", style="bold"),
    ]
    blocks += [
        line for number, finding in enumerate(found.top, 1) for line in _finding(number, finding, found)
    ]
    if not found.findings:
        blocks.append(Text("  nothing: no second of the step could be saved by what is looked for"))
    blocks += [Text(f"note: {note}", style="dim") for note in found.notes]
    blocks += [Text(f"left out: {count} of {kind}", style="dim") for kind, count in found.left_out.items()]
    return Group(*blocks)


def _headline(found: Diagnosis) -> Text:
    where = found.device or "the host"
    ranks = f", rank {found.rank} of {found.world}" if found.world > 1 else ""
    one = f"the middle one of {found.steps}" if found.steps > 1 else "the only one"
    memory = (
        f", {show(found.peak_allocated_bytes, 'bytes')} allocated at the peak,"
        f" {show(found.peak_reserved_bytes, 'bytes')} reserved"
        if found.peak_allocated_bytes
        else ""
    )
    return Text.assemble(
        (show(found.step_s, "time"), "bold green"),
        f" per step on {where}{ranks} (found by {found.found_by}, {one}); busy {show(found.busy_s, 'time')}"
        f" with {found.kernels} pieces of work{memory}",
    )


def _account(found: Diagnosis) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("where the time goes", "ms", "share", "calls", "ms of work"):
        table.add_column(name, justify="left" if name.startswith("where") else "right")
    for share in found.shares:
        if share.busy_s >= _LEAST * found.step_s:
            row = (share.seconds, found.step_s, str(share.count), f"{share.busy_s * 1e3:.3g}")
            table.add_row(title(share.group), *_cells(*row))
    for cause, seconds in sorted(found.idle.items(), key=lambda item: -item[1]):
        if seconds >= _LEAST * found.step_s:
            table.add_row(
                Text(f"idle: {CAUSES[cause]}", style="magenta"), *_cells(seconds, found.step_s, "", "")
            )
    return table


def _cells(seconds: float, step_s: float, count: str, busy: str) -> tuple[str, str, str, str]:
    return f"{seconds * 1e3:.3g}", f"{100 * seconds / step_s:.1f} %", count, busy


def _ranks(found: Diagnosis) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("rank", "step ms", "computes ms", "waits for others ms"):
        table.add_column(name, justify="right")
    for time in found.ranks:
        table.add_row(
            str(time.rank), *(f"{s * 1e3:.4g}" for s in (time.step_s, time.compute_s, time.waits_s))
        )
    return table


def _finding(number: int, finding: Finding, found: Diagnosis) -> Iterator[Text]:
    saves = f"{show(finding.saves_s, 'time')} ({100 * finding.saves_s / found.step_s:.0f} %)"
    yield Text.assemble(f"{number}. ", (saves, "bold"), f"  {finding.title}")
    yield Text.assemble(("   do: ", "dim"), finding.advice)
    yield Text(f"   counted: {finding.basis}", style="dim")
    for line in finding.evidence:
        yield Text(f"   seen: {line}", style="dim")
    for place in finding.places:
        span = f"{place.start_s * 1e3:.3f} to {place.end_s * 1e3:.3f} ms"
        yield Text(f"   at: {span} of the trace: {place.what}", style="dim")


def comparison_view(found: StepComparison) -> RenderableType:
    """Both steps, the rows in which they differ, what to know."""
    ratio = found.measured_s / found.predicted_s
    head = Text.assemble(
        (found.model, "bold"),
        f": {show(found.measured_s, 'time')} measured on {found.measured_on or 'the host'},"
        f" {show(found.predicted_s, 'time')} predicted for {found.predicted_for}"
        f" (90 %: {show(found.predicted_low_s, 'time')} to {show(found.predicted_high_s, 'time')}): ",
        (f"{ratio:.2f} times the prediction", "bold"),
    )
    accounted = f"{100 * found.accounted:.1f} % of the measured step is accounted for"
    lines = [
        Text(f"step found by {found.found_by}; {accounted}", style="dim"),
        Text(f"kernels: {_pair(found.measured_kernel_s, found.predicted_kernel_s)}"),
        Text(_host_line(found)),
    ]
    if found.measured_peak_bytes:
        sizes = (show(size, "bytes") for size in (found.measured_peak_bytes, found.predicted_peak_bytes))
        lines.append(Text("memory allocated at the peak: {} measured, {} predicted".format(*sizes)))
    notes = [Text(f"note: {note}", style="dim") for note in found.notes]
    return Group(head, *lines, Text(), _rows(found), *notes)


def _pair(measured_s: float, predicted_s: float) -> str:
    ratio = f" ({measured_s / predicted_s:.2f} x)" if predicted_s else ""
    return f"{show(measured_s, 'time')} measured, {show(predicted_s, 'time')} predicted{ratio}"


def _host_line(found: StepComparison) -> str:
    host = found.host
    waits = f"; it waited for the device {host.waits} times" if host.waits else ""
    return (
        f"host: {_pair(host.measured_s, host.predicted_s)}; {host.launches} kernels and copies launched,"
        f" {host.predicted_launches} predicted{waits}"
    )


def _rows(found: StepComparison) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    columns = (
        "where the two part",
        "measured ms",
        "predicted ms",
        "difference",
        "of the step",
        "kernels",
        "predicted",
    )
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left")
    for row in found.rows:
        if max(row.measured_s, row.predicted_s) < _LEAST * found.measured_s:
            continue
        kernels = (str(row.measured_kernels), str(row.predicted_kernels)) if row.kind == "work" else ("", "")
        table.add_row(
            row.name,
            f"{row.measured_s * 1e3:.3g}",
            f"{row.predicted_s * 1e3:.3g}",
            f"{row.difference_s * 1e3:+.3g}",
            f"{100 * row.difference_s / found.measured_s:+.1f} %",
            *kernels,
        )
    return table
