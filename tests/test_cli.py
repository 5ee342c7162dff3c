"""The command line: answers, and one clear line with exit code 2 for a user's mistake."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import __version__, cli

torch = pytest.importorskip("torch", reason="capture needs torch")

CHIP = (
    'name = "chip"\n[peak]\nbf16 = "2 PFLOP/s"\nfp32 = "60 TFLOP/s"\n[memory]\nsize = "192 GB"\nbandwidth ='
    ' "8 TB/s"\n'
)
NET = """\
import torch

class Broken(torch.nn.Module):
    def forward(self, x):
        return x @ x[:, :2]

def build(batch):
    return torch.nn.Linear(8, 4), torch.randn(batch, 8)

def broken(batch):
    return Broken(), torch.randn(batch, 8, requires_grad=True)
"""
#: torch as if it were not installed
HIDE = """\
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Hidden())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "chip.toml").write_text(CHIP)
    (tmp_path / "bad.toml").write_text(CHIP.replace('size = "192 GB"', 'size = "-192 GB"'))
    (tmp_path / "worse.toml").write_text(CHIP.replace('"60 TFLOP/s"', '"60 TFLOP/s'))
    (tmp_path / "broken.json").write_text("{")
    return tmp_path


@pytest.fixture
def run(capsys):
    """Runs the command line in this process: (exit code, stdout, stderr)."""

    def call(*arguments):
        code = 0
        try:
            cli.main(arguments)
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return call


def child(*arguments, before=()):
    """Runs it in a process of its own, with some folders first in the path of modules."""
    path = os.pathsep.join(map(str, (*before, Path(cli.__file__).parents[2])))
    command = [sys.executable, "-m", "paceline.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("predict resnet18 -d h2000", "unknown device 'h2000'; did you mean 'h200'"),
        ("predict resnet81 -d h200", "unknown model 'resnet81'; did you mean 'resnet18'"),
        ("predict resnet18 -d absent.toml", "cannot read device file 'absent.toml': No such file"),
        ("predict resnet18 -d bad.toml", "bad.toml: line 6, memory.size: must be above zero, got '-192 GB'"),
        ("predict resnet18 -d worse.toml", "worse.toml: not valid TOML: .*line 4"),
        ("predict resnet18 -d h200 --batch 0", "batch must be a whole number of 1 or more, got 0"),
        ("predict resnet18 -d h200 --batch -3", "batch must be a whole number of 1 or more, got -3"),
        ("predict resnet18 -d h200 --batch 2.5", "--batch: expected a whole number, got '2.5'"),
        ("predict resnet18 -d h200 --batch many", "--batch: expected a whole number, got 'many'"),
        ("predict gpt2 -d h200 --seq 0", "seq must be a whole number of 1 or more, got 0"),
        ("predict resnet18 -d h200 --image -1", "image must be a whole number of 1 or more, got -1"),
        ("predict resnet18 -d h200 --seq 7", "resnet18 takes no seq"),
        (
            "predict resnet18 -d h200 --precision bf61",
            "unknown precision 'bf61'; did you mean 'bf16'.* allowed: fp32, tf32",
        ),
        ("predict resnet18 -d h200 --optimizer adan", "unknown optimizer 'adan'; did you mean 'adam'"),
        ("predict broken.json -d h200", "broken.json: not valid JSON: line 1 column 2"),
        ("predict absent.json -d h200", "cannot read workload 'absent.json'"),
        ("predict absent.py:build -d h200", "no file 'absent.py'"),
        ("predict net.py:bild -d h200", "unknown function in net.py 'bild'; did you mean 'build'"),
        ("predict net.py -d h200", "name the function"),
        ("predict hf:absent -d h200", "cannot read 'absent'"),
        ("predict resnet18", "give --device for one device, or --cluster"),
        ("predict gpt2 --cluster 1xh200 --batch 8", "batch does not go with a cluster; batch, sequence"),
        ("predict gpt2 --cluster 1xh200 --plan seq=9 --seq 5", "seq is given twice: 5, and 9 in the plan"),
        ("predict gpt2 --cluster 8xh200 --plan tp=3", "plan cannot run: .*nearest feasible plan: "),
        ("predict gpt2 --cluster 8xh200 --plan tpp=3", "plan: unknown 'tpp'; did you mean 'tp'"),
        (
            "predict resnet18 --cluster 8xh200 --plan tp=2",
            "tp 2: a captured module is split by data and, .*; nearest feasible plan: ddp dp=8",
        ),
        (
            "predict resnet18 --cluster 8xh200 --plan gbs=12",
            "gbs 12 is not a multiple of dp 8 x mbs 1 = 8; nearest feasible plan: .*gbs=16",
        ),
        (
            "predict resnet18 --cluster 8xh200 --batch 4 --plan mbs=2",
            "mbs 2, but the workload was captured with batch 4",
        ),
        ("predict resnet18 -d h200 --bath 3", "Unknown option: --bath. Did you mean --batch"),
        ("predict resnet18 resnet50 -d h200", "Unused Tokens.*resnet50"),
        ("prdict resnet18", "Unknown command .prdict."),
        ("capture resnet18", "--output requires an argument"),
        ("capture resnet81 -o out.json", "unknown model 'resnet81'"),
        ("devices h2000", "unknown device 'h2000'"),
        ("validate no_such_set", "unknown set 'no_such_set'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(run, folder, arguments, message):
    before = {p.name for p in folder.iterdir()}
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("paceline: ")
    assert re.search(message, line), line
    assert {p.name for p in folder.iterdir()} - {"__pycache__"} == before


def test_a_failing_module_shows_its_own_traceback(run):
    code, out, err = run("predict", "net.py:broken", "-d", "h200")
    first, *frames = err.splitlines()
    assert (code, out) == (2, "") and first.startswith(
        "paceline: net.py:broken: forward pass raised RuntimeError: "
    )
    assert len(frames) == 1 and "net.py:5 in forward: return x @ x[:, :2]" in frames[0]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--batch 4", "batch"),
        ("--seq 4", "seq"),
        ("--precision bf16", "precision"),
        ("--optimizer sgd", "optimizer"),
        ("--checkpointing", "checkpointing"),
        ("--image 4", "image"),
        ("--channels-last", "channels-last"),
    ],
)
def test_what_a_captured_workload_has_fixed(run, flags, word):
    assert run("capture", "net.py:build", "-o", "w.json")[0] == 0
    code, out, err = run("predict", "w.json", "-d", "h200", *flags.split())
    assert (
        (code, out) == (2, "")
        and err
        == f"paceline: w.json is a captured workload, whose {word} is fixed; capture it again to change it\n"
    )


@pytest.mark.parametrize(
    "command", ["predict net.py:broken -d h200 --trace {}", "capture net.py:broken -o {}"]
)
def test_a_failed_run_leaves_files_alone(run, folder, command):
    kept = folder / "kept.json"
    kept.write_text("mine")
    assert run(*command.format("kept.json").split())[0] == 2
    assert kept.read_text() == "mine" and not list(folder.glob("*.partial"))
    assert run(*command.replace("broken", "build").format("absent/x.json").split())[0] == 2


def test_predict_in_json(run):
    code, out, err = run(
        "predict",
        "net.py:build",
        "--device",
        "chip.toml",
        "--batch",
        "64",
        "--precision",
        "amp_bf16",
        "--json",
    )
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert (data["device"], data["batch"], data["precision"]) == ("chip", 64, "amp_bf16")
    assert data["step_s_low"] < data["step_s"] < data["step_s_high"] and data["throughput"] == pytest.approx(
        64 / data["step_s"]
    )
    assert sum(data["memory"].values()) == data["peak_bytes"] and sum(
        p["seconds"] for p in data["breakdown"]
    ) == pytest.approx(data["kernel_s"])
    assert data["bound_by"] == "host" and any(e["source"] == "chip.toml" for e in data["provenance"])


def test_capture_then_predict_without_torch(run, folder):
    code, out, _ = run("capture", "net.py:build", "-b", "32", "-o", "w.json")
    assert code == 0 and out.startswith("w.json: net.py:build, 36 parameters, ")
    expected = json.loads(run("predict", "net.py:build", "-b", "32", "-d", "h200", "--json")[1])
    (folder / "sitecustomize.py").write_text(HIDE)
    later = child("predict", "w.json", "-d", "h200", "--json", before=[folder])
    assert (later.returncode, later.stderr) == (0, "") and json.loads(later.stdout) == expected
    missing = child("predict", "resnet18", "-d", "h200", before=[folder])
    assert (missing.returncode, missing.stdout) == (2, "")
    assert (
        missing.stderr == "paceline: capturing a model needs torch, which is not installed; run: pip install"
        " 'paceline[torch]'\n"
    )
    for command in (("devices",), ("models",), ("--help",)):
        assert child(*command, before=[folder]).returncode == 0


def test_trace(run, folder):
    code, out, _ = run("predict", "net.py:build", "-d", "h200", "--trace", "t.json")
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    assert (
        code == 0
        and "trace written to t.json" in out
        and all(e["dur"] >= 0 for e in events if e["ph"] == "X")
    )


def test_predict_for_people(run):
    code, out, err = run("predict", "net.py:build", "-d", "chip.toml")
    assert (
        (code, err) == (0, "")
        and out.startswith("net.py:build on chip, batch 1, fp32, adamw\n")
        and "bottleneck: host" in out
    )
    assert re.search(r"guessed +chip chip.sms", out) and re.search(
        r"declared +chip memory.bandwidth +\[chip.toml\]", out
    )


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        (["llama3-70b", "--cluster", "32xdgx-h100", "--plan", "dp=fsdp tp=8 mbs=1 gbs=1024 seq=8192"], 1),
        (
            [
                "gpt3-175b",
                "--cluster",
                "8xdgx-a100",
                "--plan",
                "tp=8 pp=8 vpp=3 mbs=1 gbs=64 recompute=selective sp",
            ],
            8,
        ),
        (["resnet50", "--cluster", "8xp100-node-10gbe", "--plan", "dp=ddp bucket=25MB"], 1),
        (["resnet50", "--cluster", "8xp100-node-10gbe", "--plan", "pp=4 gbs=256 mbs=2"], 4),
        (["net.py:build", "--cluster", "4xdgx-h100", "--plan", "fsdp"], 1),
    ],
)
def test_many_devices(run, folder, arguments, ranks):
    """The examples of the documentation, with a trace for every kind of rank."""
    code, out, err = run("predict", *arguments, "--trace", "traces")
    assert (
        (code, err) == (0, "")
        and out.startswith(f"{arguments[0]} on {arguments[2]}, ")
        and "trace written to traces" in out
    )
    assert len(list((folder / "traces").iterdir())) == ranks
    answer = json.loads(run("predict", *arguments, "--json")[1])
    assert len(answer["stages"]) == ranks and answer["step_s_low"] < answer["step_s"] < answer["step_s_high"]


@pytest.mark.parametrize(("command", "count"), [("devices", 40), ("models", 40)])
def test_lists(run, command, count):
    code, out, _ = run(command, "--json")
    listed = json.loads(out)
    assert code == 0 and len(listed) >= count and all(entry["name"] for entry in listed)
    code, out, _ = run(command)
    assert code == 0 and all(entry["name"] in out for entry in listed)


def test_version_and_help(run):
    assert run("--version")[:2] == (0, f"{__version__}\n")
    code, out, _ = run("--help")
    assert code == 0 and all(
        command in out for command in ("predict", "capture", "devices", "models", "calibrate", "validate")
    )
    code, out, _ = run("predict", "--help")
    assert code == 0 and all(
        flag in out
        for flag in ("--device", "--batch", "--seq", "--precision", "--checkpointing", "--trace", "--json")
    )


def test_help_is_quick():
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert child("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.6
