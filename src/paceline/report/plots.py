"""Plots: scaling curves, sweeps, rooflines and comparisons, as PNG files or inside a page.

Axes start at zero, or are logarithmic and say so; predictions carry their 90 % interval; what is not
predicted (the ideal, the naive guess) is drawn thinner. Needs matplotlib (`pip install 'paceline[plots]'`),
which is imported when a plot is asked for.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from paceline.errors import MissingExtra, SpecError
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.whatif import Comparison, Explanation, Scaling, Sweep

#: inches, and dots per inch
SIZE, DPI = (7.2, 4.4), 120
_PREDICTED, _IDEAL, _NAIVE = "#1f6feb", "#6e7781", "#bf8700"


def figure(answer: Sweep | Explanation | Comparison) -> Any:
    """The plot of an answer."""
    if isinstance(answer, Sweep):
        return _scaling(answer, answer.scaling) if answer.scaling is not None else _sweep(answer)
    return _roofline(answer) if isinstance(answer, Explanation) else _comparison(answer)


def save(answer: Sweep | Explanation | Comparison, path: Path | str) -> None:
    """Writes the plot of an answer; the name's ending says the format."""
    path = Path(path)
    allowed = (".png", ".svg", ".pdf")
    if path.suffix.lower() not in allowed:
        raise SpecError(f"a plot is written as {', '.join(allowed)}; got {str(path)!r}")
    try:
        figure(answer).savefig(path, dpi=DPI)
    except OSError as error:
        raise SpecError(f"cannot write plot {str(path)!r}: {error.strerror}") from None


def embedded(answer: Sweep | Explanation | Comparison) -> str:
    """The plot of an answer as an HTML image that carries its own data."""
    out = io.BytesIO()
    figure(answer).savefig(out, format="png", dpi=DPI)
    return f"<img alt='plot' src='data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}'>"


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "plots", "plotting") from None
    made = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasAgg(made)
    axes = made.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.title.set_fontsize(10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return made, axes


def _scaling(s: Sweep, c: Scaling) -> Any:
    made, axes = _axes(s.subject, "devices (log scale)", f"{c.unit}/s (log scale)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.fill_between(c.devices, c.low, c.high, color=_PREDICTED, alpha=0.2, label="90 % interval")
    axes.plot(c.devices, c.throughput, "o-", color=_PREDICTED, label=f"predicted ({c.kind} scaling)")
    axes.plot(
        c.devices, c.ideal, "--", color=_IDEAL, linewidth=1, label="ideal: the first point's, times devices"
    )
    axes.plot(
        c.devices, c.naive, ":", color=_NAIVE, linewidth=1, label="naive: line rate, nothing overlapped"
    )
    if c.pays_to is not None:
        axes.axvline(
            c.pays_to,
            color="#cf222e",
            linewidth=1,
            label=f"beyond {c.pays_to} a device brings less than half",
        )
    axes.set_xticks(c.devices, [str(n) for n in c.devices])
    axes.legend(fontsize=8, frameon=False)
    return made


def _sweep(s: Sweep) -> Any:
    found = s.found
    made, axes = _axes(s.subject, s.field, "step time in s")
    numbers = [point.number for point, _ in found]
    plain = all(number == number for number in numbers)
    at: Any = numbers if plain else range(len(found))
    unit = found[0][0].value.lstrip("0123456789.eE+") if plain else ""
    axes.set_xlabel(f"{s.field}{f' in {unit}' if unit else ''}")
    axes.fill_between(
        at,
        [p.step_s_low for _, p in found],
        [p.step_s_high for _, p in found],
        color=_PREDICTED,
        alpha=0.2,
        label="90 % interval",
    )
    axes.plot(
        at, [p.step_s for _, p in found], "-" if len(found) > 30 else "o-", color=_PREDICTED, label="step"
    )
    axes.plot(
        at,
        [p.exposed_s for _, p in found],
        "-",
        color=_NAIVE,
        linewidth=1,
        label="of it exposed communication",
    )
    if not plain:
        axes.set_xticks(range(len(found)), [point.value for point, _ in found])
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    return made


def _roofline(e: Explanation) -> Any:
    """FLOP/s against FLOPs per byte: a slope for each way bytes take, the step as a point on each."""
    a, p = e.anatomy, e.prediction
    made, axes = _axes(
        f"{p.model} on {p.cluster}: {p.plan}", "FLOP per byte (log scale)", "FLOP/s of one device (log scale)"
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    peak = a.roofs[0].ceiling
    ways = [roof for roof in a.roofs if roof.intensity]
    low = (
        min(
            [roof.intensity or 1.0 for roof in ways]
            + [peak / max(r.ceiling / (r.intensity or 1.0) for r in ways)]
        )
        / 10
    )
    high = (
        max(
            [roof.intensity or 1.0 for roof in ways]
            + [peak / min(r.ceiling / (r.intensity or 1.0) for r in ways)]
        )
        * 10
    )
    axes.axhline(peak, color="black", linewidth=1.5, label="arithmetic")
    for i, roof in enumerate(ways):
        rate = roof.ceiling / (roof.intensity or 1.0)
        color = f"C{i}"
        axes.plot(
            [low, peak / rate, high], [low * rate, peak, peak], color=color, linewidth=1, label=roof.name
        )
        axes.plot([roof.intensity], [a.achieved], "o", color=color)
    axes.axhline(a.achieved, color=_PREDICTED, linewidth=0.8, linestyle=":", label="achieved")
    axes.set_xlim(low, high)
    axes.legend(fontsize=8, frameon=False)
    return made


def _comparison(c: Comparison) -> Any:
    rows: list[tuple[str, DistributedPrediction]] = [
        (row.plan, row.prediction) for row in c.rows if row.prediction is not None
    ]
    made, axes = _axes(c.subject, "step time in s", "")
    names = [name if p.fit.fits else f"{name} (does not fit)" for name, p in rows]
    left = [0.0] * len(rows)
    kinds = ("compute", "memory", "communication", "bubble", "host", "latency")
    for kind, color in zip(
        kinds, ("#2da44e", "#54aeff", "#1f6feb", "#cf222e", "#a475f9", "#bf8700"), strict=True
    ):
        widths = [sum(part.seconds for part in p.breakdown if part.bound_by == kind) for _, p in rows]
        if any(widths):
            axes.barh(names, widths, left=left, color=color, label=kind)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    spans = [[p.step_s - p.step_s_low for _, p in rows], [p.step_s_high - p.step_s for _, p in rows]]
    axes.errorbar(
        [p.step_s for _, p in rows], names, xerr=spans, fmt="none", ecolor="black", elinewidth=0.8, capsize=2
    )
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.legend(fontsize=8, frameon=False)
    return made
