"""`paceline analyze --sparsity`: gains on devices, the command and its mistakes."""

import json
import math

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.capture import real_step
from paceline.catalog import devices
from paceline.cli import main
from paceline.cost.work_depth import Evaluation
from paceline.errors import SpecError
from paceline.spec.sparsity import LayerZeros
from paceline.whatif.sparsity import _StepOnDevice, device_gains, storage, two_four_rate

SKIPPING = """
name = "skipper"
like = "h200"
[sparsity]
weights = 1
{more}
"""


def layer(name, outputs, inputs_each, **shares):
    given = {
        "inputs": 0.0,
        "input_vectors": 0.0,
        "dead_inputs": 0.0,
        "output_gradients": 0.0,
        "weight_zeros": 0.0,
        "weight_gradients": 0.0,
        "passes_gradient": True,
        "points": 1,
        **shares,
    }
    return LayerZeros(
        name=name, kind="Linear", multiply_adds=1.0, outputs=outputs, inputs_each=inputs_each, **given
    )


def two_layers(rows=8192, precision="bf16"):
    net = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096))
    return pl.capture((net, torch.randn(rows, 4096)), precision=precision, fold=False, batch=rows)


LAYERS = [layer("0", 4096, 4096, passes_gradient=False), layer("2", 4096, 4096)]


def test_what_each_product_evaluates():
    step = _StepOnDevice.of(two_layers(256), {one.name: one for one in LAYERS}, devices.get("h200"))
    found = [(one.op.module, one.evaluates) for one in step.products]
    assert sorted(found) == sorted(
        [
            ("0", Evaluation.OUTPUT),
            ("2", Evaluation.OUTPUT),
            ("2", Evaluation.INPUT),
            ("2", Evaluation.WEIGHTS),
            ("0", Evaluation.WEIGHTS),
        ]
    )


def test_two_four_of_large_layers():
    forward, step = device_gains(two_layers(), LAYERS, devices.get("h200"))
    assert len(forward.products) == 2 and len(step.products) == 3
    assert all(1.3 < product.gain < 1.6 for product in forward.products)
    assert all(product.gain_low < product.gain < product.gain_high for product in step.products)
    assert forward.products[0].gain > forward.gain > step.gain > 1
    assert forward.low < forward.gain < forward.high
    # what is spared is what products spare: everything else takes as long
    left = forward.dense_s - forward.sparse_s
    spent = sum(product.dense_s - product.sparse_s for product in forward.products)
    assert spent * 0.99 < left < spent * 2  # products are slowed by the board's limit in a step


def test_few_rows_stay_dense():
    forward, _ = device_gains(two_layers(16), LAYERS, devices.get("h200"))
    assert forward.gain == 1.0 and "2 of 2 products are no faster and stay dense" in forward.notes


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_no_two_four_in_32_bits(precision):
    forward, _ = device_gains(two_layers(64, precision), LAYERS, devices.get("a100"))
    assert not forward.products and forward.gain == 1 and "--precision bf16" in " ".join(forward.notes)


def test_other_devices_are_less_sure():
    wide = device_gains(two_layers(), LAYERS, devices.get("a100"))[0].products[0]
    own = device_gains(two_layers(), LAYERS, devices.get("h200"))[0].products[0]
    assert wide.gain_high / wide.gain > own.gain_high / own.gain


@pytest.mark.parametrize(
    ("name", "rate"),
    [("a100", 2), ("h200", 2), ("l4", 2), ("b200", 2), ("v100-sxm2-32gb", None), ("t4", None)],
)
def test_devices_with_two_four(name, rate):
    assert two_four_rate(devices.get(name)) == rate


def skipping(tmp_path, more=""):
    file = tmp_path / "skipper.toml"
    file.write_text(SKIPPING.format(more=more))
    return devices.get(str(file))


def test_a_device_that_skips_zeros(tmp_path):
    half = [
        layer("0", 4096, 4096, weight_zeros=0.5, passes_gradient=False),
        layer("2", 4096, 4096, inputs=0.5, weight_zeros=0.5),
    ]
    gains = device_gains(two_layers(), half, skipping(tmp_path))[-1].products
    both = device_gains(two_layers(), half, skipping(tmp_path, "activations = 1"))[-1].products
    by_name = {(one.layer, one.evaluates): one.gain for one in gains}
    assert math.isclose(by_name["2", "output"], 2, rel_tol=0.1)
    assert by_name["2", "weights"] == 1.0
    with_both = {(one.layer, one.evaluates): one.gain for one in both}
    assert math.isclose(with_both["2", "output"], 4, rel_tol=0.2)
    assert math.isclose(with_both["2", "weights"], 2, rel_tol=0.1)


def test_a_device_without_either():
    with pytest.raises(SpecError, match="nothing is known of zeros that v100"):
        device_gains(two_layers(16), LAYERS, devices.get("v100-sxm2-32gb"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("weights = 1.5", "sparsity.weights: expected a share of at most 1, got 1.5"),
        ("two_four = 0.5", "expected a peak over the dense one"),
        ("activation = 0.5", "unknown key 'activation'"),
    ],
)
def test_device_files_with_mistakes(tmp_path, line, message):
    file = tmp_path / "bad.toml"
    file.write_text(f'name = "bad"\nlike = "h200"\n[sparsity]\n{line}\n')
    with pytest.raises(SpecError, match=message):
        devices.get(str(file))


def test_storage_of_layers():
    rows = list(storage([layer("0", 64, 64)], 16))
    assert not any(row.granularity == "kernel" for row in rows)
    by_way = {(row.granularity.value, round(row.density, 2), row.form): row for row in rows}
    assert by_way["2:4", 0.5, "2:4"].index_bits == 2
    assert by_way["2:4", 0.5, "2:4"].bytes_share == 0.5 * 18 / 16
    assert by_way["element", 0.25, "bitmap"].index_bits == 4
    assert by_way["vector", 0.5, "bitmap"].index_bits == 0.25
    assert by_way["filter", 0.5, "bitmap"].index_bits == 2 / 64
    assert all(row.multiply_adds_share == row.density for row in rows)


# -- the command -----------------------------------------------------------------------------------

NET = """
import torch
from torch import nn

def build(batch):
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 16))
    return net, torch.randn(batch, 64)
"""


@pytest.fixture
def net(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    return f"{tmp_path / 'net.py'}:build"


def run(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["analyze", *words])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_a_file(capsys, net, tmp_path):
    page = tmp_path / "zeros.html"
    words = [net, "--sparsity", "--device", "h200", "--precision", "bf16", "--html", str(page)]
    text = run(capsys, *words, "--batch", "64")
    assert "2:4 weights, forward pass on h200" in text and "predicted for batch 64 in bf16" in text
    assert "load trained ones" in text and "Index overhead" in page.read_text()
    found = json.loads(run(capsys, *words, "--json", "--batch", "64"))
    assert found["samples"] == 4 and found["batch"] == 64 and len(found["layers"]) == 3
    assert 0.3 < found["layers"][1]["inputs"] < 0.7 and found["layers"][0]["inputs"] == 0
    assert [gain["way"].partition(",")[0] for gain in found["gains"]] == ["2:4 weights"] * 2
    assert found["gains"][0]["products"][0]["gain"] > 0


def test_steps_come_before_the_count(capsys, net):
    none = json.loads(run(capsys, net, "--sparsity", "--json"))
    some = json.loads(run(capsys, net, "--sparsity", "--json", "--after", "50"))
    assert none["steps"] == 0 and some["steps"] == 50
    assert none["layers"][1]["inputs"] != some["layers"][1]["inputs"]


def test_a_task(capsys):
    words = ["digits-cnn", "--sparsity", "--after", "20", "--prune", "1", "--json"]
    found = json.loads(run(capsys, *words))
    assert found["model"] == "digits-cnn" and found["steps"] == 20 and found["samples"] == 256
    assert len(found["pruned"]) == 17 and found["pruned"][0]["lost"][1] is None
    # an image of digits is -1 where nothing is drawn: no zeros there, many behind each ReLU
    assert found["layers"][0]["inputs"] < 0.2 < found["layers"][1]["inputs"]
    assert found["skippable"][0] > 0.3 and found["layers"][0]["output_gradients"] > 0.3


def test_a_model_too_large_for_this_machine(capsys, net, monkeypatch):
    monkeypatch.setattr(real_step, "_memory_bytes", lambda: 200_000)
    with pytest.raises(SystemExit) as ended:
        main(["analyze", net, "--sparsity"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "are 141 kB, with 200 kB in this machine; take a smaller" in error
    monkeypatch.setattr(real_step, "_memory_bytes", lambda: None)
    run(capsys, net, "--sparsity")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["NET", "--sparsity", "--memory", "--device", "h200"], "one at a time"),
        (["NET", "--concurrency", "--after", "3"], "--after goes with --sparsity"),
        (["NET", "--memory", "--device", "h200", "--prune", "3"], "--prune goes with --sparsity"),
        (["NET", "--concurrency", "--device", "h200"], "--device goes with --memory or --sparsity"),
        (["NET", "--sparsity", "--prune", "3"], "it takes a task (digits-cnn, digits-deep, "),
        (["NET", "--sparsity", "--after", "-1"], "after"),
        (["NET", "--sparsity", "--compile"], "--compile does not go with --sparsity"),
        (["digits-cnn", "--sparsity", "--image", "32"], "--image does not go with --sparsity"),
        (["digits-cnn", "--sparsity", "--prune", "0"], "prune"),
        (["digits-cn", "--sparsity"], "digits-cn"),
        (["work.json", "--sparsity"], "which has no values; name the model itself"),
        (["NET", "--sparsity", "--device", "v100-sxm2-32gb"], "nothing is known of zeros"),
    ],
)
def test_mistakes_are_one_line(capsys, net, words, message):
    with pytest.raises(SystemExit) as ended:
        main(["analyze", *(net if word == "NET" else word for word in words)])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and len(error.strip().splitlines()) == 1
