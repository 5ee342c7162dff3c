"""The same answer for a notebook: one self-contained fragment, no scripts."""

from __future__ import annotations

from html import escape

from paceline.report.terminal import memory_scale, peak_share
from paceline.spec.prediction import DistributedPrediction, Prediction
from paceline.units import show

_COLORS = {
    "compute": "#2a9d5c",
    "memory": "#2a8fbd",
    "latency": "#c99a2e",
    "host": "#a14fa1",
    "communication": "#3466c2",
    "bubble": "#b8452f",
}
_MEMORY = {
    "parameters": "#3466c2",
    "gradients": "#6f9bea",
    "optimizer": "#a14fa1",
    "activations": "#2a9d5c",
    "temporary": "#c99a2e",
    "workspace": "#888888",
}


def prediction_html(p: Prediction) -> str:
    """Headline, breakdown and memory bar as HTML."""
    sizes = f"batch {p.batch}" + (f", sequence {p.seq}" if p.seq else "")
    first = (
        f"<b>{escape(p.model)}</b> on {escape(p.device)}, {sizes}, {escape(p.precision)},"
        f" {escape(p.optimizer)}"
    )
    return _fragment(p, first, f"{100 * p.mfu:.1f} % of peak, bound by {_bound(p.bound_by)}", 0.01)


def distributed_html(p: DistributedPrediction) -> str:
    """Headline, breakdown along the critical path, memory of the fullest stage and a line per stage as
    HTML.
    """
    first = f"<b>{escape(p.model)}</b> on {escape(p.cluster)}, {p.devices} devices: {escape(p.plan)}"
    second = (
        f"{peak_share(p, 'peak')}, bound by {_bound(p.bound_by)}; exposed communication "
        f"{100 * p.exposed_s / p.step_s:.1f} %, pipeline bubble {100 * p.bubble_s / p.step_s:.1f} %"
    )
    rows = "".join(
        f"<tr><td>{i}</td><td>{stage.layers}</td><td>{stage.forward_s * 1e3:.3g}"
        f" ms</td><td>{stage.backward_s * 1e3:.3g}"
        f" ms</td><td>{show(stage.memory.peak_bytes, 'bytes')}</td></tr>"
        for i, stage in enumerate(p.stages)
    )
    head = "".join(f"<th>{title}</th>" for title in ("stage", "layers", "forward", "backward", "memory"))
    return _fragment(
        p, first, second, 0.001, f"<table><tr>{head}</tr>{rows}</table>" if len(p.stages) > 1 else ""
    )


def _bound(kind: str) -> str:
    return f"<b style='color:{_COLORS[kind]}'>{escape(kind)}</b>"


def _fragment(
    p: Prediction | DistributedPrediction, first: str, second: str, least: float, more: str = ""
) -> str:
    """What both kinds of answers show: lines of the breakdown down to the share `least`, and the memory."""
    digits = 1 if least < 0.01 else 0
    rows = "".join(
        f"<tr><td>{escape(part.name)}</td><td style='text-align:right'>{part.seconds * 1e3:.3g}"
        " ms</td><td><div"
        f" style='background:{_COLORS[part.bound_by]};height:.8em;width:{part.share * 20:.2f}em'></div></td>"
        f"<td>{100 * part.share:.{digits}f}"
        f" %</td><td>{escape(part.bound_by)}</td></tr>"
        for part in p.breakdown
        if part.share >= least
    )
    scale = memory_scale(p.memory)
    bar = "".join(
        f"<div title='{escape(kind)} {show(size, 'bytes')}'"
        f" style='background:{_MEMORY[kind]};height:1em;width:{30 * size / scale:.3f}em'></div>"
        for kind, size in p.memory.by_kind.items()
        if size
    )
    legend = ", ".join(
        f"{escape(kind)} {show(size, 'bytes')}" for kind, size in p.memory.by_kind.items() if size
    )
    verdict = (
        ""
        if p.fit.fits
        else (
            f"<p style='color:#b00020'>does not fit: needs {show(p.fit.needed_bytes, 'bytes')}, has"
            f" {show(p.fit.available_bytes, 'bytes')}</p>"
        )
    )
    return (
        f"<div style='font-family:sans-serif'><p>{first}</p><p><b>{show(p.step_s, 'time')}</b> per step (90"
        f" %: {show(p.step_s_low, 'time')} to {show(p.step_s_high, 'time')}),"
        f" <b>{show(p.throughput, 'count')} {escape(p.unit)}/s</b>,"
        f" {second}</p><table>{rows}</table><p>{show(p.memory.peak_bytes, 'bytes')} at the peak of"
        f" {show(p.memory.available_bytes, 'bytes')}</p><div"
        f" style='display:flex;width:30em;background:#eee'>{bar}</div><p"
        f" style='font-size:smaller'>{legend}</p>{verdict}{more}</div>"
    )
