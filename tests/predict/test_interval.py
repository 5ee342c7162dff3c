"""Intervals: around the value, wider with more to doubt."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.predict.interval import Z90, Errors, around, device_sigma

shares = st.lists(st.floats(0.01, 1), min_size=1, max_size=8).map(lambda parts: {str(i): part / sum(parts) for i, part in enumerate(parts)})


@given(st.floats(1e-9, 1e6), st.floats(1e-3, 2))
def test_the_value_lies_within(value, sigma):
    low, high = around(value, sigma)
    assert 0 < low < value < high
    assert math.sqrt(low * high) == pytest.approx(value) and math.log(high / low) == pytest.approx(2 * Z90 * sigma)


@given(shares, st.floats(0, 0.5))
def test_an_unmeasured_device_widens(parts, extra):
    known = device_sigma(parts, Errors())
    assert device_sigma(parts, Errors(device=extra)) == pytest.approx(math.hypot(known, extra))
    assert 0 < known <= math.hypot(Errors().group, Errors().base) + 1e-12


def test_errors_of_many_groups_cancel():
    assert device_sigma({"a": 0.5, "b": 0.5}, Errors()) < device_sigma({"a": 1.0}, Errors())
