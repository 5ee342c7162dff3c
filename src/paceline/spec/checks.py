"""Checks of what comes from outside: sizes are whole numbers, names can be printed on one line."""

from __future__ import annotations

import operator
import unicodedata
from dataclasses import fields
from typing import Any

from paceline import units
from paceline.errors import PacelineError, SpecError

#: Unicode categories of characters that change how a line is shown or parsed: control, format, surrogate,
#: line and paragraph separators
CONTROL = {"Cc", "Cf", "Cs", "Zl", "Zp"}


#: the largest size that is taken; products of a few such sizes are still within a float's range
LARGEST = 2**40


def whole(what: str, value: Any, least: int = 1, error: type[PacelineError] = SpecError) -> int:
    """A size as an int; `error` where it is a float, a text, less than `least` or more than anything has.
    Integers of numpy are taken.
    """
    try:
        size = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = least - 1
    if size < least or isinstance(value, bool):
        raise error(f"{what} must be a whole number of {least} or more, got {value!r}")
    if size > LARGEST:
        raise error(f"{what} must be at most {LARGEST:.1e}, got {size}")
    return size


def above_zero(what: str, value: float | str | None, dimension: str) -> float | None:
    """A quantity of some dimension, written or as a number; None where none is given."""
    if value is None:
        return None
    found = units.parse(value, dimension)
    if found <= 0:
        raise SpecError(f"{what} must be above zero, got {value!r}")
    return found


def names(what: str, thing: Any) -> None:
    """Checks the texts of a dataclass, and those in its tuples, as names; notes may have several lines."""
    for field in fields(thing):
        value = getattr(thing, field.name)
        texts = value if isinstance(value, tuple) else (value,)
        for each in texts:
            if isinstance(each, str) and field.name != "notes":
                name(f"{what} {field.name}", each)


def text(what: str, value: Any, error: type[PacelineError] = SpecError) -> str:
    """A text as it is; `error` where it is none."""
    if not isinstance(value, str):
        raise error(f"{what} must be a string, got {value!r}")
    return value


def name(what: str, value: Any, error: type[PacelineError] = SpecError) -> str:
    """A name as it is; `error` where it is no text or holds characters that are not printed, such as a
    newline.

    Names are written into scripts, tables and terminals, where such characters would be read as something
    else.
    """
    found = text(what, value, error)
    wrong = (
        None if found.isprintable() else next((c for c in found if unicodedata.category(c) in CONTROL), None)
    )
    if wrong is not None:
        raise error(
            f"{what} {found!r} holds the control character {wrong!r}; use letters, digits and punctuation"
        )
    return found
