"""Simulated schedules: a table for the terminal, and a page with a Gantt chart and plots. Plain values in, so
that it needs no scheduler.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from zlib import crc32

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.units import show

#: (key, title, dimension)
COLUMNS = (
    ("avg_jct_s", "mean", "time"),
    ("median_jct_s", "median", "time"),
    ("p99_jct_s", "p99", "time"),
    ("avg_successful_jct_s", "mean of successful", "time"),
    ("avg_wait_s", "first wait", "time"),
    ("makespan_s", "makespan", "time"),
    ("utilisation", "busy", "fraction"),
    ("wasted_device_hours", "wasted device-h", "count"),
    ("restarts", "restarts", "count"),
    ("elapsed_s", "simulated in", "time"),
)
_COLORS = ("#3466c2", "#c2543a", "#2a9d5c", "#a14fa1", "#c99a2e", "#2a8fbd", "#6b6b6b", "#d4719b")
#: (policy, sorted response times)
Curve = tuple[str, Sequence[float]]
#: (job, start, end, ((node, devices), ...))
Bar = tuple[str, float, float, Sequence[tuple[int, int]]]


def cell(row: Mapping[str, Any], key: str, dimension: str) -> str:
    """A figure with its confidence interval where there is one."""
    value = row[key]
    if isinstance(value, float) and math.isnan(value):
        return "-"
    text = show(value, dimension)
    width = row.get("ci95", {}).get(key)
    if width is None or math.isnan(width) or key == "elapsed_s" or value == 0:
        return text
    return f"{text} ± {100 * width / abs(value):.0f} %"


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Policies, the best mean response time first."""
    view = Table(box=None, pad_edge=False, header_style="dim")
    view.add_column("policy")
    for _, name, _ in COLUMNS:
        view.add_column(name, justify="right")
    ordered = sorted(rows, key=lambda row: row["avg_jct_s"])
    for i, row in enumerate(ordered):
        view.add_row(
            Text(row["policy"], style="bold green" if i == 0 else ""),
            *(cell(row, key, dimension) for key, _, dimension in COLUMNS),
        )
    return Group(Text(title, style="bold"), view, Text("response times: from submission to end", style="dim"))


def page(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    curves: Sequence[Curve],
    charts: Sequence[tuple[str, Sequence[Bar], Sequence[int]]],
) -> str:
    """One self-contained page without scripts; `charts`: (policy, bars, devices of each node)."""
    parts = [
        (
            "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport'"
            " content='width=device-width'>"
        ),
        (
            f"<title>{escape(title)}</title><style>body{{font:15px/1.4 system-ui,sans-serif;margin:2em"
            " auto;max-width:70em;padding:0 1em}"
        ),
        (
            "table{border-collapse:collapse}td,th{padding:.2em"
            " .7em;text-align:right}td:first-child,th:first-child{text-align:left}"
        ),
        "tr:nth-child(even){background:#f4f4f4}svg{max-width:100%;height:auto}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        _html_table(rows),
        "<h2>Response times</h2>",
        _distribution(curves),
    ]
    for policy, bars, devices in charts:
        parts.append(f"<h2>{escape(policy)}: which job ran where</h2>{_gantt(bars, devices)}")
    return "\n".join([*parts, "</body></html>\n"])


def _html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for _, name, _ in COLUMNS)
    body = "".join(
        f"<tr><td>{escape(row['policy'])}</td>"
        + "".join(f"<td>{escape(cell(row, key, dim))}</td>" for key, _, dim in COLUMNS)
        + "</tr>"
        for row in sorted(rows, key=lambda row: row["avg_jct_s"])
    )
    return f"<table><tr><th>policy</th>{head}</tr>{body}</table>"


def _distribution(curves: Sequence[Curve], width: int = 820, height: int = 330) -> str:
    """Share of jobs that are over within a time, on a logarithmic axis."""
    low = max(1.0, min(values[0] for _, values in curves))
    high = max(max(values[-1] for _, values in curves), low * 10)
    left, top, right, bottom = 50, 10, width - 170, height - 40
    first, last = math.log10(low), math.log10(high)

    def x(seconds: float) -> float:
        return left + (right - left) * (math.log10(max(seconds, low)) - first) / (last - first)

    out = [
        (
            f"<svg viewBox='0 0 {width} {height}' width='{width}' role='img'"
            " aria-label='distribution of response times'>"
        )
    ]
    for power in range(math.ceil(first), math.floor(last) + 1):
        at = x(10.0**power)
        out.append(
            f"<line x1='{at:.1f}' x2='{at:.1f}' y1='{top}' y2='{bottom}' stroke='#ddd'/><text x='{at:.1f}'"
            f" y='{bottom + 18}' font-size='12'"
            f" text-anchor='middle'>{escape(show(10.0**power, 'time'))}</text>"
        )
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - (bottom - top) * share
        out.append(
            f"<line x1='{left}' x2='{right}' y1='{y:.1f}' y2='{y:.1f}' stroke='#ddd'/><text x='{left - 6}'"
            f" y='{y + 4:.1f}' font-size='12' text-anchor='end'>{100 * share:.0f} %</text>"
        )
    for i, (policy, values) in enumerate(curves):
        color = _COLORS[i % len(_COLORS)]
        step = max(1, len(values) // 200)
        picked = [*range(0, len(values), step), len(values) - 1]
        points = " ".join(
            f"{x(values[j]):.1f},{bottom - (bottom - top) * (j + 1) / len(values):.1f}" for j in picked
        )
        out.append(
            f"<polyline points='{points}' fill='none' stroke='{color}' stroke-width='2'/><text"
            f" x='{right + 10}' y='{top + 14 + 18 * i}' font-size='13' fill='{color}'>{escape(policy)}</text>"
        )
    return "".join([*out, "</svg>"])


def _gantt(bars: Sequence[Bar], devices: Sequence[int], width: int = 1000, most: int = 4000) -> str:
    """A lane for each device (or, on large clusters, as high as fits), time to the right; the longest bars
    where there are too many.
    """
    if not bars:
        return "<p>no job ran</p>"
    shown = sorted(sorted(bars, key=lambda bar: bar[1] - bar[2])[:most], key=lambda bar: bar[1])
    first, last = min(bar[1] for bar in bars), max(bar[2] for bar in bars)
    lane = max(1.0, min(12.0, 900 / sum(devices)))
    tops = [lane * sum(devices[:i]) for i in range(len(devices))]
    height = lane * sum(devices) + 24
    scale = width / max(last - first, 1e-9)
    out = [f"<svg viewBox='0 0 {width} {height:.0f}' width='{width}' role='img' aria-label='Gantt chart'>"]
    for node, top in enumerate(tops):
        if node % 2 == 0:
            out.append(
                f"<rect x='0' y='{top:.1f}' width='{width}' height='{lane * devices[node]:.1f}'"
                " fill='#f2f2f2'/>"
            )
    lanes: list[list[float]] = [[-math.inf] * count for count in devices]
    for name, start, end, allocation in shown:
        color, title = (
            _color(name),
            escape(f"{name}: {show(end - start, 'time')} from {show(start - first, 'time')}"),
        )
        for node, count in allocation:
            taken = sorted(
                sorted(range(devices[node]), key=lambda i: (lanes[node][i] > start + 1e-9, i))[:count]
            )
            for i in taken:
                lanes[node][i] = end
            out.extend(
                f"<rect x='{(start - first) * scale:.2f}' y='{tops[node] + lane * i:.2f}'"
                f" width='{max((end - start) * scale, 0.3):.2f}' height='{lane * 0.92:.2f}'"
                f" fill='{color}'><title>{title}</title></rect>"
                for i in taken
            )
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        anchor = {0.0: "start", 1.0: "end"}.get(share, "middle")
        label = escape(show(share * (last - first), "time"))
        out.append(
            f"<text x='{share * width:.0f}' y='{height - 6:.0f}' font-size='12'"
            f" text-anchor='{anchor}'>{label}</text>"
        )
    note = f"<p>the {most} longest of {len(bars)} stretches are drawn</p>" if len(bars) > most else ""
    return "".join([*out, "</svg>", note])


def _color(name: str) -> str:
    """The same job has the same color everywhere."""
    r, g, b = colorsys.hls_to_rgb(crc32(name.encode()) % 360 / 360, 0.55, 0.55)
    return f"#{round(r * 255):02x}{round(g * 255):02x}{round(b * 255):02x}"
