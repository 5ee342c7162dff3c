"""Listings: whole and legible at any width, and the same facts as plain data."""

import json

import pytest

from paceline.catalog import devices, models
from paceline.report import catalog

WIDTHS = (80, 120, 160)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_device_takes_one_line(width, drawn):
    lines = drawn(catalog.device_table([devices.get(name) for name in devices.names()]), width)
    assert [line.split()[0] for line in lines[1 : len(devices.names()) + 1]] == devices.names()
    assert "…" not in "".join(lines)
    (h200,) = [line for line in lines if line.startswith("h200 ")]
    assert "494.7" in h200 and "4.8 TB/s" in h200
    assert ("NVIDIA H200 SXM 141 GB" in h200) == (width > 80)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["h200", "k80", "tpu-v4", "haswell-cori"])
def test_every_fact_and_source_of_a_device(name, width, drawn):
    device = devices.get(name)
    text = " ".join(" ".join(drawn(catalog.device_facts(device), width)).split())
    for path, fact in device.facts.items():
        assert path in text
        assert " ".join(fact.source.split()) in text


@pytest.mark.parametrize("width", WIDTHS)
def test_models(width, drawn):
    lines = drawn(catalog.model_table(), width)
    starts = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert starts == ["name", *models.names()]
    assert any("25,557,032" in line for line in lines)
    assert any("He et al. 2015" in line for line in lines) == (width > 140)
    assert "…" not in "".join(lines)


def test_plain_data_round_trips():
    device = json.loads(json.dumps(catalog.device_dict(devices.get("h200"))))
    assert device["facts"]["memory.bandwidth"]["value"] == 4.8e12
    assert device["facts"]["memory.bandwidth"]["source"]
    assert device["aliases"] == ["h200-sxm", "NVIDIA H200"]
    listed = json.loads(json.dumps(catalog.model_dicts()))
    assert [entry["name"] for entry in listed] == models.names()
    assert all(entry["parameters"] > 0 and entry["source"] for entry in listed)
