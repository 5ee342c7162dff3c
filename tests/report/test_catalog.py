"""Listings: whole and legible at any width, and the same facts as plain data."""

import json
from dataclasses import dataclass, field

import pytest
from rich.console import Console

from paceline.catalog import devices, models
from paceline.report import catalog

WIDTHS = (80, 120, 160)


def drawn(view, width):
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(view)
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= width
    return [line.rstrip() for line in lines]


@dataclass
class Score:
    set: str = "neusight_fp32_training"
    metric: str = "peak_bytes"
    rows: int = 12345
    skipped: dict = field(default_factory=dict)
    mean_abs_pct: float | None = 12.34
    median_abs_pct: float | None = 8.0
    p90_abs_pct: float | None = 30.0
    bias_pct: float | None = 2.0
    coverage_pct: float | None = 91.2
    naive_mean_abs_pct: float | None = 45.6
    naive_median_abs_pct: float | None = float("nan")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_device_takes_one_line(width):
    lines = drawn(catalog.device_table([devices.get(name) for name in devices.names()]), width)
    assert [line.split()[0] for line in lines[1 : len(devices.names()) + 1]] == devices.names()
    assert "…" not in "".join(lines)
    (h200,) = [line for line in lines if line.startswith("h200 ")]
    assert "494.7" in h200 and "4.8 TB/s" in h200
    assert ("NVIDIA H200 SXM 141 GB" in h200) == (width > 80)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["h200", "k80", "tpu-v4", "haswell-cori"])
def test_every_fact_and_source_of_a_device(name, width):
    device = devices.get(name)
    text = " ".join(" ".join(drawn(catalog.device_facts(device), width)).split())
    for path, fact in device.facts.items():
        assert path in text
        assert " ".join(fact.source.split()) in text


@pytest.mark.parametrize("width", WIDTHS)
def test_models(width):
    lines = drawn(catalog.model_table(), width)
    starts = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert starts == ["name", *models.names()]
    assert any("25,557,032" in line for line in lines)
    assert any("He et al. 2015" in line for line in lines) == (width > 140)
    assert "…" not in "".join(lines)


@pytest.mark.parametrize(("width", "spared"), [(80, ["median", "skipped", "bias"]), (120, []), (160, [])])
def test_scoreboard(width, spared):
    why = {"timm is not installed": 3, "no [such] model": 1}
    table, _, reasons = catalog.validation_table([Score(skipped=why), Score(metric="step_s", skipped=why)])
    lines = drawn(table, width)
    assert "12.3 %" in lines[-1] and "91 %" in lines[-1] and ("+2.0 %" in lines[-1]) == (not spared)
    assert "…" not in "".join(lines)
    below = drawn(reasons, width)
    assert [line.split()[1] for line in below[1:]] == ["3", "1"]  # most frequent first, each once
    assert "no [such] model" in below[-1]


def test_a_set_without_rows_has_dashes():
    (table,) = catalog.validation_table([Score(rows=0, mean_abs_pct=None, coverage_pct=float("nan"))])
    assert " - " in drawn(table, 160)[-1]
    assert "nan" not in drawn(table, 160)[-1]
    (nothing,) = catalog.validation_table([])
    assert drawn(nothing, 80) == ["no set was scored"]


def test_plain_data_round_trips():
    device = json.loads(json.dumps(catalog.device_dict(devices.get("h200"))))
    assert device["facts"]["memory.bandwidth"]["value"] == 4.8e12
    assert device["facts"]["memory.bandwidth"]["source"]
    assert device["aliases"] == ["h200-sxm", "NVIDIA H200"]
    listed = json.loads(json.dumps(catalog.model_dicts()))
    assert [entry["name"] for entry in listed] == models.names()
    assert all(entry["parameters"] > 0 and entry["source"] for entry in listed)
