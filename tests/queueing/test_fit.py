"""The fitting routines find what is there."""

import numpy as np
import pytest

from paceline.queueing.fit import least_squares, nonnegative


def test_recovers_parameters():
    x = np.linspace(0, 4, 40)
    y = 2.5 * np.exp(-0.7 * x) + 0.3
    found, loss = least_squares(
        lambda p: p[0] * np.exp(-p[1] * x) + p[2] - y, (1.0, 0.1, 0.0), (0, 0, -5), (10, 10, 5)
    )
    assert found == pytest.approx([2.5, 0.7, 0.3], abs=1e-5)
    assert loss < 1e-9


def test_robust_to_an_outlier():
    x = np.arange(20.0)
    y = 3 * x + 1
    y[7] += 500
    found, _ = least_squares(lambda p: p[0] * x + p[1] - y, (0.0, 0.0), (-10, -10), (10, 10), robust=0.1)
    assert found == pytest.approx([3.0, 1.0], abs=0.05)


def test_stays_in_the_box():
    found, _ = least_squares(lambda p: p - np.array([5.0]), (0.5,), (0.0,), (1.0,))
    assert found == pytest.approx([1.0])


def test_nonnegative():
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert nonnegative(matrix, matrix @ np.array([2.0, 0.5])) == pytest.approx([2.0, 0.5])
    falling = nonnegative(matrix, np.array([3.0, 2.0, 1.0]))  # the slope would be negative
    assert falling == pytest.approx([2.0, 0.0])
