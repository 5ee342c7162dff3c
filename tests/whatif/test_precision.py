"""`paceline analyze --precision`: windows and advice follow from counts; mistakes are one line."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from paceline.cli import main
from paceline.errors import DataError, SpecError, UnknownName
from paceline.spec.value_ranges import ExponentCounts, RangeRecord, TensorKind, ValueRange
from paceline.whatif.precision import precision

NET = """\
import torch
from torch import nn

def build(batch=8, weight=1.0):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5))
    x, y = torch.randn(batch, 20), torch.randint(0, 5, (batch,))
    return net, x, lambda out: weight * nn.functional.cross_entropy(out, y)

def tiny(batch=8):
    return build(batch, weight=1e-9)

def frozen(batch=8):
    net, x, loss = build(batch)
    return net.requires_grad_(False), x, loss

def broken(batch=8):
    net, x, loss = build(batch)
    with torch.no_grad():
        net[2].weight[0, 0] = float("nan")
    return net, x, loss

def detached(batch=8):
    net, x, loss = build(batch)
    return net, x, lambda out: out.detach().mean()
"""


def values(layer, kind, powers, largest=None, gap=0):
    """A range with so many values at each power of two; all lie `gap` below the largest of their block."""
    first, last = min(powers), max(powers)
    counts = ExponentCounts(first, tuple(powers.get(power, 0) for power in range(first, last + 1)))
    below = ExponentCounts(gap, (counts.total,))
    top = 0.9 * 2.0**last if largest is None else largest
    return ValueRange(
        layer=layer, kind=kind, largest=top, exponents=counts, below_tensor=below, below_block=below
    )


def command(*words):
    """Runs a command that succeeds."""
    with pytest.raises(SystemExit) as stop:
        main(["analyze", *words])
    assert stop.value.code == 0


def record(*ranges):
    return RangeRecord(model="net", steps=4, ranks=1, ranges=ranges)


def gradients(layer, powers, **more):
    return values(layer, TensorKind.ACTIVATION_GRADIENTS, powers, **more)


def test_a_window_ends_where_gradients_vanish_and_overflow():
    # 2**-30 is the smallest power, and 0.9 * 2**-2 the largest value
    found = precision(record(gradients("fc", {-30: 1, -20: 9999, -2: 50}))).window("fp16")
    # numbers above 2**-25 stay: 2**-30 * 2**6 is such; 0.9 * 2**(-2 + 18) < 65520
    assert found.lossless == (6, 18)
    assert found.tolerant == (-4, 18)
    assert found.advised == 15
    assert found.lost_plain == pytest.approx(1 / 10050)
    assert (found.lost_advised, found.outside) == (0, ())


def test_the_edge_of_fp16_is_exact():
    below, above = (
        precision(record(gradients("fc", {0: 5}, largest=largest))).window("fp16").lossless
        for largest in (65519.0 / 65536, 65520.0 / 65536)
    )
    assert (below[1], above[1]) == (16, 15)


def test_one_layer_out_of_line_is_kept_wider_and_does_not_spoil_the_scale():
    ordinary = [gradients(f"block.{n}", {-28: 300, -22: 700}) for n in range(4)]
    huge = gradients("head", {20: 100}, largest=1e6)
    found = precision(record(*ordinary, huge))
    window = found.window("fp16")
    assert window.tolerant is None and window.outside == ("head",)
    assert 4 <= window.advised <= 37
    advice = {layer.layer: layer for layer in found.layers}
    assert advice["head"].format == "fp8", "by a scale of its own"
    spread = replace(huge, below_tensor=ExponentCounts(40, (100,)))
    found = precision(record(*ordinary, spread))
    advice = {layer.layer: layer for layer in found.layers}
    assert advice["head"].format == "bf16"
    assert "in fp16, activation gradients overflow: they reach 1e+06 times the scale" in advice["head"].words
    assert "with fp16, keep in bf16 or fp32: head" in found.advice


def test_activations_beyond_fp16():
    reach = values("fc", TensorKind.ACTIVATIONS, {18: 9, 0: 9}, largest=2e5, gap=30)
    found = precision(record(reach, gradients("fc", {-10: 10})))
    assert found.layers[0].format == "bf16"
    assert "activations overflow: they reach 2e+05, and it ends at 65504" in found.layers[0].words


def test_all_gradients_of_a_layer_gone_take_those_of_its_weights():
    weights = values("fc", TensorKind.WEIGHT_GRADIENTS, {-20: 100})
    dead, alive = gradients("fc", {-30: 100}), gradients("fc", {-30: 99, -10: 1})
    assert precision(record(dead, weights)).window("fp16").lost_plain == 1
    assert precision(record(alive, weights)).window("fp16").lost_plain == 99 / 200


def test_updates_that_weights_swallow():
    updates = values("fc", TensorKind.UPDATES, {-8: 60, -7: 40})
    found = precision(record(gradients("fc", {-5: 5}), updates))
    assert found.updates_lost == {"fp16": 0.0, "bf16": 0.6, "tf32": 0.0, "fp32": 0.0}
    assert any("60 % in bf16" in line for line in found.advice)


def test_a_record_is_read_back_and_a_damaged_one_is_one_line(tmp_path):
    path = tmp_path / "ranges.json"
    kept = record(gradients("fc", {-30: 1, -20: 9}), values("fc", TensorKind.WEIGHTS, {-3: 12}))
    kept.save(path)
    assert RangeRecord.load(path) == kept
    whole = json.loads(path.read_text())
    damages = {
        "not valid JSON": path.read_text()[:100],
        "not a record of value ranges": json.dumps({**whole, "paceline_ranges": 9}),
        "KeyError 'steps'": json.dumps({k: v for k, v in whole.items() if k != "steps"}),
        "expected a count, got -1": json.dumps({**whole, "steps": -1}),
        "'nonsense' is not a valid TensorKind": path.read_text().replace('"weights"', '"nonsense"'),
        "below_tensor counts 7 of 10 values": path.read_text().replace('"counts": [10]', '"counts": [7]', 1),
        "largest must be a finite number": path.read_text().replace('"largest": 0', '"largest": -1'),
    }
    for words, text in damages.items():
        path.write_text(text)
        with pytest.raises(DataError, match=words) as caught:
            RangeRecord.load(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="cannot read ranges"):
        RangeRecord.load(tmp_path / "absent.json")


def test_mistakes():
    good = record(gradients("encoder.0", {-3: 5}))
    with pytest.raises(UnknownName, match="unknown layer 'encoder.1'; did you mean 'encoder.0'"):
        precision(good, layer="encoder.1")
    with pytest.raises(SpecError, match="allowed share must be 0 or more and below 1, got 5"):
        precision(good, allowed=5.0)
    with pytest.raises(DataError, match=r"2 of the activation gradients of layer 'encoder.0' are NaN"):
        precision(record(replace(good.ranges[0], nans=2)))
    with pytest.raises(DataError, match="no gradients other than zero"):
        precision(record(values("fc", TensorKind.WEIGHTS, {0: 3})))


def test_a_saved_record_is_analyzed_without_torch(tmp_path):
    path = tmp_path / "ranges.json"
    record(gradients("fc", {-30: 40, -20: 60}), values("fc", TensorKind.ACTIVATIONS, {0: 9})).save(path)
    program = (
        "import sys; from paceline.cli import main\n"
        f"main(['analyze', {str(path)!r}, '--precision', '--layer', 'fc', '--json'])\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["windows"][0]["lost_plain"] == 0.4
    assert found["layers"][0]["layer"] == "fc"


def test_the_command_runs_a_module_saves_and_shows(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch", reason="runs a module")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    command("net.py:tiny", "--precision", "--steps", "6", "--every", "3", "--save", "r.json")
    shown = capsys.readouterr().out
    assert "fp16 without a loss scale loses 100 % of gradients" in shown
    assert RangeRecord.load("r.json").steps == 2
    command("r.json", "--precision", "--html", "page.html")
    again = capsys.readouterr().out
    assert shown.split("written")[0] == again.split("written")[0]
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 2 and "advised" in page


def test_a_model_of_the_catalog_starts_as_it_would():
    pytest.importorskip("torch", reason="runs a module")
    from paceline.bench.precision_run import record_ranges

    kept = record_ranges("resnet18", batch=2, image=32, steps=1, every=1)
    first = kept.of(layer="stem.conv", kind=TensorKind.ACTIVATIONS)[0]
    assert 0.5 < first.largest < 20 and first.exponents.quantile(0.5) in range(-4, 1)
    assert "inputs are random" in kept.notes[0]
    assert precision(kept).window("fp16").lost_plain < 0.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["net.py:frozen", "--precision"], "has no parameter that is trained"),
        (["net.py:broken", "--precision"], "are NaN, so the run was broken before"),
        (["net.py:detached", "--precision"], "the loss does not depend on any trainable parameter"),
        (["llama3-70b", "--precision"], "70.6 G parameters: a real run needs 1.41 TB"),
        (["net.py:build", "--precision", "--layer", "two"], "unknown layer 'two'"),
        (["net.py:build", "--precision", "--compile"], "--compile does not go with --precision"),
        (["net.py:build", "--precision", "--steps", "0"], "steps must be a whole number of 1 or more"),
        (["net.py:build", "--precision", "bf16"], "say what to look at"),
        (["net.py:build", "--concurrency", "--save", "r.json"], "--save goes with --precision"),
        (["none.json", "--precision"], "cannot read ranges 'none.json'"),
    ],
)
def test_a_mistake_of_the_command_is_one_line(words, message, tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch", reason="runs a module")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    with pytest.raises(SystemExit) as stop:
        main(["analyze", *words])
    said = capsys.readouterr().err.strip()
    assert stop.value.code == 2
    assert message in said and "\n" not in said


def test_a_word_after_precision_is_that_of_other_analyses(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch", reason="captures a module")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    command("net.py:build", "--precision", "bf16", "--concurrency", "--json")
    assert json.loads(capsys.readouterr().out)["precision"] == "bf16"
