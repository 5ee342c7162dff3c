"""Words of shell scripts, as far as they are plain: options, arrays, variables with fixed values.

Nothing is run. What a script computes stays as it is written.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from math import prod

from paceline.errors import DataError

_ASSIGNED = re.compile(r"(?:export )?\s*([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_PRODUCT = re.compile(r"\$\(\(\s*(\d+(?:\s*\*\s*\d+)*)\s*\)\)")
#: all of an array's words, or of the script's arguments
_ALL_OF = re.compile(r"\$(?:[@*]|\{\w+\[[@*]\]\}|\{[@*]\})")
#: in place of the end of a line
END = ";"
#: rounds in which variables are put into one another
_ROUNDS = 5
_LONGEST = 4096


def words(text: str, path: str) -> list[str]:
    """The words of a script in their order, without comments; variables of fixed values filled in, a
    semicolon
    after each line and array.
    """
    values: dict[str, str] = {}
    out: list[str] = []
    for line in _lines(text, path):
        for word in line:
            assigned = _ASSIGNED.fullmatch(word)
            if assigned and not assigned[2].startswith("("):
                values[assigned[1]] = _filled(assigned[2], values)
            elif not _ALL_OF.fullmatch(word):
                ends = word.endswith(")") or bool(assigned)
                plain = _filled("" if assigned else word.strip("()"), values)
                out += [*([plain] if plain else []), *([END] if ends else [])]
        out.append(END)
    return out


def _lines(text: str, path: str) -> Iterator[list[str]]:
    """Words of each line; quotes may go over several."""
    held = ""
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        held = f"{held}\n{line}" if held else line
        try:
            yield shlex.split(held, comments=True)
        except ValueError as error:
            if len(held) > _LONGEST:
                raise DataError(f"{path}: not a shell script: {error}") from None
            continue
        held = ""
    if held:
        raise DataError(f"{path}: not a shell script: a quotation is not closed")


def _filled(word: str, values: dict[str, str]) -> str:
    """A word with the variables that have values, and products of numbers worked out."""
    for _ in range(_ROUNDS):
        filled = _VARIABLE.sub(lambda m: _value(m, values), word)
        filled = _PRODUCT.sub(lambda m: str(prod(int(n) for n in m[1].split("*"))), filled)
        if filled == word or len(filled) > _LONGEST:
            break
        word = filled
    return word


def _value(match: re.Match[str], values: dict[str, str]) -> str:
    name, otherwise = match[1] or match[3], match[2]
    return values.get(name, otherwise if otherwise is not None else match[0])


def options(found: list[str]) -> dict[str, str]:
    """Options by name, without dashes: `--name value`, `--name=value`, or `--name` by itself (an"
    " empty text)."""
    out: dict[str, str] = {}
    name = ""
    for word in found:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            out[name] = value if equals else ""
            name = "" if equals else name
        elif word == END or word.endswith(".py") or re.fullmatch(r"-[A-Za-z]+", word):
            name = ""
        elif name:
            out[name] = f"{out[name]} {word}".strip()
    return out
