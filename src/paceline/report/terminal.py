"""Answers for a terminal: a few lines a person enjoys, drawn with rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.spec.prediction import DistributedPrediction, Evidence, Fit, Memory, Prediction
from paceline.units import show

_BOUND_STYLE = {
    "compute": "green",
    "memory": "cyan",
    "latency": "yellow",
    "host": "magenta",
    "communication": "blue",
    "bubble": "red",
}
_MEMORY_STYLE = {
    "parameters": "blue",
    "gradients": "bright_blue",
    "optimizer": "magenta",
    "activations": "green",
    "temporary": "yellow",
    "workspace": "white",
}
_BAR = 48


def prediction_view(p: Prediction) -> RenderableType:
    """Headline, where the time goes, memory, what it rests on."""
    return Group(*_headline(p), Text(), *_time_lines(p), Text(), *_memory_lines(p), Text(), *_basis(p))


def _headline(p: Prediction) -> list[Text]:
    sizes = f"batch {p.batch}" + (f", sequence {p.seq}" if p.seq else "")
    first = Text.assemble((p.model, "bold"), f" on {p.device}, {sizes}, {p.precision}, {p.optimizer}")
    answer = Text.assemble(
        (show(p.step_s, "time"), "bold green"),
        f" per step  (90 %: {show(p.step_s_low, 'time')} to {show(p.step_s_high, 'time')})   ",
        (f"{show(p.throughput, 'count')} {p.unit}/s", "bold"),
        f"   {100 * p.mfu:.1f} % of peak FLOP/s",
    )
    return [first, answer, _bound_line(p)]


def _bound_line(p: Prediction) -> Text:
    why = {
        "host": (
            f"the host needs {show(p.host_s, 'time')} to issue the step, the device"
            f" {show(p.kernel_s, 'time')} to run it"
        ),
        "compute": "matrix units are busy for most of the device time",
        "memory": "most device time moves bytes",
        "latency": "most device time goes to operators too small to fill the device",
    }[p.bound_by]
    advice = {
        "host": "a larger batch, torch.compile or CUDA graphs would help",
        "compute": "a lower precision or a faster device would help",
        "memory": "fusion (torch.compile), a lower precision or more bandwidth would help",
        "latency": "a larger batch or fusion would help",
    }[p.bound_by]
    return Text.assemble(
        "bottleneck: ", (p.bound_by, f"bold {_BOUND_STYLE[p.bound_by]}"), f": {why}; {advice}"
    )


def _time_lines(p: Prediction) -> list[RenderableType]:
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    for title in ("where the time goes", "ms", "share", "", "calls", "bound by"):
        table.add_column(title, justify="right" if title in ("ms", "share", "calls") else "left")
    shown = [part for part in p.breakdown if part.share >= 0.01][:10]
    for part in shown:
        style = _BOUND_STYLE[part.bound_by]
        bar = Text("█" * max(1, round(part.share * 30)), style=style)
        table.add_row(
            part.name,
            _ms(part.seconds),
            f"{100 * part.share:.0f} %",
            bar,
            str(part.count),
            Text(part.bound_by, style=style),
        )
    rest = p.kernel_s - sum(part.seconds for part in shown)
    if rest > 1e-9 * p.kernel_s and len(shown) < len(p.breakdown):
        table.add_row("the rest", _ms(rest), f"{100 * rest / p.kernel_s:.0f} %", "", "", "")
    phases = ", ".join(f"{name} {_ms(seconds)} ms" for name, seconds in p.phases.items() if seconds > 0)
    return [
        table,
        Text(f"device time {show(p.kernel_s, 'time')} in {p.kernels:.0f} kernels: {phases}", style="dim"),
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def memory_scale(found: Memory) -> int:
    """Bytes at which a bar of what is allocated is full: the device's, or all where they do not fit."""
    allocated = sum(found.by_kind.values())
    return max(found.available_bytes, allocated) if found.fits else allocated


def _memory_bar(found: Memory) -> list[Text]:
    """A bar of what is allocated by kind, and its legend."""
    scale = memory_scale(found)
    bar = Text()
    allocated = drawn = 0
    for kind, size in found.by_kind.items():
        allocated += size
        end = round(_BAR * allocated / scale)  # ends are rounded, not lengths: a full bar has no gap
        bar.append("█" * (end - drawn), style=_MEMORY_STYLE[kind])
        drawn = end
    bar.append("░" * (_BAR - drawn), style="dim")
    legend = Text()
    for kind, size in found.by_kind.items():
        if size:
            legend.append("■ ", style=_MEMORY_STYLE[kind])
            legend.append(f"{kind} {show(size, 'bytes')}  ")
    return [bar, legend]


def _memory_lines(p: Prediction) -> list[Text]:
    found = p.memory
    head = Text.assemble(
        "memory: ",
        (show(found.peak_bytes, "bytes"), "bold"),
        f" allocated at the peak ({found.peak_at}), about "
        f"{show(found.reserved_bytes, 'bytes')} reserved of {show(found.available_bytes, 'bytes')}",
    )
    lines = [head, *_memory_bar(found)]
    return lines + ([] if p.fit.fits else _unfit(p.fit))


def _unfit(fit: Fit) -> list[Text]:
    """By how much a step does not fit, and what would help."""
    short = fit.needed_bytes - fit.available_bytes
    lines = [
        Text(
            f"does not fit: needs {show(fit.needed_bytes, 'bytes')}, has"
            f" {show(fit.available_bytes, 'bytes')}, short of {show(short, 'bytes')}",
            style="bold red",
        )
    ]
    for name, size in fit.remedies:
        verdict = "fits" if size <= fit.available_bytes else "still too much"
        lines.append(
            Text(
                f"  with {name}: about {show(size, 'bytes')}, {verdict}",
                style="red" if verdict != "fits" else "green",
            )
        )
    return lines


def distributed_view(p: DistributedPrediction) -> RenderableType:
    """Headline, where the time goes along the critical path, memory of each stage, what it rests on."""
    first = Text.assemble(
        (p.model, "bold"), f" on {p.cluster}, {p.devices} device{'s' * (p.devices != 1)}: {p.plan}"
    )
    answer = Text.assemble(
        (show(p.step_s, "time"), "bold green"),
        f" per step  (90 %: {show(p.step_s_low, 'time')} to {show(p.step_s_high, 'time')})   ",
        (f"{show(p.throughput, 'count')} {p.unit}/s", "bold"),
        f"   {peak_share(p, 'peak FLOP/s')}",
    )
    bound = Text.assemble(
        "bottleneck: ",
        (p.bound_by, f"bold {_BOUND_STYLE[p.bound_by]}"),
        f"; exposed communication {100 * p.exposed_s / p.step_s:.1f} %, pipeline bubble"
        f" {100 * p.bubble_s / p.step_s:.1f} %",
    )
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    for title in ("where the time goes", "ms", "share", ""):
        table.add_column(title, justify="right" if title in ("ms", "share") else "left")
    for part in p.breakdown:
        if part.share >= 0.001:
            bar = Text("█" * max(1, round(part.share * 30)), style=_BOUND_STYLE[part.bound_by])
            table.add_row(part.name, _ms(part.seconds), f"{100 * part.share:.1f} %", bar)
    return Group(first, answer, bound, Text(), table, Text(), *_stage_lines(p), Text(), *_basis(p))


def peak_share(p: DistributedPrediction, peak: str) -> str:
    """The share of peak of the model's FLOPs; beside it that of all FLOPs, where some are computed again."""
    share = f"{100 * p.mfu:.1f} % of {peak}"
    recomputed = p.hfu > 1.0001 * p.mfu  # equal but for rounding where nothing is
    return f"{share} ({100 * p.hfu:.1f} % with recomputation)" if recomputed else share


def spent(seconds: float) -> str:
    """A time in a table whose entries may have none."""
    return show(seconds, "time") if seconds else "none"


def _stage_lines(p: DistributedPrediction) -> list[RenderableType]:
    """Memory of the fullest stage by kind, and of the others in a line each (equal ones together)."""
    found = p.memory
    head = Text.assemble(
        "memory: ",
        (show(found.peak_bytes, "bytes"), "bold"),
        f" allocated at the peak ({found.peak_at}), about "
        f"{show(found.reserved_bytes, 'bytes')} reserved of {show(found.available_bytes, 'bytes')}",
    )
    lines: list[RenderableType] = [head, *_memory_bar(found)]
    if not p.fit.fits:
        lines += _unfit(p.fit)
    if len(p.stages) > 1:
        rows = [
            (str(i), str(s.layers), _ms(s.forward_s), _ms(s.backward_s), show(s.memory.peak_bytes, "bytes"))
            for i, s in enumerate(p.stages)
        ]
        shown = rows if len(rows) <= 8 else [*rows[:3], ("...",) * 5, *rows[-2:]]
        lines.append(listing("", ("stage", "layers", "forward ms", "backward ms", "memory"), shown))
    return lines


def _basis(p: Prediction | DistributedPrediction) -> list[Text]:
    return [Text("rests on:", style="dim"), *(rests_on(e) for e in p.provenance)]


def rests_on(e: Evidence) -> Text:
    """One line for an input: how it is known, what it is, and where from."""
    style = "yellow" if e.kind == "warning" else ""
    return Text.assemble(("  " + e.kind.ljust(10), "dim"), (e.what, style), (f"  [{e.source}]", "dim"))


#: columns of words
_LEFT = (
    "title",
    "plan",
    "lost by",
    "below",
    "above",
    "source",
    "sets",
    "by",
    "why",
    "metric",
    "architecture",
)


def listing(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A plain table for `devices`, `models` and `validate`."""
    table = Table(box=None, pad_edge=False, title=title or None, title_justify="left", header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 or column in _LEFT else "right")
    for row in rows:
        table.add_row(*row)
    return table


def plain_table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = ()) -> Table:
    """Columns without lines; numbers are on the right, the first column and those named `left` are not."""
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    for place, column in enumerate(head):
        drawn.add_column(column, justify="left" if not place or place in left else "right")
    for row in rows:
        drawn.add_row(*row)
    return drawn
