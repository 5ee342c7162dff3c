"""Names that people give, of jobs and others: what a name may hold, and how it becomes the name of a file."""

from __future__ import annotations

import re

from paceline.errors import SpecError
from paceline.spec import checks

#: characters of a name
LONGEST = 200
_UNFIT = re.compile(r"[^A-Za-z0-9._-]")


def checked_name(what: str, name: str) -> str:
    """`name`, if it fits people and files: at most 200 characters, none of them a control character.

    >>> checked_name("job", "digits 2")
    'digits 2'
    """
    text = checks.name(f"{what} name", name)
    if not text.strip():
        raise SpecError(f"a name of a {what} must not be empty, got {name!r}")
    if len(text) > LONGEST:
        raise SpecError(
            f"a name of a {what} has at most {LONGEST} characters, got {len(text)}: {text[:40]!r}..."
        )
    return text


def file_name(name: str) -> str:
    r"""`name` as one part of a path or one word of a script: all but letters, digits and `._-` becomes `_`.

    >>> file_name("a b/../c\n")
    'a_b_.._c_'
    """
    out = _UNFIT.sub("_", name)
    return f"_{out}" if out.startswith((".", "-")) or not out else out
