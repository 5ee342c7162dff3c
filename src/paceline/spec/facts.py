"""Facts in TOML files: numbers with a unit, how each is known and where from; messages name file, line and
key.

A number is written bare (`"8 TB/s"`, then it is what the file declares) or with its provenance:

    bandwidth = { value = "8 TB/s", kind = "datasheet", source = "d" }    # `d` may be spelt out in [sources]
    hour = { value = "12.29 USD/h", source = "price", date = "2023-07" }  # what changes says of when it is
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import units
from paceline.errors import SpecError, UnitError, nearest
from paceline.spec import checks

#: how a number is known, best first
KINDS = ("measured", "datasheet", "fitted", "derived", "declared", "guessed")
_DATE = re.compile(r"\d{4}(-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?)?")
_WANTED: dict[type, str] = {
    dict: "a table [{}]",
    list: "a list of strings",
    int: "a whole number",
    str: "a string",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One number and where it comes from; `value` in SI units, `date` (2023-07) where one is given."""

    value: float
    kind: str
    source: str
    date: str = ""


def read_text(path: Path | str, noun: str) -> str:
    """The text of a file that describes a `noun`."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"cannot read {noun} file {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"cannot read {noun} file {str(path)!r}: not UTF-8 at byte {error.start}") from None


def read_toml(path: Path | str, noun: str) -> dict[str, Any]:
    """The keys of a TOML file that describes a `noun`."""
    try:
        return tomllib.loads(read_text(path, noun))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path}: not valid TOML: {error}") from None


class FactReader:
    """Parsed TOML that knows the line of each key for messages.

    `keys` are the file's top-level texts (those in `types` are of another type), `sections` its tables.
    """

    def __init__(
        self, text: str, where: str, keys: Set[str], sections: Set[str], types: Mapping[str, type]
    ) -> None:
        try:
            self.data: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SpecError(f"{where}: not valid TOML: {error}") from None
        self.lines = text.splitlines()
        self.where = where
        self.sources: dict[str, str] = self.data.get("sources", {})
        self.printable("", self.data)
        for key, value in self.data.items():
            if key not in keys | sections:
                near = nearest(key, keys | sections)
                hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(sorted(sections))}"
                raise self.error(key, f"unknown key {key!r}; {hint}")
            self.check(key, value, dict if key in sections else types.get(key, str))

    def printable(self, path: str, value: Any) -> None:
        """That keys and texts are names that can be printed on one line; notes and sources may have
        several.
        """
        if isinstance(value, str):
            try:
                checks.name("the text", value)
            except SpecError as error:
                raise self.error(path, str(error)) from None
        elif isinstance(value, list):
            for entry in value:
                self.printable(path, entry)
        elif isinstance(value, dict):
            for key, entry in value.items():
                checks.name(f"{self.where}: key", key)
                if key not in ("notes", "source", "sources"):
                    self.printable(f"{path}.{key}".lstrip("."), entry)

    def check(self, key: str, value: Any, wanted: type) -> None:
        """That a value is of the type its key wants; a list holds strings."""
        entries = value if isinstance(value, list) else []
        if not isinstance(value, wanted) or not all(isinstance(entry, str) for entry in entries):
            raise self.error(key, f"expected {_WANTED[wanted].format(key)}, got {value!r}")

    def error(self, key: str, message: str) -> SpecError:
        section, _, leaf = key.rpartition(".")
        current, found = "", 0
        for number, line in enumerate(self.lines, 1):
            stripped = line.strip()
            if stripped.startswith("["):
                current = stripped.partition("]")[0].strip("[ ")
            name = stripped.partition("=")[0].strip().strip('"')
            inline = section and name == section  # memory = { size = ... }
            if (current == section and name == leaf) or name == key or inline or current == key:
                found = number
                break
        at = f"line {found}, " if found else ""
        return SpecError(f"{self.where}: {at}{key}: {message}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.data.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"expected a string, got {value!r}")
        return value

    def fact(self, path: str, raw: Any, dimension: str) -> Fact:
        kind, source, date = "declared", self.where, ""
        if isinstance(raw, dict):
            extra = set(raw) - {"value", "kind", "source", "date"}
            if extra or "value" not in raw:
                raise self.error(
                    path, f"expected {{ value = ..., kind = ..., source = ... }}, got keys {sorted(raw)}"
                )
            kind, source = raw.get("kind", "datasheet"), raw.get("source", "")
            if not isinstance(source, str):
                raise self.error(path, f"source: expected a string, got {source!r}")
            source = self.sources.get(source, source)
            date = raw.get("date", "")
            if not isinstance(date, str) or (date and not _DATE.fullmatch(date)):
                wanted = 'a year, month or day such as "2023-07"'
                raise self.error(path, f"date: expected {wanted}, got {date!r}")
            raw = raw["value"]
        if kind not in KINDS:
            raise self.error(path, f"kind {kind!r} is not one of {', '.join(KINDS)}")
        try:
            value = units.parse(raw, dimension)
        except UnitError as error:
            raise self.error(path, str(error)) from None
        if value <= 0:
            raise self.error(path, f"must be above zero, got {raw!r}")
        return Fact(value=value, kind=kind, source=source, date=date)
