"""What is written stays: torn journals, damaged pages, full disks."""

import contextlib
import os
import random
import shutil
import subprocess

import pytest

from paceline.errors import RunError
from paceline.sched.live.store import Store


def filled(folder, count=60):
    store = Store(folder)
    for i in range(count):
        store.commit(
            [("orders", f"job{i}", {"given": {"text": "x" * 400}, "n": i}), ("log", str(i), {"event": i})]
        )
    store.close()
    return {table: dict(rows) for table, rows in store.rows.items()}


def rows(folder):
    store = Store(folder)
    store.close()
    return store.rows, store.notes


def same(found, expected):
    return {t: found[t] for t in ("orders", "log", "runs")} == {
        t: expected[t] for t in ("orders", "log", "runs")
    }


def test_comes_back_as_it_was(tmp_path):
    expected = filled(tmp_path)
    found, notes = rows(tmp_path)
    assert same(found, expected) and not notes
    assert list(found["log"]) == [str(i) for i in range(60)], "in the order in which it was written"


@pytest.mark.parametrize("seed", range(12))
def test_one_damaged_page(tmp_path, seed):
    expected = filled(tmp_path)
    draw = random.Random(seed)
    path = tmp_path / "state.db"
    data = bytearray(path.read_bytes())
    pages = len(data) // 4096
    page = draw.randrange(pages)
    place = slice(page * 4096, (page + 1) * 4096)
    data[place] = [bytes(4096), draw.randbytes(4096), bytes(data[place]).replace(b"x", b"y")][seed % 3]
    path.write_bytes(data)
    found, notes = rows(tmp_path)
    assert same(found, expected)
    assert all("no job is lost" in note and "damaged" in note for note in notes)
    assert not rows(tmp_path)[1], "mended once"


def test_a_lost_write_ahead_log_is_made_good(tmp_path):
    store = Store(tmp_path / "a")
    for i in range(10):
        store.commit([("log", str(i), {"event": i})])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    store.close()
    (tmp_path / "b" / "state.db-wal").unlink()
    found, notes = rows(tmp_path / "b")
    assert list(found["log"]) == [str(i) for i in range(10)]
    assert "10" in notes[0]


def test_a_torn_journal_line_does_not_count(tmp_path):
    expected = filled(tmp_path, 5)
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b'0badc0de {"count": 7, "ro')
    found, notes = rows(tmp_path)
    assert same(found, expected) and not notes


def test_both_damaged_is_said(tmp_path):
    filled(tmp_path, 20)
    for name in ("state.db", "journal.jsonl"):
        data = bytearray((tmp_path / name).read_bytes())
        data[len(data) // 3 : len(data) // 3 + 200] = b"?" * 200
        data[:20] = b"?" * 20
        (tmp_path / name).write_bytes(data)
    both = "is damaged .*, and journal.jsonl beside it is damaged .*; restore both from a backup"
    with pytest.raises(RunError, match=both):
        Store(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot use state folder"):
        Store(tmp_path / "file" / "state")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True
        ).returncode
    ):
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk(small_disk):
    folder = small_disk / "state"
    store = Store(folder)
    count = 0
    with pytest.raises(
        RunError, match="is full; nothing that was confirmed is lost and running jobs go on: free some space"
    ):
        while True:
            store.commit([("log", str(count), {"text": "x" * 5000})])
            count += 1
    store.close()
    assert count > 10
    with contextlib.suppress(RunError):  # it may still be too full to open
        assert list(rows(folder)[0]["log"])[:count] == [str(i) for i in range(count)]
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert list(rows(folder)[0]["log"])[:count] == [str(i) for i in range(count)]
