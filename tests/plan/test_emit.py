"""Files for other tools say what the plan says, and their own parsers take them."""

import ast
import json
import os
import shlex
import subprocess

import pytest

import paceline as pl
from paceline.errors import DataError, PlanError
from paceline.plan.emit import EMITTERS, deepspeed, emit, megatron
from paceline.plan.emit.facts import Facts
from paceline.train.check import check


@pytest.fixture(scope="module")
def sharded():
    return pl.plan(
        "llama3-8b",
        "2xdgx-h100",
        gbs=64,
        seq=8192,
        fix=["fsdp", "tp=1", "pp=1", "cp=1", "offload=none"],
        most=8,
    )


@pytest.fixture(scope="module")
def pipelined():
    return pl.plan(
        "llama3-70b",
        "8xdgx-h100",
        gbs=256,
        seq=8192,
        fix=["framework=megatron-core", "zero1", "tp=4", "pp=4", "cp=1", "offload=none"],
        most=8,
    )


def test_all_files(sharded, tmp_path):
    names = ["torchrun", "fsdp2", "deepspeed", "accelerate", "torchtitan", "slurm"]
    written = emit(sharded, names, tmp_path / "run")
    assert {path.name for path in written} == {
        "plan.json",
        "train.py",
        "torchrun.sh",
        "fsdp2.py",
        "deepspeed.json",
        "accelerate.yaml",
        "torchtitan.sh",
        "job.sbatch",
    }
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == sorted(path.name for path in written)
    for path in written:
        text = path.read_text()
        if path.suffix == ".py":
            ast.parse(text)
        elif path.suffix in (".sh", ".sbatch"):
            assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
        if path.suffix != ".json":
            assert str(sharded.best.plan) in text and "s per step" in text
    assert (
        json.loads((tmp_path / "run/plan.json").read_text())["prediction"]["step_s"]
        == sharded.best.prediction.step_s
    )
    assert os.access(tmp_path / "run/torchrun.sh", os.X_OK)


def test_megatron(pipelined):
    plan = pipelined.best.plan
    words = shlex.split(" ".join(megatron.arguments(Facts.of(pipelined))))
    values = dict(zip(words, [*words[1:], ""], strict=True))
    assert values["--tensor-model-parallel-size"] == "4" and values["--pipeline-model-parallel-size"] == "4"
    assert (
        values["--micro-batch-size"] == str(plan.mbs)
        and values["--global-batch-size"] == "256"
        and values["--num-query-groups"] == "8"
    )
    assert {"--use-distributed-optimizer", "--overlap-grad-reduce", "--swiglu", "--bf16"} <= set(words)
    assert ("--sequence-parallel" in words) == plan.sp


def test_what_a_tool_lacks_is_refused_before_anything_is_written(pipelined, tmp_path):
    for tool in ("deepspeed", "accelerate", "fsdp2"):
        with pytest.raises(PlanError, match=f"--emit {tool}: it has no .*plan with --fix"):
            emit(pipelined, ["megatron", "slurm", tool], tmp_path / "run")
    with pytest.raises(PlanError, match="--emit slurm: .*; plan with --fix, or leave slurm out"):
        emit(pipelined, ["slurm"], tmp_path / "run")  # torchrun's script, which trains in torch
    assert not (tmp_path / "run").exists()
    assert set(EMITTERS) == {
        "torchrun",
        "fsdp2",
        "megatron",
        "deepspeed",
        "accelerate",
        "torchtitan",
        "slurm",
    }


def test_deepspeed_takes_it(sharded):
    config = deepspeed.config(Facts.of(sharded))
    assert config["zero_optimization"]["stage"] == 3
    assert (
        config["train_batch_size"]
        == config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 16
    )


def test_accelerate_takes_it(sharded, tmp_path):
    parser = pytest.importorskip(
        "accelerate.commands.config.config_args", reason="accelerate is not installed"
    )
    emit(sharded, ["accelerate"], tmp_path)
    read = parser.load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert (
        read.num_processes == 16 and read.fsdp_config["fsdp_version"] == 2 and read.mixed_precision == "bf16"
    )
    assert read.parallelism_config["parallelism_config_dp_shard_size"] == sharded.best.plan.dp


def test_accelerate_is_told_of_one_device_in_quotes(tmp_path):
    """The bare word is false to YAML."""
    emit(pl.plan("gpt3-1.3b", "1x1xh200", gbs=8, most=4), ["accelerate"], tmp_path)
    assert "distributed_type: 'NO'\n" in (tmp_path / "accelerate.yaml").read_text()


def test_a_run_is_checked_against_the_plan(sharded, tmp_path):
    emit(sharded, ["slurm"], tmp_path)
    step_s, parts = (
        sharded.best.prediction.step_s,
        {part.name: part.seconds for part in sharded.best.prediction.breakdown},
    )
    log = tmp_path / "log.jsonl"
    forward, update = parts["forward"], parts["optimizer"]
    line = {
        "kind": "step",
        "forward_s": forward,
        "backward_s": 1.25 * step_s - forward - update,
        "update_s": update,
        "step_s": 1.25 * step_s,
    }
    log.write_text("".join(json.dumps({**line, "step": i, "peak_bytes": 5e10}) + "\n" for i in range(1, 11)))
    found = check(log, tmp_path / "plan.json")
    assert (
        found.error == pytest.approx(1 / 1.25 - 1)
        and "the backward pass" in found.parts
        and "50 GB measured" in found.parts
    )
    assert found.predicted_bytes == sharded.best.prediction.peak_bytes
    log.write_text(json.dumps({"kind": "step", "step": 9, "step_s": 2 * step_s}) + "\n")
    assert check(log, tmp_path / "plan.json").error == pytest.approx(-0.5)
    for text, says in (("{}", "is not a plan.json"), ("[", "is not a plan.json")):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(DataError, match=says):
            check(log, tmp_path / "plan.json")
