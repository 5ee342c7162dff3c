"""The wall clock is set while jobs wait, run and checkpoint: nothing is delayed or killed by that."""

import sys
import time

import pytest

from paceline.sched.live import Daemon, DaemonSettings, JobSpec
from paceline.sched.live import run as live_run

HOUR = 3600.0
#: on TERM it checkpoints until the file `go` is there
CHECKPOINTS = """
import os, pathlib, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
pathlib.Path("ready").touch()
while not told or not pathlib.Path("go").exists():
    time.sleep(0.02)
pathlib.Path("checkpointed").touch()
"""


def order(place, name="a", code="pass", **more):
    given = {"name": name, "command": [sys.executable, "-S", "-c", code], "work": 100, "rates": {"1": 10}}
    return JobSpec.of({**given, **more}, place)


@pytest.fixture
def step(monkeypatch):
    """Sets the wall clock of this process, as `time.time` shows it; the machine's stays."""
    real, steps = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + steps[0])

    def by(seconds):
        steps[0] += seconds

    return by


@pytest.fixture
def daemon(tmp_path):
    made = []

    def make(**more):
        made.append(
            Daemon(
                DaemonSettings(state=tmp_path / "state", nodes="1x1", policy="fifo", interval_s=0.0), **more
            )
        )
        return made[-1]

    yield make
    for live in made:
        live.close()


def until(live, done, limit_s=30.0):
    end = time.monotonic() + limit_s
    while not done():
        live.turn()
        time.sleep(0.02)
        assert time.monotonic() < end, live.queue()


def test_an_hour_back_delays_no_start(daemon, tmp_path, step):
    live = daemon()
    live.submit([order(tmp_path, submit=0.3)])
    live.turn()
    step(-HOUR)
    until(live, lambda: live.idle, 10.0)
    assert live.queue()[0]["state"] == "completed"


def test_an_hour_forward_starts_nothing_early(daemon, tmp_path, step):
    live = daemon()
    live.submit([order(tmp_path, submit=600)])
    step(HOUR)
    for _ in range(5):
        live.turn()
    assert live.queue()[0]["state"] == "planned" and live.now_s() < 300


def test_two_hours_forward_leave_a_job_its_time_to_checkpoint(daemon, tmp_path, step):
    live = daemon()
    live.submit([order(tmp_path, code=CHECKPOINTS)])
    until(live, lambda: (tmp_path / "ready").exists())
    live.cancel("a")
    live.turn()
    step(2 * HOUR)
    for _ in range(5):
        live.turn()
        time.sleep(0.02)
    assert not list((tmp_path / "state/jobs/a").glob("*/kill"))
    (tmp_path / "go").touch()
    until(live, lambda: live.idle)
    assert (tmp_path / "checkpointed").exists()


def test_a_broken_gang_has_its_time_too(daemon, tmp_path, step):
    """One rank failed: the other is asked to end, and not forced because the clock was set."""
    live = daemon()
    live.submit([order(tmp_path, code=CHECKPOINTS)])
    until(live, lambda: (tmp_path / "ready").exists())
    (run,) = live.ledger.runs.values()
    live.reconciler._broken(run)
    step(2 * HOUR)
    live.reconciler._broken(run)
    assert not list((tmp_path / "state/jobs/a").glob("*/kill"))
    (tmp_path / "go").touch()
    until(live, lambda: (tmp_path / "checkpointed").exists())


class Hand:
    """Clocks that stand where the test puts them."""

    def __init__(self):
        self.monotonic, self.wall, self.start = 1000.0, 1.7e9, "boot-1"

    def monotonic_s(self):
        return self.monotonic

    def wall_s(self):
        return self.wall

    def boot(self):
        return self.start


def test_seconds_go_on_over_daemons_whatever_the_wall_clock_does(daemon, tmp_path):
    clocks = Hand()
    live = daemon(clocks=clocks)
    live.submit([order(tmp_path, submit=1e6)])
    clocks.monotonic += 50
    clocks.wall -= HOUR
    assert live.now_s() == pytest.approx(50)
    live.close()
    clocks.monotonic += 10
    clocks.wall += 9 * HOUR
    live = daemon(clocks=clocks)
    assert live.now_s() == pytest.approx(60), "the machine was not started anew: its own seconds count"
    live.close()
    clocks.start, clocks.monotonic, clocks.wall = "boot-2", 5.0, 1.7e9 + 200
    live = daemon(clocks=clocks)
    assert live.now_s() == pytest.approx(200), "only the wall clock is left"
    clocks.monotonic += 7
    assert live.now_s() == pytest.approx(207)


def test_after_a_restart_with_the_clock_back_time_goes_on_from_the_last_event(daemon, tmp_path):
    clocks = Hand()
    live = daemon(clocks=clocks)
    clocks.monotonic += 100
    live.submit([order(tmp_path, submit=0), order(tmp_path, "b", submit=500)])
    live.turn()
    assert live.machine.state.now_s == pytest.approx(100)
    live.close()
    clocks.start, clocks.monotonic, clocks.wall = "boot-2", 5.0, 1.7e9 - HOUR
    live = daemon(clocks=clocks)
    assert live.now_s() == pytest.approx(100)
    clocks.monotonic += 3
    assert live.now_s() == pytest.approx(103), "at once, not after an hour"


def test_the_grace_period_is_counted_by_the_clock_that_was_given(daemon, tmp_path):
    clocks = Hand()
    live = daemon(clocks=clocks)
    live.submit([order(tmp_path, code=CHECKPOINTS)])
    until(live, lambda: (tmp_path / "ready").exists())
    live.cancel("a")
    live.turn()
    clocks.monotonic += 59
    live.turn()
    assert not list((tmp_path / "state/jobs/a").glob("*/kill"))
    clocks.monotonic += 2
    until(live, lambda: live.idle)
    assert list((tmp_path / "state/jobs/a").glob("*/kill")) and not (tmp_path / "checkpointed").exists()


def test_records_of_earlier_versions_are_read():
    old = {
        "job": "a",
        "attempt": 1,
        "allocation": [[0, 1]],
        "state": "live",
        "slots": [[0]],
        "stop_s": 1.7e9,
        "outcome": "",
    }
    run = live_run.Attempt.from_dict(old)
    assert run.folder(live_run.Path("/state")) == live_run.Path("/state/jobs/a/1")
