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
    return data, {path: bisect_right(starts, at) for path, at in _Scanner(text).values(())}


class _Scanner:
    """Walks a valid JSON text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def values(self, path: Path) -> Iterator[tuple[Path, int]]:
        """Path and position of the next value and of those in it; afterwards `at` is behind it."""
        mark = self.next()
        yield path, self.at
        if mark not in "{[":
            self.scalar()
            return
        self.at += 1
        index = 0
        while self.next() not in "}]":
            yield from self.values((*path, self.key() if mark == "{" else index))
            index += 1
            self.at += self.next() == ","
        self.at += 1

    def next(self) -> str:
        """The next character that is no space; `at` is there."""
        found = _SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return self.text[self.at]

    def key(self) -> str:
        """The key of an object; `at` is behind its colon."""
        name = str(self.scalar())
        self.next()
        self.at += 1
        return name

    def scalar(self) -> Any:
        value, self.at = _DECODER.raw_decode(self.text, self.at)
        return value
