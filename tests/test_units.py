"""Quantities: what is read, what is shown, and that one survives the other."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UnitError
from paceline.units import UNITS, example, parse, show

DIMENSIONS = sorted(UNITS)
PAIRS = [(dimension, unit) for dimension, units in UNITS.items() for unit in units]


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("400 Gb/s", "bandwidth", 50e9),
        ("400 Gbps", "bandwidth", 50e9),
        ("3.35 TB/s", "bandwidth", 3.35e12),
        ("80 GB", "bytes", 80e9),
        ("80 GiB", "bytes", 80 * 2**30),
        ("1_000kB", "bytes", 1e6),
        ("8 Mbit", "bytes", 1e6),
        ("989.4 TFLOP/s", "flops", 989.4e12),
        ("1979 TOP/s", "flops", 1979e12),
        ("5 us", "time", 5e-6),
        ("5 µs", "time", 5e-6),
        ("2 h", "time", 7200),
        ("1.98 GHz", "frequency", 1.98e9),
        ("700W", "power", 700),
        ("1.2 pJ", "energy", 1.2e-12),
        ("3.6 USD/h", "price_rate", 1e-3),
        ("7B", "count", 7e9),
        ("90 %", "fraction", 0.9),
        (" .5e3 ", "count", 500),
        (132, "count", 132),
        (1.5, "time", 1.5),
    ],
)
def test_parse(text, dimension, value):
    assert parse(text, dimension) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "dimension", "message"),
    [
        ("80 GHz", "bytes", "unknown unit 'GHz'.*allowed: B, kB"),
        ("lots", "time", "cannot read 'lots' as a time.*'5 us'"),
        ("", "count", "cannot read ''"),
        ("1e999", "bytes", "not a finite bytes"),
        (math.nan, "time", "not a finite"),
        (math.inf, "power", "not a finite"),
        (True, "count", "expected a count such as '132', got True"),
        (None, "bytes", "expected a bytes"),
        ("1 2 GB", "bytes", "cannot read"),
        ("80 gb", "bytes", "unknown unit 'gb'"),
    ],
)
def test_bad_quantity(text, dimension, message):
    with pytest.raises(UnitError, match=message):
        parse(text, dimension)


@pytest.mark.parametrize(
    ("value", "dimension", "text"),
    [
        (4.8e12, "bandwidth", "4.8 TB/s"),
        (0.0123, "time", "12.3 ms"),
        (141e9, "bytes", "141 GB"),
        (0, "bytes", "0 B"),
        (0, "time", "0 s"),
        (7200, "time", "2 h"),
        (90, "time", "90 s"),
        (0.057, "fraction", "5.7 %"),
        (1e15, "count", "1 P"),
        (2.5 / 3600, "price_rate", "2.5 USD/h"),
        (999.9e6, "bytes", "1 GB"),
        (30000, "price", "30000 USD"),
        (-3e-6, "time", "-3 us"),
    ],
)
def test_show(value, dimension, text):
    assert show(value, dimension) == text


@pytest.mark.parametrize("dimension", DIMENSIONS)
@given(value=st.floats(1e-9, 1e18) | st.just(0.0), digits=st.integers(1, 6))
def test_shown_reads_back(dimension, value, digits):
    assert parse(show(value, dimension, digits), dimension) == pytest.approx(
        value, rel=0.6 * 10.0 ** (1 - digits)
    )


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_example_reads(dimension):
    assert parse(example(dimension), dimension) > 0


@pytest.mark.parametrize(("dimension", "unit"), PAIRS)
@given(value=st.floats(1e-6, 1e6))
def test_every_unit_scales(dimension, unit, value):
    assert parse(f"{value!r} {unit}", dimension) == pytest.approx(value * UNITS[dimension][unit], rel=1e-12)
