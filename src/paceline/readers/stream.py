"""Large files a piece at a time: text, plain or compressed, and the JSON values in it."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from paceline.errors import DataError

#: characters read at a time, and the most that one value may have
CHUNK, LONGEST = 1 << 20, 1 << 26
_GZIP = b"\x1f\x8b"
_BETWEEN = " \t\r\n"
_decode = json.JSONDecoder().raw_decode


@contextmanager
def opened(path: Path | str) -> Iterator[TextIO]:
    """The text of a file, decompressed where its first bytes say so; DataError where it cannot be read.

    Bytes that are not UTF-8 become a mark: programs cut long names anywhere.
    """
    try:
        with Path(path).open("rb") as file:
            packed = file.read(2) == _GZIP
        opener = gzip.open if packed else open
        with opener(path, "rt", encoding="utf-8", errors="replace") as text:
            yield text
    except EOFError:
        raise DataError(f"{path} ends too early: it was cut off") from None
    except (OSError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"cannot read {str(path)!r}: {reason}") from None


def printable(text: object) -> str:
    """A text of a file on one line, without characters that a terminal would take for commands."""
    return "".join(c if c.isprintable() else " " for c in str(text))


class JsonObject:
    """A large JSON object, or a bare list of entries, of which one value is held at a time.

    `entries(key)` gives the members of the list `key` as they are read; `header` gets all other keys.
    """

    def __init__(self, file: TextIO, where: str) -> None:
        self.header: dict[str, Any] = {}
        self._file = file
        self._where = where
        self._text = ""
        self._at = 0

    def entries(self, key: str) -> Iterator[Any]:
        """Members of the list `key`, or of the list that the file is."""
        if self._next() == "[":
            yield from self._list()
            return
        self._take("{")
        found = False
        while self._next() != "}":
            name = self._value()
            self._take(":")
            if name == key and self._next() == "[":
                found = True
                yield from self._list()
            else:
                self.header[str(name)] = self._value()
            if self._next() == ",":
                self._at += 1
        if not found:
            raise DataError(f"{self._where}: no list {key!r} in it")

    def _list(self) -> Iterator[Any]:
        self._take("[")
        while self._next() != "]":
            yield self._value()
            if self._next() == ",":
                self._at += 1
        self._at += 1

    def _take(self, sign: str) -> None:
        got = self._next()
        if got != sign:
            raise DataError(f"{self._where}: not JSON of the expected form: {sign!r} wanted, got {got!r}")
        self._at += 1

    def _next(self) -> str:
        """The next character that is not blank."""
        while True:
            text, at = self._text, self._at
            while at < len(text) and text[at] in _BETWEEN:
                at += 1
            self._at = at
            if at < len(text):
                return text[at]
            if not self._read():
                raise DataError(f"{self._where} ends too early: it was cut off, or is no JSON")

    def _value(self) -> Any:
        """The next value, for which as much is read as it takes."""
        self._next()
        while True:
            try:
                value, end = _decode(self._text, self._at)
            except RecursionError:
                raise DataError(f"{self._where}: values are nested too deeply") from None
            except ValueError as error:
                self._read_on(error)
                continue
            if end < len(self._text) or not self._read():
                self._at = end
                return value

    def _read_on(self, error: ValueError) -> None:
        """Reads as much again as is held, where a value may go on; else says what is wrong with it."""
        held = len(self._text) - self._at
        if held > LONGEST:
            raise DataError(f"{self._where}: a value of over {LONGEST >> 20} MiB, or not JSON") from None
        if not self._read(max(CHUNK, held)):
            reason = getattr(error, "msg", str(error))
            raise DataError(f"{self._where}: cut off, or not JSON: {printable(reason)}") from None

    def _read(self, size: int = CHUNK) -> bool:
        more = self._file.read(size)
        self._text = self._text[self._at :] + more
        self._at = 0
        return bool(more)
