"""The state folder is its owner's alone: jobs' environments and the daemon's token are in it."""

from __future__ import annotations

import os
import stat
from collections.abc import Set
from pathlib import Path

from paceline.errors import RunError

#: rights of others than the owner
_OTHERS = 0o077
_FOLDER, _FILE = 0o700, 0o600


def opener(path: str, flags: int) -> int:
    """For `open`: a new file that only its owner can read."""
    return os.open(path, flags, _FILE)


def make_private(folder: Path, marks: Set[str], parts: Set[str]) -> str:
    """Makes a state folder (0700), or tightens one that is there, and its files (0600).

    Returns a note where files were open to others, else nothing. A folder of somebody else is refused. So is
    one that others can read and that serves another purpose: it holds none of the files `marks`, but other
    things than `parts`.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=_FOLDER)
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise RunError(
            f"state folder {folder} belongs to user {found.st_uid}, and this is user {os.geteuid()}; "
            "give a folder of your own with --state"
        )
    mode = stat.S_IMODE(found.st_mode)
    if not mode & _OTHERS:
        return ""
    entries = list(folder.iterdir())
    names = {path.name for path in entries}
    ours = bool(names & marks) or names <= parts
    if mode & stat.S_ISVTX or not ours:
        raise RunError(
            f"folder {folder} (mode {mode:o}) is open to others and holds other things; "
            "a scheduler's state holds secrets: give a folder of its own with --state"
        )
    folder.chmod(_FOLDER)
    opened = _tighten(entries)
    if not opened:
        return ""
    return (
        f"state folder {folder} was open to others (mode {mode:o}) with {opened} files in it; "
        "it is its owner's alone now. Others may have read what it holds: "
        "environments of jobs, commands, the token of a daemon"
    )


def _tighten(entries: list[Path]) -> int:
    """Takes the rights of others off files and folders, links left alone; how many files were open."""
    opened = 0
    for path in entries:
        kind = path.lstat().st_mode
        if stat.S_ISDIR(kind):
            path.chmod(_FOLDER)
        elif stat.S_ISREG(kind) and stat.S_IMODE(kind) & _OTHERS:
            path.chmod(_FILE)
            opened += 1
    return opened
