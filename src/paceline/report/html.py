"""The same answer for a notebook: one self-contained fragment, no scripts."""

from __future__ import annotations

from html import escape

from paceline.spec.prediction import Prediction
from paceline.units import show

_COLORS = {"compute": "#2a9d5c", "memory": "#2a8fbd", "latency": "#c99a2e", "host": "#a14fa1"}
_MEMORY = {
    "parameters": "#3466c2", "gradients": "#6f9bea", "optimizer": "#a14fa1", "activations": "#2a9d5c", "temporary": "#c99a2e", "workspace": "#888888",
}


def prediction_html(p: Prediction) -> str:
    """Headline, breakdown and memory bar as HTML."""
    sizes = f"batch {p.batch}" + (f", sequence {p.seq}" if p.seq else "")
    rows = "".join(
        f"<tr><td>{escape(part.name)}</td><td style='text-align:right'>{part.seconds * 1e3:.3g} ms</td>"
        f"<td><div style='background:{_COLORS[part.bound_by]};height:.8em;width:{part.share * 20:.2f}em'></div></td>"
        f"<td>{100 * part.share:.0f} %</td><td>{escape(part.bound_by)}</td></tr>"
        for part in p.breakdown if part.share >= 0.01
    )
    scale = max(p.memory.available_bytes, p.memory.reserved_bytes)
    bar = "".join(
        f"<div title='{escape(kind)} {show(size, 'bytes')}' style='background:{_MEMORY[kind]};height:1em;width:{30 * size / scale:.3f}em'></div>"
        for kind, size in p.memory.by_kind.items() if size
    )
    legend = ", ".join(f"{escape(kind)} {show(size, 'bytes')}" for kind, size in p.memory.by_kind.items() if size)
    verdict = "" if p.fit.fits else (
        f"<p style='color:#b00020'>does not fit: needs {show(p.fit.needed_bytes, 'bytes')}, has {show(p.fit.available_bytes, 'bytes')}</p>"
    )
    return (
        f"<div style='font-family:sans-serif'><p><b>{escape(p.model)}</b> on {escape(p.device)}, {sizes}, {escape(p.precision)}, "
        f"{escape(p.optimizer)}</p><p><b>{show(p.step_s, 'time')}</b> per step (90 %: {show(p.step_s_low, 'time')} to "
        f"{show(p.step_s_high, 'time')}), <b>{show(p.throughput, 'count')} {escape(p.unit)}/s</b>, {100 * p.mfu:.1f} % of peak, "
        f"bound by <b style='color:{_COLORS[p.bound_by]}'>{escape(p.bound_by)}</b></p><table>{rows}</table>"
        f"<p>{show(p.memory.peak_bytes, 'bytes')} at the peak of {show(p.memory.available_bytes, 'bytes')}</p>"
        f"<div style='display:flex;width:30em;background:#eee'>{bar}</div><p style='font-size:smaller'>{legend}</p>{verdict}</div>"
    )
