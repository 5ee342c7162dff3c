"""Intervals: around the value, wider with more to doubt, and the answer says what was never measured."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.catalog import clusters, devices, frameworks, transformers
from paceline.predict.interval import SPREADS, Z90, Errors, Spread, around, bounded, of_device

shares = st.lists(st.floats(0.01, 1), min_size=1, max_size=8).map(
    lambda parts: {str(i): part / sum(parts) for i, part in enumerate(parts)}
)
NODE = "1xdgx-h100"
GROUP = SPREADS["operators"]["group"]


def errors(*sigmas):
    return Errors(group=GROUP, common=tuple((str(s), Spread(sigma=s, source="a test")) for s in sigmas))


@given(st.floats(1e-9, 1e6), st.floats(1e-3, 2))
def test_the_value_lies_within(value, sigma):
    low, high = around(value, sigma)
    assert 0 < low < value < high
    assert math.sqrt(low * high) == pytest.approx(value) and math.log(high / low) == pytest.approx(
        2 * Z90 * sigma
    )


@given(shares, st.floats(0, 0.5))
def test_an_unmeasured_device_widens(parts, extra):
    known = errors(0.03).sigma(parts)
    assert errors(0.03, extra).sigma(parts) == pytest.approx(math.hypot(known, extra))
    assert 0 < known <= math.hypot(GROUP.sigma, 0.03) + 1e-12


def test_errors_of_many_groups_cancel():
    assert errors().sigma({"a": 0.5, "b": 0.5}) < errors().sigma({"a": 1.0})


def width(p):
    return math.log(p.step_s_high / p.step_s_low)


def never_measured(p):
    return [e.what for e in p.provenance if e.what.startswith("never measured")]


def test_a_framework_that_is_named_and_known_narrows_the_interval():
    named, unnamed = (
        pl.predict("gpt2-1.5b", plan=f"gbs=64{more}", cluster=NODE) for more in (" framework=nemo", "")
    )
    assert width(named) < width(unnamed) and not never_measured(named)


def test_a_framework_of_ones_own_is_never_measured():
    mine = replace(frameworks.get("nemo"), name="mine")
    known, own = (pl.predict("gpt2-1.5b", plan="gbs=64", cluster=NODE, framework=f) for f in ("nemo", mine))
    assert own.step_s == known.step_s and width(own) > width(known)
    assert never_measured(own) == ["never measured: steps of framework mine"]


def test_an_architecture_without_curves_is_never_measured():
    known, new = (
        pl.predict("gpt2-1.5b", plan="gbs=64 framework=nemo", cluster=c) for c in (NODE, "1x8xmi300x")
    )
    assert width(new) > width(known)
    assert any("architecture" in what for what in never_measured(new))


def test_every_known_framework_has_a_spread():
    known = {*SPREADS["modules"], *SPREADS["transformers"]}
    assert known <= set(frameworks.names())
    transformer_frameworks = {name for name in frameworks.names() if frameworks.get(name).runs != "modules"}
    assert transformer_frameworks == set(SPREADS["transformers"])


def test_memory_has_an_interval():
    p = pl.predict(transformers.get("gpt2-1.5b"), plan="gbs=64", cluster=clusters.get(NODE))
    m = p.memory
    assert 0 < m.peak_low_bytes < m.peak_bytes < m.peak_high_bytes
    assert 0 < m.reserved_low_bytes < m.reserved_bytes < m.reserved_high_bytes
    assert bounded(m, Spread(sigma=0.0, source="a test")).peak_low_bytes == m.peak_bytes


@pytest.mark.parametrize(("device", "kind"), [("h200", "own"), ("h100-sxm", "alike"), ("mi300x", "new")])
def test_devices_with_their_own_curves_are_trusted_most(device, kind):
    _, spread = of_device(devices.get(device), _curves(device))
    assert spread is SPREADS["devices"][kind]
    assert spread.sigma >= SPREADS["devices"]["own"].sigma == 0.0


def _curves(name):
    from paceline.cost.curves import curves_for

    return curves_for(devices.get(name))
