"""HTML and SVG as values: every text is escaped unless it is markup already.

>>> tag("p", "a < b", class_="note")
'<p class="note">a &lt; b</p>'
>>> tag("p", tag("b", "bold"), " & plain")
'<p><b>bold</b> &amp; plain</p>'
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

#: elements that have no content and no end tag
_VOID = (
    "br",
    "circle",
    "col",
    "hr",
    "img",
    "input",
    "line",
    "link",
    "meta",
    "path",
    "polygon",
    "polyline",
    "rect",
)


class Html(str):
    """Text that is markup and goes into a page as it is."""

    __slots__ = ()


def text(child: object) -> Html:
    """A child as markup: escaped unless it is `Html`."""
    return child if isinstance(child, Html) else Html(escape(str(child)))


def join(children: Iterable[object]) -> Html:
    """Children one after the other."""
    return Html("".join(text(child) for child in children if child is not None))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. `class_` is written class, `aria_label` aria-label; an attribute that is None or False is
    left out, one that is True has no value.
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID and not children:
        return Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key if key == "viewBox" else key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    shown = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return f' {name}="{escape(shown)}"'


def table(head: Sequence[object], rows: Iterable[Sequence[object]], caption: str = "") -> Html:
    """A table that scrolls sideways where it is too wide; the first column holds row headers."""
    titles = tag("tr", *(tag("th", title, scope="col") for title in head))
    body = (tag("tr", tag("th", row[0], scope="row"), *(_cell(cell) for cell in row[1:])) for row in rows)
    named = tag("caption", caption) if caption else None
    whole = tag("table", named, tag("thead", titles), tag("tbody", *body))
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=caption or str(head[0]))


def _cell(cell: object) -> Html:
    """A cell; one that begins with a figure stays on one line."""
    figure = len(str(cell)) < 24 and str(cell)[:1].isdigit()
    return tag("td", cell, class_="number" if figure else None)


def details(summary: str, *children: object) -> Html:
    """Children behind a summary that opens them."""
    return tag("details", tag("summary", summary), *children)
