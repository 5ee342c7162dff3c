"""A timeline as a chart: a lane for each stream of each rank, cut to a window and merged to pixels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from paceline.report.charts import Axis, Frame, legend, svg
from paceline.report.markup import Html, join, tag
from paceline.report.sections import WIDTH, seconds
from paceline.sim.timeline import Span, Timeline

#: ranks that are drawn at most; pixels of a lane
MOST_RANKS, LANE = 8, 18
#: class of what a span is part of; collectives are all else
_KINDS = {
    "forward": "compute",
    "backward": "backward",
    "optimizer": "memory",
    "host": "host",
    "recomputation": "latency",
}


def timeline(found: Timeline, start: float = 0.0, end: float = 1.0, width: float = WIDTH) -> Html:
    """The window from `start` to `end`, as shares of the step."""
    whole = max((span.end_s for span in found.spans), default=0.0)
    window = (start * whole, max(end, start + 1e-6) * whole)
    lanes: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in found.spans:
        if span.rank < MOST_RANKS and span.end_s > window[0] and span.start_s < window[1]:
            lanes[span.rank, span.stream].append(span)
    names = sorted({(s.rank, s.stream) for s in found.spans if s.rank < MOST_RANKS}, key=_first_compute)
    x = Axis(low=window[0], high=window[1], title="seconds of the step", dimension="time")
    frame = Frame(width, LANE * len(names) + 64, x, Axis(low=0, high=1, title=""), left=104, top=8)
    drawn = [lane for i, name in enumerate(names) for lane in _lane(frame, i, name, lanes[name])]
    label = (
        f"timeline of {min(found.ranks, MOST_RANKS)} ranks from {seconds(window[0])} to {seconds(window[1])}"
    )
    more = f" The first {MOST_RANKS} of {found.ranks} ranks." if found.ranks > MOST_RANKS else ""
    ticks = [*frame.x_ticks(), frame.x_title()]
    words = f"{seconds(window[0])} to {seconds(window[1])} of {seconds(whole)}.{more}"
    return join(
        [
            svg(width, frame.height, label, *ticks, *drawn),
            _legend(names, found),
            tag("p", words, class_="soft"),
        ]
    )


def _first_compute(name: tuple[int, str]) -> tuple[int, int, str]:
    order = {"host": 0, "device": 1, "compute": 1}
    return name[0], order.get(name[1], 2), name[1]


def _lane(frame: Frame, place: int, name: tuple[int, str], spans: Sequence[Span]) -> list[Html]:
    y = frame.top + LANE * place
    rank, stream = name
    drawn = [tag("text", f"rank {rank} {stream}", x=frame.left - 6, y=y + 12, text_anchor="end")]
    for start, end, span, count in _merged(frame, spans):
        title = f"{span.name} ({span.category}): {seconds(span.end_s - span.start_s)}"
        words = title if count == 1 else f"{count} spans, {span.category} longest"
        kind = _KINDS.get(span.category, "communication")
        box = {"x": start, "y": y, "width": max(0.6, end - start), "height": LANE - 4}
        drawn.append(tag("rect", tag("title", words), class_=f"fill thin {kind}", **box))
    return drawn


def _merged(frame: Frame, spans: Sequence[Span]) -> list[tuple[float, float, Span, int]]:
    """Spans in pixels; those that touch within a pixel and are of one category become one."""
    out: list[tuple[float, float, Span, int]] = []
    for span in sorted(spans, key=lambda each: each.start_s):
        start, end = frame.at(span.start_s, 0)[0], frame.at(span.end_s, 0)[0]
        if out and start - out[-1][1] < 0.5 and (out[-1][2].category == span.category or end - start < 0.5):
            a, b, longest, count = out[-1]
            longer = span if span.end_s - span.start_s > longest.end_s - longest.start_s else longest
            out[-1] = (a, max(b, end), longer, count + 1)
        else:
            out.append((start, end, span, 1))
    return out


def _legend(names: Sequence[tuple[int, str]], found: Timeline) -> Html:
    categories = sorted({span.category for span in found.spans})
    return legend([(f"fill {_KINDS.get(one, 'communication')}", one) for one in categories])
