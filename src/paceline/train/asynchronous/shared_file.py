"""Memory that workers of one machine share: a file of a random name that only its user can open.

Every worker holds a lock on the file as long as it lives. The last one to leave removes it. Where all were
killed, the next run, or whoever had started them, finds a file that nobody has locked, and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import RunError

_PREFIX = "paceline-hogwild-"


def folder() -> Path:
    """In memory where the system has such a place."""
    place = Path("/dev/shm")
    return place if place.is_dir() else Path(tempfile.gettempdir())


class SharedFile:
    """A file that this process has locked."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    @classmethod
    def create(cls) -> SharedFile:
        """A new one; removes what killed runs have left."""
        sweep()
        while True:
            descriptor, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder())
            made = cls._locked(Path(name), descriptor)
            if made is not None:  # else another run swept it before it was locked
                return made

    @classmethod
    def join(cls, path: Path) -> SharedFile:
        """One that another worker of this machine has made."""
        try:
            found = cls._locked(path, os.open(path, os.O_RDWR | os.O_NOFOLLOW))
        except OSError as error:
            raise RunError(
                f"shared parameters {path} cannot be opened: {error.strerror}; all workers of a "
                "Hogwild run are on one machine, and of one user"
            ) from None
        if found is None:
            raise RunError(f"shared parameters {path} are gone: all workers of this run have left")
        return found

    @classmethod
    def _locked(cls, path: Path, descriptor: int) -> SharedFile | None:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with contextlib.suppress(OSError):
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                return cls(path, descriptor)
        os.close(descriptor)
        return None

    def leave(self) -> None:
        """Gives it back; may be called twice."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        _remove_unused(self.path, descriptor)


def sweep() -> None:
    """Removes the files of this user's killed runs."""
    for path in _left():
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            _remove_unused(path, os.open(path, os.O_RDWR | os.O_NOFOLLOW))


def _left() -> Iterator[Path]:
    yield from folder().glob(f"{_PREFIX}*")


def _remove_unused(path: Path, descriptor: int) -> None:
    """Removes a file that nobody has locked; closes the descriptor."""
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
