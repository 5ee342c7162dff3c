"""Calibration of the machine that runs the tests: short, so that only what does not depend on its speed is
asserted.
"""

import itertools
import time

import pytest
import torch

import paceline as pl
from paceline.bench import calibrate as module
from paceline.bench.calibrate import calibrate
from paceline.bench.clock import Clock
from paceline.bench.probes import probes
from paceline.cost.chip import chip
from paceline.cost.curves import curves_for
from paceline.cost.operators import times
from paceline.cost.pack import pack_ops
from paceline.errors import SpecError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def device_file(tmp_path_factory):
    """A quick calibration: a tenth of the probes, of the CPU also where there is a GPU."""
    output = tmp_path_factory.mktemp("calibrate") / "this machine.toml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "probes", lambda *args: itertools.islice(probes(*args), 0, None, 10))
        patch.setattr(torch.cuda, "is_available", lambda: False)
        said = calibrate(output, 1.0)
    assert str(output) in said
    return output


def test_predict_accepts_the_file(device_file):
    device = pl.devices.get(str(device_file))
    assert device.kind == "cpu" and device.peak("fp32") > 1e8 and device.memory_bandwidth_Bps > 1e7
    assert all(
        fact.kind == "measured" and "paceline calibrate" in fact.source for fact in device.facts.values()
    )
    prediction = pl.predict("resnet18", device, batch=8)
    assert 1e-3 < prediction.step_s < 1e3
    assert any(evidence.kind == "measured" for evidence in prediction.provenance)


def test_factors_are_near_one_for_a_cpu(device_file):
    """The curves are of another CPU: factors say how this one differs, not how a CPU differs from a GPU."""
    device = pl.devices.get(str(device_file))
    assert curves_for(device).name == "cpu"
    assert 0.02 < device.calibration["scale."] < 50
    assert device.calibration["host"] > 0


def test_nothing_else_is_left_behind(device_file):
    assert [path.name for path in device_file.parent.iterdir()] == [device_file.name]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("machine.json", "must end in .toml"),
        ("no/such/folder/machine.toml", "cannot write .*No such file"),
        ("folder.toml", "it is a folder"),
    ],
)
def test_a_bad_path_is_named_before_anything_is_measured(tmp_path, monkeypatch, output, message):
    (tmp_path / "folder.toml").mkdir()
    monkeypatch.setattr(module, "_describe", lambda *_: pytest.fail("measured first"))
    with pytest.raises(SpecError, match=message):
        calibrate(tmp_path / output, 1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.toml"]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_seconds(tmp_path, seconds):
    with pytest.raises(SpecError, match="above zero"):
        calibrate(tmp_path / "machine.toml", seconds)


def test_a_failed_measurement_leaves_the_old_file(tmp_path, monkeypatch):
    output = tmp_path / "machine.toml"
    output.write_text("old")
    monkeypatch.setattr(module, "_host", lambda *_: 1 / 0)
    monkeypatch.setattr(module, "_capabilities", lambda *_: {"peak.fp32": 1e11, "memory.bandwidth": 1e10})
    with pytest.raises(ZeroDivisionError):
        calibrate(output, 1.0)
    assert output.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["machine.toml"]


def test_every_probe_runs_and_has_a_prediction(device_file):
    device = pl.devices.get(str(device_file))
    count = 0
    for probe in probes(CPU, ("fp32",)):
        probe.run()
        packed = pack_ops([probe.op])
        assert len(packed.groups.names) == 1
        assert times(packed, chip(device), curves_for(device)).seconds[0] > 0
        count += 1
    assert abs(count - module.PROBES) < 20


def test_clock_is_not_led_astray_by_a_stall():
    calls = itertools.count()
    assert 1e-3 < Clock(CPU).seconds(lambda: time.sleep(0.3 if next(calls) == 4 else 2e-3), 0.05) < 0.1


def test_the_better_round_counts(monkeypatch):
    """A machine that is busy for a while spoils one round of probes, not the file."""
    device = pl.devices.get("haswell-cori")
    seconds = itertools.chain(itertools.repeat(1.0, 4), itertools.repeat(1e-3))
    clock = Clock(CPU)
    monkeypatch.setattr(module, "probes", lambda *args: itertools.islice(probes(*args), 4))
    monkeypatch.setattr(clock, "seconds", lambda *_: next(seconds))
    scales = module._scales(device, clock, time.perf_counter() + 60)
    monkeypatch.setattr(module, "ROUNDS", 1)
    assert module._scales(device, clock, time.perf_counter() + 60) == scales


def test_names_survive_quoting():
    sheet = module._Sheet(
        {"name": 'a "b" \\ c', "title": "t"},
        {"peak.fp32": 1e12, "memory.size": 1e9, "memory.bandwidth": 1e9},
        {"host": 1.0},
    )
    assert sheet.device().name == 'a "b" \\ c'
