"""The event engine: programs whose answer is known, and what must hold for any."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import SpecError
from paceline.sim import engine
from paceline.sim.program import COMPUTE, HOST, Builder, Label, buckets


def work(seconds, **more):
    return Label("work", "work", seconds, **more)


def sent(seconds, axis="dp", crowds=True):
    return Label("all_reduce", "sent", seconds, "all_reduce", 8.0, axis, crowds=crowds)


def test_streams_run_in_order_and_beside_each_other():
    b = Builder()
    first = b.add(b.stream(0), work(2.0))
    b.add(b.stream(0, "dp"), sent(5.0, crowds=False), [first])
    b.add(b.stream(0), work(1.0))
    last = b.add(b.stream(0), work(1.0), b.last(b.stream(0, "dp")))
    found = engine.run(b.build())
    assert found.start.tolist() == [0, 2, 2, 7] and found.end[last] == found.seconds == 8
    assert engine.breakdown(b.build(), found) == {"work": 4, "sent": 4}


def test_roles_wait_for_each_other():
    """A collective of two roles starts when the later one arrives."""
    b = Builder()
    for role, seconds in enumerate((1.0, 3.0)):
        b.add(b.stream(role), work(seconds))
    both = b.add(b.stream(0), sent(1.0), also=b.stream(1))
    b.add(b.stream(1), work(1.0))
    found = engine.run(b.build())
    assert found.start[both] == 3 and found.seconds == 5


def test_computation_slows_down_beside_a_collective():
    b = Builder()
    b.add(b.stream(0), work(10.0))
    b.add(b.stream(0, "dp"), sent(4.0))
    found = engine.run(b.build(), 0.25)
    assert found.seconds == pytest.approx(4 + (10 - 0.75 * 4))
    assert engine.breakdown(b.build(), found) == pytest.approx({"work": 10, "sent": 1})
    # more sent than computed: the collective's time
    b.add(b.stream(0, "dp"), sent(20.0))
    assert engine.run(b.build(), 0.25).seconds == 24


def test_collectives_share_links():
    """Two that run at once go at half the pace each, and at their own again when one is done."""
    b = Builder()
    b.add(b.stream(0, "dp"), sent(4.0, "dp"))
    b.add(b.stream(0, "pp"), sent(1.0, "pp"))
    b.add(b.stream(1, "pp"), sent(1.0, "pp"))
    found = engine.run(b.build(), 0.0, lambda axes: [1 / len(axes)] * len(axes))
    assert found.end.tolist() == pytest.approx([5, 2, 1])


def test_host_that_cannot_keep_up():
    b = Builder()
    for _ in range(3):
        b.add(b.stream(0), work(1.0), [b.add(b.stream(0, HOST), Label("issue", "host", 2.0))])
    program = b.build()
    found = engine.run(program)
    assert found.seconds == 7 and engine.breakdown(program, found) == {"work": 3, "host": 4}


def test_deadlock_is_named():
    b = Builder()
    b.add(b.stream(0), work(1.0), [1])
    b.add(b.stream(1), Label("late", "work", 1.0), [0])
    with pytest.raises(SpecError, match="2 of 2 tasks wait for each other, the first of them 'work'"):
        engine.run(b.build())
    with pytest.raises(SpecError, match="contention is a share"):
        engine.run(b.build(), 1.5)


@st.composite
def programs(draw):
    """(builder arguments per task: role, stream, seconds, after)"""
    tasks = []
    for i in range(draw(st.integers(1, 25))):
        after = draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else []
        tasks.append(
            (
                draw(st.integers(0, 2)),
                draw(st.sampled_from([COMPUTE, "dp", "pp"])),
                draw(st.floats(0, 10)),
                after,
            )
        )
    return tasks


def build(tasks, longer=None):
    b = Builder()
    for i, (role, kind, seconds, after) in enumerate(tasks):
        seconds += 1.0 if i == longer else 0.0
        b.add(b.stream(role, kind), work(seconds) if kind == COMPUTE else sent(seconds, kind), after)
    return b.build()


@given(programs(), st.sampled_from([0.0, 0.3]))
def test_never_faster_than_it_could_be(tasks, contention):
    """Neither than the longest chain, nor than the busiest stream; every task after what it waits for."""
    program = build(tasks)
    found = engine.run(program, contention)
    ends = np.zeros(len(program))
    for task in range(len(program)):
        before = program.before[program.first[task] : program.first[task + 1]]
        assert all(found.end[before] <= found.start[task] + 1e-9)
        ends[task] = ends[before].max(initial=0.0) + program.work[task]
    busy = np.bincount(program.stream, program.work)
    assert found.seconds >= max(ends.max(), busy.max()) - 1e-9
    assert np.all(found.end - found.start >= program.work - 1e-9)
    if not contention:
        assert found.end == pytest.approx(ends)
    for role in range(program.roles):
        assert sum(engine.breakdown(program, found, role).values()) == pytest.approx(found.seconds, abs=1e-9)
    again = engine.run(program, contention)
    assert again.start.tolist() == found.start.tolist() and again.end.tolist() == found.end.tolist()


@given(programs(), st.data())
def test_longer_tasks_never_end_sooner(tasks, data):
    longer = data.draw(st.integers(0, len(tasks) - 1))
    assert engine.run(build(tasks, longer)).seconds >= engine.run(build(tasks)).seconds - 1e-9


def test_buckets():
    assert buckets([1, 1, 1, 5, 1], 3) == [[0, 1, 2], [3], [4]]
    assert buckets([1, 1, 1, 5, 1], 3, 1) == [[0], [1, 2, 3], [4]]
    assert buckets([], 3) == []
