"""Names that people give, of jobs and others: what a name may hold, and how it becomes the name of a file."""

from __future__ import annotations

import re
import unicodedata

from paceline.errors import SpecError

#: characters of a name
LONGEST = 200
#: Unicode categories of characters that change how a line is shown or parsed: control, format, surrogate,
#: line and paragraph separators
_CONTROL = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_UNFIT = re.compile(r"[^A-Za-z0-9._-]")


def checked_name(what: str, name: str) -> str:
    """`name`, if it fits people and files: at most 200 characters, none of them a control character.

    >>> checked_name("job", "digits 2")
    'digits 2'
    """
    if not isinstance(name, str):
        raise SpecError(f"a name of a {what} is text, got {name!r}")
    if not name.strip():
        raise SpecError(f"a name of a {what} must not be empty, got {name!r}")
    if len(name) > LONGEST:
        raise SpecError(
            f"a name of a {what} has at most {LONGEST} characters, got {len(name)}: {name[:40]!r}..."
        )
    if name.isprintable():
        return name
    control = next((char for char in name if unicodedata.category(char) in _CONTROL), None)
    if control is not None:
        raise SpecError(f"a name of a {what} must not hold control characters, got {control!r} in {name!r}")
    return name


def file_name(name: str) -> str:
    r"""`name` as one part of a path or one word of a script: all but letters, digits and `._-` becomes `_`.

    >>> file_name("a b/../c\n")
    'a_b_.._c_'
    """
    out = _UNFIT.sub("_", name)
    return f"_{out}" if out.startswith((".", "-")) or not out else out
