"""A measured step beside its prediction: the rows add up on both sides."""

import json
import os
from pathlib import Path

import pytest

from paceline.catalog import devices
from paceline.cli import main
from paceline.diagnose.comparison import compare
from paceline.readers import kineto

pytest.importorskip("torch", reason="capture needs torch")
from paceline.capture import capture

DATA = os.environ.get("PACELINE_DATA")
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128_256,
    "tie_word_embeddings": True,
}
NET = """\
import torch

def build(batch):
    return torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.ReLU()), torch.randn(batch, 2048)
"""


@pytest.fixture
def net(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(NET)
    return f"{path}:build"


def adds_up(found):
    rows = found.rows
    assert sum(row.measured_s for row in rows) == pytest.approx(found.measured_s)
    assert sum(row.predicted_s for row in rows) == pytest.approx(found.predicted_s)
    difference = found.measured_s - found.predicted_s
    assert sum(row.difference_s for row in rows) == pytest.approx(difference)


def test_differences_add_up(made_traces, net, tmp_path):
    trace = kineto.read(made_traces.training(record_shapes=1).save(tmp_path / "trace.json"))
    found = compare(trace, capture(net, batch=2048, precision="bf16"), devices.get("h200"))
    adds_up(found)
    products = next(row for row in found.rows if row.name == "matrix products")
    assert products.measured_s == pytest.approx(400e-6) and products.measured_kernels == 1
    assert products.predicted_s > 0 and products.predicted_kernels > 1
    assert found.accounted == 1.0 and found.host.launches == 13
    assert "the profiler recorded shapes" in found.notes[0]


def test_work_that_is_not_recognised_is_not_accounted_for(made_traces, net, tmp_path):
    made = made_traces.training(2)
    last = max(event["ts"] for event in made.events if event["cat"] == "kernel")
    made.kernel("unheard_of", last - 190, last + 100, 5000, made.op("mine::op", last - 195, 10))
    found = compare(kineto.read(made.save(tmp_path / "t.json")), capture(net, batch=8), devices.get("h200"))
    assert found.accounted == pytest.approx(1 - 5000e-6 / found.measured_s)
    adds_up(found)


def run(words, capsys, code=0):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert (stopped.value.code or 0) == code
    return capsys.readouterr()


def test_on_the_command_line(made_traces, net, tmp_path, capsys):
    path = str(made_traces.training(ranks=2).save(tmp_path / "trace.json"))
    shown = run(["explain", net, "--measured", path, "--batch", "2048"], capsys).out
    assert "730 us measured on NVIDIA H200" in shown and "the prediction is of one device" in shown
    data = json.loads(run(["explain", net, "--measured", path, "--json"], capsys).out)
    assert data["predicted_for"] == "h200"
    assert {row["kind"] for row in data["rows"]} == {"work", "idle"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give --cluster"),
        (["--cluster", "1xh200", "--device", "h200"], "--device goes with --measured"),
        (["--measured", "trace.json", "--cluster", "1xh200"], "--measured compares a step of one device"),
        (["--measured", "nowhere.json"], "cannot read 'nowhere.json'"),
    ],
)
def test_mistakes_are_one_line(net, capsys, words, said):
    printed = run(["explain", net, *words], capsys, code=2).err
    assert said in printed and printed.count("\n") == 1


def test_an_unknown_device_has_to_be_given(made_traces, net, tmp_path, capsys):
    path = str(made_traces.training(device="A chip of tomorrow").save(tmp_path / "trace.json"))
    assert "give --device" in run(["explain", net, "--measured", path], capsys, code=2).err
    run(["explain", net, "--measured", path, "--device", "h100-sxm"], capsys)


@pytest.mark.skipif(not DATA, reason="PACELINE_DATA is not set")
def test_a_step_of_an_h200(tmp_path):
    pytest.importorskip("transformers", reason="the measured model is one of transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    step = capture(f"hf:{tmp_path}", batch=2, seq=1024, precision="bf16", optimizer="adamw-fused")
    trace = kineto.read(Path(DATA, "kineto", "llama1b-eager.pt.trace.json.gz"))
    found = compare(trace, step, devices.get("h200"))
    adds_up(found)
    assert found.accounted > 0.97
    assert found.measured_kernel_s == pytest.approx(found.predicted_kernel_s, rel=0.05)
    assert found.host.launches == pytest.approx(found.host.predicted_launches, rel=0.05)
