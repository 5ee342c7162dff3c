"""Host and device as two streams, against a walk through the same rules one operator at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.sim.streams import run, steady_step

NONE = np.array([], dtype=np.int64)


def walked(issue, duration, syncs, host, device):
    """The rules of the module, literally."""
    ends = []
    for i, (issued, lasts) in enumerate(zip(issue, duration, strict=True)):
        host += issued
        device = max(device, host) + lasts
        ends.append(device)
        if i in syncs and i + 1 < len(issue):
            host = max(host, device)
    return ends, host, device


times = st.floats(0, 1e-3)


@given(st.lists(st.tuples(times, times, st.booleans()), min_size=1, max_size=30), times, times)
def test_run_equals_the_walk(steps, host, device):
    issue, duration, waits = (np.array(column) for column in zip(*steps, strict=True))
    syncs = np.where(waits)[0]
    ends, host_end, device_end = run(issue, duration, syncs, host, device)
    expected = walked(issue, duration, set(syncs), host, device)
    assert ends == pytest.approx(expected[0], abs=1e-12)
    assert (host_end, device_end) == pytest.approx(expected[1:], abs=1e-12)


@pytest.mark.parametrize(
    ("issue", "duration", "period"),
    [
        ([3.0, 3.0, 3.0], [1.0, 1.0, 1.0], 9.0),  # the host cannot keep up
        ([1.0, 1.0, 1.0], [3.0, 3.0, 3.0], 9.0),  # the host runs ahead
        # each waits for the other within the step, and the device sets the pace
        ([1.0, 5.0, 1.0], [4.0, 1.0, 4.0], 9.0),
    ],
)
def test_the_slower_stream_sets_the_pace(issue, duration, period):
    assert steady_step(np.array(issue), np.array(duration), NONE)[0] == period


def test_a_read_back_stops_the_host():
    issue, duration = np.array([1.0, 1.0]), np.array([5.0, 5.0])
    free, _, _ = steady_step(issue, duration, NONE)
    waiting, _, _ = steady_step(issue, duration, np.array([0]))
    assert free == 10 and waiting == 11  # the second operator is issued only when the first has ended


@given(st.lists(st.tuples(times, times, st.booleans()), min_size=1, max_size=30))
def test_bounds_of_a_step(steps):
    issue, duration, waits = (np.array(column) for column in zip(*steps, strict=True))
    period, starts, ends = steady_step(issue, duration, np.where(waits)[0])
    assert max(issue.sum(), duration.sum()) - 1e-12 <= period <= issue.sum() + duration.sum() + 1e-12
    assert (ends - starts) == pytest.approx(duration, abs=1e-12)
    assert (starts[1:] >= ends[:-1] - 1e-12).all() and (starts >= -1e-12).all()


@given(st.lists(st.tuples(times, times), min_size=1, max_size=30), st.floats(0, 1), st.integers(0, 29))
def test_less_work_is_never_slower(steps, share, at):
    issue, duration = (np.array(column) for column in zip(*steps, strict=True))
    less = duration.copy()
    less[at % len(less)] *= share
    assert steady_step(issue, less, NONE)[0] <= steady_step(issue, duration, NONE)[0] + 1e-12
