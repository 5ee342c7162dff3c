"""The daemon's memory: rows of JSON in SQLite, and the same in a journal beside it, each with a checksum.

A transaction is on the disk twice before it counts. SQLite is what is read; where a page of it is damaged, or it misses transactions, the
journal builds it anew. Neither holds anything that a job needs while it runs.
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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import RunError


class StoreError(RunError):
    """What the scheduler knows can no longer be written, read or rebuilt: it ends, and running jobs go on."""


#: what is kept: settings, jobs as submitted, events with their decisions, runs
TABLES = ("meta", "orders", "log", "runs")
#: (table, key, value)
Row = tuple[str, str, Any]
Rows = dict[str, dict[str, Any]]

_DATABASE, _JOURNAL = "state.db", "journal.jsonl"


class Store:
    """One state folder, held by one process at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: what had to be done to open it, for the user
        self.notes: list[str] = []
        self._db: Any = None
        self._file: Any = None
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = (folder / "lock").open("a")
        except OSError as error:
            raise StoreError(f"cannot use state folder {folder}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise StoreError(f"another scheduler runs in {folder}; use its queue, or another folder with --state") from None
        try:
            with self._full():
                self.rows = self._open()
                self._rewrite()
        except BaseException:
            self.close()
            raise

    # -- opening ---------------------------------------------------------------------------------------

    def _open(self) -> Rows:
        """All rows, from the database or, where it is damaged, from the journal."""
        path = self.folder / _DATABASE
        journal, kept = self._journal()
        problem = ""
        try:
            self._connect(path)
            rows = self._read()
            self.count = int(rows["meta"].get("count", 0))
            if kept > self.count + 1:
                problem = f"it holds {self.count} of {kept} transactions"
        except _DAMAGE as error:
            if isinstance(error, sqlite3.OperationalError) and any(word in str(error) for word in _MEDIUM):
                raise
            problem = str(error)
        if not problem:
            return rows
        if journal is None:
            raise StoreError(f"{path} is damaged ({problem}) and so is {_JOURNAL} beside it; restore both from a backup, or move the folder away. "
                           "Jobs that run are not touched: their processes carry PACELINE_RUN in their environment")
        self._aside(path, problem)
        self._connect(path)
        self.count = kept - 1
        self._write([(table, key, value) for table, found in journal.items() for key, value in found.items() if (table, key) != ("meta", "count")])
        return self._read()

    def _connect(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        for table in TABLES:
            self._db.execute(f"CREATE TABLE IF NOT EXISTS {table} (key TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL)")

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

    def _journal(self) -> tuple[Rows | None, int]:
        """The rows that the journal adds up to (None: damaged) and how many transactions they took; a torn last line does not count."""
        rows: Rows = {table: {} for table in TABLES}
        count = 0
        try:
            lines = (self.folder / _JOURNAL).read_bytes().split(b"\n")
        except OSError:
            return rows, 0
        for number, line in enumerate(lines[:-1]):
            crc, _, text = line.partition(b" ")
            if crc != b"%08x" % zlib.crc32(text):
                # later lines that are whole show that this one is damaged, not torn
                return (None, count) if number < len(lines) - 2 else (rows, count)
            entry = json.loads(text)
            count = entry["count"]
            for table, key, value in entry["rows"]:
                rows[table][key] = value
        return rows, count

    def _aside(self, path: Path, problem: str) -> None:
        """Moves a damaged database away."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for end in ("", "-wal", "-shm"):
            if (file := path.with_name(path.name + end)).exists():
                file.rename(file.with_name(f"{file.name}.damaged-{stamp}"))
        self.notes.append(f"{path} was damaged ({problem}); it was built anew from {_JOURNAL}, no job is lost; "
                          f"the old file is {path.name}.damaged-{stamp}")

    def _rewrite(self) -> None:
        """The journal starts as one line that says what the database holds: it does not grow for ever, and a torn end is gone."""
        rows = [[table, key, value] for table in TABLES for key, value in self.rows[table].items() if (table, key) != ("meta", "count")]
        beside = self.folder / f"{_JOURNAL}.tmp"
        with beside.open("wb") as file:
            file.write(_line({"count": self.count, "rows": rows}))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.folder / _JOURNAL)
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
            self._db.execute(f"INSERT INTO {table} VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value, crc = excluded.crc",
                             (key, text, _crc(key, text)))
        self._db.execute("COMMIT")
        self.count += 1

    @contextlib.contextmanager
    def _full(self) -> Iterator[None]:
        """A disk that takes no more, or gives wrong things back, becomes one line."""
        after = "nothing that was confirmed is lost and running jobs go on"
        try:
            yield
        except (OSError, sqlite3.OperationalError) as error:
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "full" in str(error) or "disk I/O" in str(error):
                raise StoreError(f"the disk that holds {self.folder} is full; {after}: free some space and start the scheduler again") from None
            raise StoreError(f"cannot write to {self.folder}: {error}; {after}: start the scheduler again once this is mended") from None
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{self.folder / _DATABASE} is damaged ({error}); {after}: start the scheduler again, which builds it anew") from None

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


def _crc(key: str, text: str) -> int:
    return zlib.crc32(f"{key}\0{text}".encode())


def _line(entry: dict[str, Any]) -> bytes:
    text = json.dumps(entry).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)
