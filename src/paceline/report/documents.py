"""Answers as self-contained HTML files: styles within, nothing to load, the command at the top, printable."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from paceline.report.markup import Html, tag
from paceline.report.sections import headline, memory, sources, time
from paceline.report.whatif_sections import section
from paceline.spec.prediction import DistributedPrediction, Prediction


@cache
def style() -> str:
    """The style of answers, and of a page of them."""
    folder = files(__package__)
    return "".join((folder / name).read_text(encoding="utf-8") for name in ("style.css", "document.css"))


def document(title: str, command: str, parts: Sequence[tuple[str, object]]) -> str:
    """A page of parts under headings."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("title", title),
        tag("style", Html(style())),
    )
    asked = tag("p", "made by ", tag("code", command), class_="soft")
    sections = (section(name, body) for name, body in parts)
    body = tag("body", tag("main", tag("h1", title), asked, *sections))
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def predicted(p: Prediction | DistributedPrediction, command: str) -> str:
    """The report of one step."""
    where = p.cluster if isinstance(p, DistributedPrediction) else p.device
    plan = f": {p.plan}" if isinstance(p, DistributedPrediction) else ""
    parts = [
        ("This step", headline(p)),
        ("Where the time goes", time(p)),
        ("Memory", memory(p)),
        ("What it rests on", sources(p.provenance)),
    ]
    return document(f"{p.model} on {where}{plan}", command, parts)
