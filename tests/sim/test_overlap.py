"""Three streams: limits, a case worked out by hand, and what more of something must not do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.sim.overlap import Transfer, steady
from paceline.sim.streams import steady_step

NONE = np.array([], dtype=np.int64)
times = st.lists(st.floats(0, 2), min_size=6, max_size=6).map(np.array)
transfers = st.lists(
    st.builds(
        lambda a, b, s: Transfer("t", s, min(a, b), max(a, b)),
        st.integers(0, 6),
        st.integers(0, 6),
        st.floats(0, 3),
    ),
    max_size=5,
)


@given(
    times,
    times,
    st.lists(st.integers(0, 5), max_size=2, unique=True).map(lambda s: np.array(sorted(s), dtype=np.int64)),
)
def test_without_transfers_it_is_the_step_of_one_device(issue, duration, syncs):
    period, starts, ends = steady_step(issue, duration, syncs)
    found = steady(issue, duration, syncs)
    assert (
        found.period_s == period and np.array_equal(found.ends, ends) and np.array_equal(found.starts, starts)
    )


def test_by_hand():
    # operators of 1 s; a transfer of 2.5 s from the end of the second, awaited by the fifth, beside which
    # work takes twice as long
    duration = np.ones(5)
    plain = steady(np.zeros(5), duration, NONE, [Transfer("reduce", 2.5, 2, 4)])
    assert (
        plain.period_s == pytest.approx(5.5)
        and plain.waits == {"reduce": pytest.approx(0.5)}
        and plain.slowed_s == 0
    )
    slowed = steady(np.zeros(5), duration, NONE, [Transfer("reduce", 2.5, 2, 4)], contention=1.0)
    # of the two operators beside it, the first takes 2 s and the second 0.5 s at half speed and 0.75 s at
    # full speed
    assert (
        slowed.period_s == pytest.approx(6.25) and slowed.slowed_s == pytest.approx(1.25) and not slowed.waits
    )


@given(times, times, transfers, st.floats(0, 0.9), st.floats(1, 3))
def test_longer_transfers_and_more_contention_are_never_faster(issue, duration, sent, contention, factor):
    one = steady(issue, duration, NONE, sent, contention)
    longer = [Transfer(t.name, factor * t.seconds, t.release, t.needed) for t in sent]
    assert steady(issue, duration, NONE, longer, contention).period_s >= one.period_s - 1e-9
    assert steady(issue, duration, NONE, sent, contention * factor).period_s >= one.period_s - 1e-9
    assert one.period_s >= steady(issue, duration, NONE).period_s - 1e-9


@given(times, times, transfers, st.floats(0, 1))
def test_nothing_takes_longer_than_one_after_another(issue, duration, sent, contention):
    most = issue.sum() + (1 + contention) * duration.sum() + sum(t.seconds for t in sent)
    assert steady(issue, duration, NONE, sent, contention).period_s <= most + 1e-9
