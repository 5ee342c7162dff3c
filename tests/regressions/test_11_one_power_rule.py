"""A board's power limit slows its matrix units by the same rule on one device and on many."""

from dataclasses import replace
from functools import cache

import pytest

import paceline as pl
from paceline.catalog import clusters, devices
from paceline.predict import simulated
from paceline.predict import step as single
from paceline.spec.plan import Plan
from paceline.spec.transformer import Transformer

SIZES = Transformer(name="wide", layers=4, hidden=8192, heads=64, ffn=32768, vocab=32768)
DEVICES = ("a100-sxm-80gb", "h100-sxm", "h200", "b200", "mi300x", "l40s", "tpu-v5p")


@cache
def wide():
    """Four wide linear layers: next to nothing but products."""
    from torch import nn, randn

    module = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(4)))
    return pl.capture((module, (randn(8192, 8192),)), batch=8192, precision="bf16", optimizer="sgd")


def one(device):
    return single.predict(wide(), device)


def many(device, words="mbs=2 gbs=2 seq=4096"):
    cluster = replace(clusters.get("1xh100-sxm"), device=device)
    return simulated.predict(SIZES, cluster, Plan.parse(words))


def with_power(name, watts):
    return replace(devices.get(name), tdp_w=watts)


@pytest.mark.parametrize("name", DEVICES)
def test_one_device_and_a_cluster_of_one_agree(name):
    alone, cluster = one(devices.get(name)), simulated.predict(wide(), clusters.get(f"1x{name}"), Plan())
    assert cluster.step_s == pytest.approx(alone.step_s, rel=1e-9)
    assert (cluster.step_s_low, cluster.step_s_high) == pytest.approx(
        (alone.step_s_low, alone.step_s_high), rel=1e-9
    )


@pytest.mark.parametrize("answer", [one, many])
@pytest.mark.parametrize("name", ["h100-sxm", "b200", "mi300x", "l40s"])
def test_less_power_is_slower_on_both_paths(answer, name):
    assert answer(with_power(name, 150.0)).step_s > 1.1 * answer(with_power(name, 5000.0)).step_s


@pytest.mark.parametrize("answer", [one, many])
def test_b200_is_ahead_of_mi300x_as_published(answer):
    assert answer(devices.get("b200")).step_s < answer(devices.get("mi300x")).step_s


@pytest.mark.parametrize("answer", [one, many])
def test_a_rule_that_is_not_known_shows(answer):
    known, unknown = answer(devices.get("b200")), answer(devices.get("mi300x"))
    assert unknown.step_s_high / unknown.step_s > 1.03 * known.step_s_high / known.step_s
    said = {e.kind: e.source for e in unknown.provenance if "power limit" in e.what}
    assert "TSMC 5 nm" in said["guessed"]
    assert [e.kind for e in known.provenance if "power limit" in e.what] == ["fitted"]


@pytest.mark.parametrize("answer", [one, many])
def test_an_unknown_limit_shows(answer):
    found = answer(replace(devices.get("h100-sxm"), tdp_w=None))
    assert any("power limit" in e.what and "no source" in e.source for e in found.provenance)
    rated = answer(devices.get("h100-sxm"))
    assert found.step_s_high / found.step_s > rated.step_s_high / rated.step_s
