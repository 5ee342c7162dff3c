"""An answer as one HTML file: what a terminal shows, and its plot, without anything to load from
elsewhere.
"""

from __future__ import annotations

import io
from html import escape
from pathlib import Path
from typing import Any

from paceline.errors import SpecError

WIDTH = 150


def page(title: str, *views: Any, images: tuple[str, ...] = ()) -> str:
    """The page; `views` are what rich can draw, `images` HTML of plots."""
    from rich.console import Console

    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    for view in views:
        console.print(view)
    body = console.export_html(
        inline_styles=True, code_format="<pre style='font-family:monospace;line-height:1.25'>{code}</pre>"
    )
    style = "body{font-family:sans-serif;margin:2em;max-width:110em}img{max-width:100%}"
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{style}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}{''.join(images)}</body></html>"


def write(path: Path | str, text: str) -> None:
    """Writes a page; the file appears whole or not at all."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise SpecError(f"cannot write page {str(path)!r}: {error.strerror}") from None
