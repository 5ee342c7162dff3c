"""ETAs: how often the truth falls inside, and what they are made of."""

import pytest

from paceline.sched import event as ev
from paceline.sched import policies
from paceline.sched.ends import Ends
from paceline.sched.job import Job
from paceline.sched.live import eta_coverage
from paceline.sched.live.forecast import ELSEWHERE, SEEN, UNSEEN, ObservedSpeed, eta
from paceline.sched.machine import StateMachine
from paceline.sched.nodes import ClusterShape
from paceline.sched.speed import ScaledSpeed


def test_four_in_five_ends_fall_inside():
    """A few of the lists whose share stands in docs/live-scheduling.md; with so few, only that it is not far
    off.
    """
    share, count = eta_coverage.covered(lambda seed: eta_coverage.drawn(seed, count=6), 3)
    assert count >= 30 and 0.6 <= share <= 0.97


def test_speeds_that_were_seen_narrow_it():
    machine = StateMachine(ClusterShape.of([(1, 1, "cpu")]), policies.get("fifo"), log=False)
    machine.handle(ev.Submit(time_s=0.0, job=Job(name="a", work=1000.0, speed=ScaledSpeed(), restart_s=0.0)))
    machine.handle(ev.Report(time_s=100.0, name="a", done=50.0))
    first = eta(machine, [], "a", 100.0, {})
    assert first.end_s == pytest.approx(950, rel=0.1)
    later = eta(machine, [], "a", 100.0, {"a": ObservedSpeed(factor=0.5, deviation=SEEN)})
    assert later.end_s == pytest.approx(1900, rel=0.05), "at the speed that was seen, not the model's"
    assert (later.high_s - later.low_s) / later.end_s < 0.5 * (first.high_s - first.low_s) / first.end_s


def test_what_is_seen_begins_after_the_restart():
    machine = StateMachine(ClusterShape.of([(1, 1, "cpu")]), policies.get("fifo"), log=False)
    machine.handle(ev.Submit(time_s=0.0, job=Job(name="a", work=1000.0, speed=ScaledSpeed())))
    job, seen = machine.state.jobs["a"], ObservedSpeed()
    for now, done in ((1, 0), (11, 0), (21, 1), (31, 6), (41, 11)):
        seen.look(job, 1, done, now)
    assert (seen.factor, seen.deviation) == (pytest.approx(0.5), SEEN), (
        "ten units in the twenty seconds since it first came further"
    )
    seen.look(job, 2, 11, 50)
    assert (seen.factor, seen.deviation) == (pytest.approx(0.5), ELSEWHERE), "known of another run"
    assert ObservedSpeed().deviation == UNSEEN


def test_others_may_end_early():
    """A job that waits behind one that is stopped half-way nine times in ten comes to its turn sooner."""
    spans = {}
    for chance in (0.0, 0.9):
        machine = StateMachine(ClusterShape.of([(1, 1, "cpu")]), policies.get("fifo"), log=False)
        ends = Ends((0.5,), (chance,)) if chance else None
        machine.handle(
            ev.Submit(
                time_s=0.0, job=Job(name="first", work=1000.0, speed=ScaledSpeed(), restart_s=0.0, ends=ends)
            )
        )
        machine.handle(
            ev.Submit(time_s=0.0, job=Job(name="second", work=100.0, speed=ScaledSpeed(), restart_s=0.0))
        )
        spans[chance] = eta(machine, [], "second", 0.0, {}).start_s
    assert spans[0.9] < 0.65 * spans[0.0]
