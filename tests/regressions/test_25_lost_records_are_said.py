"""Job folders without their records: nothing of them is taken for a new job, and what is lost is said."""

import shutil
import sys
import time

import pytest

from paceline.errors import RunError
from paceline.sched.live import Daemon, DaemonSettings, JobSpec
from paceline.sched.live.store import Store

RECORDS = ("state.db", "state.db-wal", "state.db-shm", "journal.jsonl")


def order(place, name="a"):
    """A job that leaves a line beside the state folder each time it runs, and says that it is done."""
    done = "open(os.environ['PACELINE_PROGRESS'], 'a').write('100 100\\n')"
    code = f"import os; open('ran', 'a').write('x'); {done}"
    return JobSpec.of(
        {"name": name, "command": [sys.executable, "-S", "-c", code], "work": 100, "rates": {"1": 10}}, place
    )


def run(place, orders):
    """States of the jobs once all are over, and the lines that the daemon said."""
    lines = []
    live = Daemon(
        DaemonSettings(state=place / "state", nodes="1x1", policy="fifo", interval_s=0.0), say=lines.append
    )
    try:
        live.submit(orders)
        end = time.monotonic() + 60
        while not live.idle:
            live.turn()
            time.sleep(0.02)
            assert time.monotonic() < end, live.queue()
        return {row["job"]: row["state"] for row in live.queue()}, lines
    finally:
        live.close()


def ran(place):
    return len((place / "ran").read_text())


def forget(place):
    for name in RECORDS:
        (place / "state" / name).unlink(missing_ok=True)


def test_a_new_job_of_an_old_name_really_runs(tmp_path):
    assert run(tmp_path, [order(tmp_path)])[0] == {"a": "completed"} and ran(tmp_path) == 1
    forget(tmp_path)
    states, lines = run(tmp_path, [order(tmp_path)])
    assert states == {"a": "completed"} and ran(tmp_path) == 2
    assert any(line.startswith("no record is left of 1 jobs in ") and ": a." in line for line in lines), lines
    assert any(
        "a begins anew, in jobs/a.2: jobs/a holds an earlier job of that name" in line for line in lines
    ), lines
    assert not any("no job is lost" in line for line in lines)


def test_progress_of_an_old_job_is_not_that_of_a_new_one(tmp_path):
    run(tmp_path, [order(tmp_path)])
    forget(tmp_path)
    live = Daemon(DaemonSettings(state=tmp_path / "state", nodes="1x1", policy="fifo"))
    try:
        live.submit([order(tmp_path)])
        assert live.queue()[0]["done"] == 0
    finally:
        live.close()


def test_records_of_a_backup_do_not_know_later_attempts(tmp_path):
    """Both are put back as they were before the job ran: it runs again, in an attempt of its own."""
    live = Daemon(DaemonSettings(state=tmp_path / "state", nodes="1x1", policy="fifo"))
    live.submit([order(tmp_path)])
    live.close()
    shutil.copytree(tmp_path / "state", tmp_path / "backup")
    run(tmp_path, [])
    assert ran(tmp_path) == 1
    forget(tmp_path)
    for name in RECORDS:
        if (tmp_path / "backup" / name).exists():
            shutil.copy(tmp_path / "backup" / name, tmp_path / "state" / name)
    assert run(tmp_path, [])[0] == {"a": "completed"} and ran(tmp_path) == 2
    assert len(list((tmp_path / "state/jobs/a").glob("1-*"))) == 2


def filled(folder, count=10):
    store = Store(folder)
    for i in range(count):
        store.commit([("orders", f"job{i}", {"given": {}, "n": i})])
    store.close()


def damage(path):
    data = bytearray(path.read_bytes())
    data[: len(data) // 2] = b"?" * (len(data) // 2)
    path.write_bytes(data)


JOURNALS = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "unreadable": lambda path: (path.unlink(), path.mkdir()),
    "damaged": damage,
    "without its first line": lambda path: path.write_bytes(b"\n" + path.read_bytes()),
}


@pytest.mark.parametrize("how", JOURNALS)
def test_a_damaged_database_is_not_built_from_such_a_journal(tmp_path, how):
    filled(tmp_path)
    damage(tmp_path / "state.db")
    JOURNALS[how](tmp_path / "journal.jsonl")
    with pytest.raises(RunError, match="restore both from a backup") as error:
        Store(tmp_path)
    said = str(error.value)
    assert (
        "state.db is damaged" in said
        and "journal.jsonl beside it is " + ("missing" if how == "missing" else "damaged") in said
    )
    assert "\n" not in said


@pytest.mark.parametrize("how", [how for how in JOURNALS if how != "unreadable"])
def test_the_journal_is_mended_from_the_database_and_that_is_said(tmp_path, how):
    filled(tmp_path)
    JOURNALS[how](tmp_path / "journal.jsonl")
    store = Store(tmp_path)
    store.close()
    assert len(store.rows["orders"]) == 10
    (note,) = store.notes
    assert (
        "journal.jsonl was " + ("missing" if how == "missing" else "damaged") in note
        and "no job is lost" in note
    )
    store = Store(tmp_path)
    store.close()
    assert not store.notes, "mended once"


def test_a_missing_database_is_built_from_the_journal(tmp_path):
    filled(tmp_path, 1)
    (tmp_path / "state.db").unlink()
    store = Store(tmp_path)
    store.close()
    assert list(store.rows["orders"]) == ["job0"]
    assert (
        "state.db was missing; it was built anew from journal.jsonl (1 jobs), no job is lost"
        in store.notes[0]
    )


def test_a_journal_that_knows_fewer_jobs_than_there_are_folders(tmp_path):
    filled(tmp_path, 3)
    (tmp_path / "jobs/other").mkdir(parents=True)
    (tmp_path / "state.db").unlink()
    store = Store(tmp_path)
    store.close()
    assert len(store.notes) == 2 and not any("no job is lost" in note for note in store.notes)
    assert "no record is left of 1 jobs" in store.notes[1] and "other" in store.notes[1]
