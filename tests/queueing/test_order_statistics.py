"""Order statistics against closed forms."""

import itertools

import pytest

from paceline.queueing.order_statistics import kth_of, slowest_by_count, slowest_normal


def test_normal():
    assert slowest_normal(1) == pytest.approx(0.0, abs=1e-9)
    assert slowest_normal(2) == pytest.approx(0.5641895835, abs=1e-6)  # 1 / sqrt(pi)
    assert slowest_normal(3) == pytest.approx(0.8462843753, abs=1e-6)
    assert slowest_normal(100) == pytest.approx(2.50759, abs=1e-4)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_kth_by_enumeration(k):
    groups = [[1.0, 2.0, 5.0], [0.5, 4.0], [3.0, 3.0, 3.5, 7.0]]
    drawn = [sorted(draw)[k - 1] for draw in itertools.product(*groups)]
    assert kth_of(groups, k) == pytest.approx(sum(drawn) / len(drawn))


def test_slowest_grows_to_the_largest():
    means = slowest_by_count([1.0, 1.1, 1.3, 2.0], [], 0, 200)
    assert (means[1:] >= means[:-1] - 1e-12).all()
    assert means[0] == pytest.approx(1.35)
    assert means[-1] == pytest.approx(2.0, abs=1e-9)


@pytest.mark.parametrize("slow_count", [0, 1, 3])
def test_all_counts_at_once(slow_count):
    usual, slow = [1.0, 1.2, 1.7], [2.0, 1.5]
    for n, mean in enumerate(slowest_by_count(usual, slow, slow_count, 6), start=1):
        late = min(slow_count, n - 1)
        assert mean == pytest.approx(kth_of([usual] * (n - late) + [slow] * late, n))
