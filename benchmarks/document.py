"""Tables of docs/ that scripts here write: each stands between `<!-- part -->` and `<!-- end part -->`."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def fill(page: Path, part: str, text: str) -> None:
    """Puts `text` between the markers of a part, in place of what was there."""
    document = page.read_text()
    begin, end = f"<!-- {part} -->", f"<!-- end {part} -->"
    head, found, rest = document.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{page} has no markers {begin} and {end}")
    page.write_text(f"{head}{begin}\n\n{text}\n\n{end}{tail}")
