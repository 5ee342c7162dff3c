"""The daemon's memory: rows of JSON in SQLite, and the same in a journal beside it, each with a checksum.

A transaction is on the disk twice before it counts. SQLite is what is read; where it is missing or damaged,
or misses transactions, the journal builds it anew. Where neither can be read whole, that is said.
Neither holds anything that a job needs while it runs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import RunError
from paceline.sched.live.permissions import make_private, opener


class StoreError(RunError):
    """What the scheduler knows can no longer be written, read or rebuilt: it ends, and running jobs go on."""


#: what is kept: settings, jobs as submitted, events with their decisions, runs
TABLES = ("meta", "orders", "log", "runs")
#: (table, key, value)
Row = tuple[str, str, Any]
Rows = dict[str, dict[str, Any]]

_DATABASE, _JOURNAL = "state.db", "journal.jsonl"
_LOCK, _MISSING = "lock", "missing"


@dataclass(slots=True, kw_only=True)
class Journal:
    """What was read of a journal: rows, how many transactions they took, and what is wrong with it."""

    rows: Rows = field(default_factory=lambda: {table: {} for table in TABLES})
    count: int = 0
    problem: str = ""


class Store:
    """One state folder, held by one process at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: what had to be done to open it, for the user
        self.notes: list[str] = []
        self.count = 0
        self._db: Any = None
        self._file: Any = None
        try:
            note = make_private(folder, {_DATABASE, _JOURNAL}, {_LOCK, "jobs", "down"})
            self._lock = open(folder / _LOCK, "a", opener=opener)  # noqa: SIM115  (held as long as the store)
        except OSError as error:
            raise StoreError(f"cannot use state folder {folder}: {error.strerror}") from None
        if note:
            self.notes.append(note)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise StoreError(
                f"another scheduler runs in {folder}; use its queue, or another folder with --state"
            ) from None
        try:
            with self._full():
                self.rows = self._open()
                self._rewrite()
                self._note_strangers()
        except BaseException:
            self.close()
            raise

    def _note_strangers(self) -> None:
        if found := self._strangers(self.rows):
            names = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
            self.notes.append(
                f"no record is left of {len(found)} jobs in {self.folder / 'jobs'}: {names}. "
                "They are not known to this scheduler, and may still run "
                "(their processes carry PACELINE_RUN in their environment)"
            )

    # -- opening ---------------------------------------------------------------------------------------

    def _open(self) -> Rows:
        """All rows, from the database or, where it is missing or damaged, from the journal."""
        path, beside = self.folder / _DATABASE, self.folder / _JOURNAL
        journal = self._journal()
        rows, problem = self._database(path, journal)
        if rows is not None:
            if journal.problem and (self.count or journal.problem != _MISSING):
                self.notes.append(
                    f"{beside} was {journal.problem}; it was written anew from {_DATABASE}, no job is lost"
                )
            return rows
        if journal.problem:
            raise StoreError(
                f"{path} is {problem}, and {_JOURNAL} beside it is {journal.problem}; "
                "restore both from a backup, or move the folder away. Jobs that run are not touched: "
                "their processes carry PACELINE_RUN in their environment"
            )
        aside = self._aside(path)
        self._connect(path)
        self.count = journal.count - 1
        self._write(
            [
                (table, key, value)
                for table, found in journal.rows.items()
                for key, value in found.items()
                if (table, key) != ("meta", "count")
            ]
        )
        rows = self._read()
        note = f"{path} was {problem}; it was built anew from {_JOURNAL} ({len(rows['orders'])} jobs)"
        if not self._strangers(rows):
            note += ", no job is lost"
        self.notes.append(note + (f"; the old file is {aside}" if aside else ""))
        return rows

    def _database(self, path: Path, journal: Journal) -> tuple[Rows | None, str]:
        """What the database holds; or None, and what is wrong with it."""
        if not path.exists() and journal.problem != _MISSING and (journal.count or journal.problem):
            return None, _MISSING
        try:
            self._connect(path)
            rows = self._read()
            self.count = int(rows["meta"].get("count", 0))
        except _DAMAGE as error:
            if isinstance(error, sqlite3.OperationalError) and any(word in str(error) for word in _MEDIUM):
                raise
            return None, f"damaged ({error})"
        if journal.count > self.count + 1:  # one more was written there first, and never confirmed
            return None, f"damaged (it holds {self.count} of {journal.count} transactions)"
        return rows, ""

    def _strangers(self, rows: Rows) -> list[str]:
        """Folders of jobs of which no record is left."""
        known = {place_of(name, row) for name, row in rows["orders"].items()}
        return sorted(self.places() - known)

    def places(self) -> set[str]:
        """Folders of jobs, also of those of which no record is left."""
        try:
            with os.scandir(self.folder / "jobs") as found:
                return {entry.name for entry in found if entry.is_dir()}
        except FileNotFoundError:
            return set()

    def _connect(self, path: Path) -> None:
        # files that SQLite makes beside it get its rights
        os.close(opener(str(path), os.O_RDWR | os.O_CREAT))
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        for table in TABLES:
            self._db.execute(
                f"CREATE TABLE IF NOT EXISTS {table} (key TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER"
                " NOT NULL)"
            )

    def _read(self) -> Rows:
        if (found := self._db.execute("PRAGMA integrity_check").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(" ".join(str(found).split())[:120])
        out: Rows = {}
        for table in TABLES:
            out[table] = {}
            for key, value, crc in self._db.execute(f"SELECT key, value, crc FROM {table} ORDER BY rowid"):
                if crc != _crc(key, value):
                    raise sqlite3.DatabaseError(f"the checksum of {table} {key} is wrong")
                out[table][key] = json.loads(value)
        return out

    def _journal(self) -> Journal:
        """What the journal adds up to. A torn end does not count; one without any whole line is damaged."""
        journal = Journal()
        try:
            *lines, _ = (self.folder / _JOURNAL).read_bytes().split(b"\n")
        except FileNotFoundError:
            return Journal(problem=_MISSING)
        except OSError as error:
            return Journal(problem=f"damaged (it cannot be read: {error.strerror})")
        if not lines:
            journal.problem = "damaged (it holds no whole line)"
        for number, line in enumerate(lines, 1):
            entry = _entry(line)
            if entry is None:
                journal.problem = journal.problem or f"damaged (the checksum of line {number} is wrong)"
                continue
            if number > 1 and entry["count"] != journal.count + 1:
                journal.problem = journal.problem or f"damaged (line {number} does not follow the one before)"
            # after damage lines still say how many transactions there were
            journal.count = max(journal.count, entry["count"])
            for table, key, value in entry["rows"]:
                journal.rows[table][key] = value
        return journal

    def _aside(self, path: Path) -> str:
        """Moves a damaged database away; its new name, or nothing where there was none."""
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
        stamp = time.strftime("%Y%m%d-%H%M%S")
        moved = ""
        for end in ("", "-wal", "-shm"):
            if (file := path.with_name(path.name + end)).exists():
                moved = moved or f"{path.name}.damaged-{stamp}"
                file.rename(file.with_name(f"{file.name}.damaged-{stamp}"))
        return moved

    def _rewrite(self) -> None:
        """The journal starts as one line that says what the database holds: it does not grow for ever, and a
        torn end is gone.
        """
        rows = [
            [table, key, value]
            for table in TABLES
            for key, value in self.rows[table].items()
            if (table, key) != ("meta", "count")
        ]
        beside = self.folder / f"{_JOURNAL}.tmp"
        with open(beside, "wb", opener=opener) as file:
            file.write(_line({"count": self.count, "rows": rows}))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.folder / _JOURNAL)
        place = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(place)  # or the new name may be lost with the power
        finally:
            os.close(place)
        self._file = (self.folder / _JOURNAL).open("ab", buffering=0)

    # -- writing ---------------------------------------------------------------------------------------

    def commit(self, rows: Sequence[Row]) -> None:
        """Puts rows (new, or in place of those with their keys); on the disk, twice, when this returns."""
        with self._full():
            self._file.write(_line({"count": self.count + 1, "rows": [list(row) for row in rows]}))
            os.fsync(self._file.fileno())
            self._write(rows)
        for table, key, value in rows:
            self.rows[table][key] = value

    def _write(self, rows: Iterable[Row]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        for table, key, value in (*rows, ("meta", "count", self.count + 1)):
            text = json.dumps(value)
            self._db.execute(
                f"INSERT INTO {table} VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE SET value ="
                " excluded.value, crc = excluded.crc",
                (key, text, _crc(key, text)),
            )
        self._db.execute("COMMIT")
        self.count += 1

    @contextlib.contextmanager
    def _full(self) -> Iterator[None]:
        """A disk that takes no more, or gives wrong things back, becomes one line."""
        after = "nothing that was confirmed is lost and running jobs go on"
        try:
            yield
        except (OSError, sqlite3.OperationalError) as error:
            if (
                getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
                or "full" in str(error)
                or "disk I/O" in str(error)
            ):
                raise StoreError(
                    f"the disk that holds {self.folder} is full; {after}: "
                    "free some space and start the scheduler again"
                ) from None
            raise StoreError(
                f"cannot write to {self.folder}: {error}; {after}: "
                "start the scheduler again once this is mended"
            ) from None
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"{self.folder / _DATABASE} is damaged ({error}); {after}: "
                "start the scheduler again, which builds it anew"
            ) from None

    def close(self) -> None:
        """Lets go of the folder."""
        with contextlib.suppress(sqlite3.Error):  # a full disk: what counts is there already
            if self._db is not None:
                self._db.close()
        if self._file is not None:
            self._file.close()
        self._lock.close()


#: words of errors that are the disk's, not the file's
_MEDIUM = ("full", "I/O", "readonly", "locked", "unable to open")
_DAMAGE = (sqlite3.DatabaseError, json.JSONDecodeError, UnicodeDecodeError, ValueError)


def place_of(name: str, record: Mapping[str, Any]) -> str:
    """The folder of a job in `jobs`, by its record; records of earlier versions do not say."""
    return str(record.get("place") or name)


def free_place(name: str, taken: Set[str]) -> str:
    """The folder of a new job: its name, or that with a number where an earlier job of that name left one."""
    place, number = name, 1
    while place in taken:
        number += 1
        place = f"{name}.{number}"
    return place


def _entry(line: bytes) -> dict[str, Any] | None:
    """A line of the journal; None where its checksum is wrong."""
    crc, _, text = line.partition(b" ")
    if crc != b"%08x" % zlib.crc32(text):
        return None
    found: dict[str, Any] = json.loads(text)
    return found


def _crc(key: str, text: str) -> int:
    return zlib.crc32(f"{key}\0{text}".encode())


def _line(entry: dict[str, Any]) -> bytes:
    text = json.dumps(entry).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)
