"""JSON with the line on which each value is written."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
#: a step into an object or a list
Path = tuple[str | int, ...]


def load(text: str) -> tuple[Any, dict[Path, int]]:
    """The data of a JSON text, and the line of each value by its path; raises what `json.loads` does."""
    data = json.loads(text)
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    lines = {path: bisect_right(starts, at) for path, at in _values(text)}
    return data, lines


def _values(text: str) -> Iterator[tuple[Path, int]]:
    """(path, position) of every value of a valid JSON text."""
    open_: list[tuple[Path, str, int]] = []
    path: Path = ()
    at = _skip(text, 0)
    while True:
        yield path, at
        at = _skip(text, at)
        mark = text[at]
        closing = {"{": "}", "[": "]"}.get(mark, "")
        if closing and text[_skip(text, at + 1)] != closing:
            open_.append((path, mark, 0))
            path, at = _enter(text, open_[-1], at + 1)
            continue
        at = _skip(text, at + 1) + 1 if closing else _DECODER.raw_decode(text, at)[1]
        at = _skip(text, at)
        while open_ and text[at] in "}]":
            open_.pop()
            at = _skip(text, at + 1)
        if not open_:
            return
        outer, mark, index = open_[-1]
        open_[-1] = (outer, mark, index + 1)
        path, at = _enter(text, open_[-1], at + 1)


def _enter(text: str, container: tuple[Path, str, int], at: int) -> tuple[Path, int]:
    """Path and position of the next value of an open object or list."""
    outer, mark, index = container
    at = _skip(text, at)
    if mark == "[":
        return (*outer, index), at
    key, at = _DECODER.raw_decode(text, at)
    return (*outer, key), _skip(text, _skip(text, at) + 1)


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
