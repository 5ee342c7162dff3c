"""Messages of plans make sense, a plan without a pipeline has no schedule, and emitted files are whole."""

import ast
import json
import os
import re
import socket
import subprocess
import sys

import pytest

import paceline as pl
from paceline.errors import PlanError
from paceline.plan.emit import EMITTERS, emit
from paceline.plan.request import Request
from paceline.plan.run import plan_transformer
from paceline.spec.plan import Plan, resolve
from paceline.spec.transformer import Transformer

TINY = Transformer(name="tiny", layers=4, hidden=1024, heads=8, ffn=4096, vocab=32_000, seq=1024)


def planned(*fix, where="2xdgx-h100"):
    return plan_transformer(
        TINY, Request(where=(pl.clusters.get(where),), gbs=64, fix=fix, forbid=["offload"], most=8)
    )


def test_none_by_itself_says_what_it_lacks():
    with pytest.raises(PlanError) as error:
        Plan.parse("none")
    assert "did you mean" not in str(
        error.value
    ) and "write sharding=none, recompute=none or offload=none" in str(error.value)
    for word in ("recompute=none", "offload=none", "sharding=none"):
        assert Plan.parse(word)


def test_a_plan_without_a_pipeline_has_no_schedule():
    plan = resolve(Plan.parse("tp=8"), 16, TINY)
    assert plan.schedule == "" and "1f1b" not in str(plan)
    assert "1f1b" not in pl.predict(TINY, plan="tp=8 gbs=16", cluster="2xdgx-h100").plan
    assert "1f1b" not in str(planned("pp=1", "zero1").best.plan)
    assert "1f1b" in str(resolve(Plan.parse("pp=2"), 16, TINY))


def test_what_a_plan_compiles_is_compiled_in_its_files(tmp_path):
    names = ["torchrun", "fsdp2", "accelerate", "torchtitan", "deepspeed"]
    for framework, compiled in (("torch-compile", True), ("torch", False)):
        folder = tmp_path / framework
        emit(planned("fsdp", "tp=1", "pp=1", f"framework={framework}"), names, folder)
        found = {path.name: path.read_text() for path in folder.iterdir()}
        assert ("block.compile()" in found["train.py"], "block.compile()" in found["fsdp2.py"]) == (
            compiled,
            compiled,
        )
        assert (
            "--compile.enable" in found["torchtitan.sh"],
            "dynamo_backend: INDUCTOR" in found["accelerate.yaml"],
        ) == (compiled, compiled)
        assert bool(json.loads(found["plan.json"])["to_do"]) == compiled
    captured = pl.capture("alexnet", batch=8, compile=True)
    emit(pl.plan(captured, "1xdgx-a100", gbs=64, fix=["ddp"]), ["torchrun"], tmp_path / "captured")
    assert "model.compile()" in (tmp_path / "captured/train.py").read_text()


@pytest.mark.parametrize(
    ("names", "runs"),
    [
        (["slurm"], "torchrun.sh"),
        (["slurm", "fsdp2", "accelerate"], "torchrun.sh"),
        (["torchtitan", "slurm"], "torchtitan.sh"),
        (["slurm", "torchtitan", "torchrun"], "torchtitan.sh"),
    ],
)
def test_files_name_only_files_that_are_there(names, runs, tmp_path):
    found = planned("fsdp", "tp=1", "pp=1")
    folder = tmp_path / "run"
    written = {path.name for path in emit(found, names, folder)}
    assert f"srun bash {runs}\n" in (folder / "job.sbatch").read_text()
    check_references(folder, written)


def test_megatron_is_told_where_it_is(tmp_path):
    found = planned("zero1", "framework=megatron-core", "tp=2", "pp=2")
    written = {path.name for path in emit(found, ["megatron", "slurm"], tmp_path)}
    assert (
        written == {"plan.json", "megatron.sh", "job.sbatch"}
        and "srun bash megatron.sh" in (tmp_path / "job.sbatch").read_text()
    )
    check_references(tmp_path, written)


def check_references(folder, written):
    """Every script that a line of a script runs is in the folder, or in one that the user is told to name."""
    for path in folder.iterdir():
        if path.suffix in (".sh", ".sbatch"):
            code = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
            told = re.sub(
                r'"\$\{MEGATRON:\?set MEGATRON to a checkout of Megatron-LM\}/pretrain_gpt.py"', "", code
            )
            assert set(re.findall(r"[\w./-]+\.(?:py|sh)\b", told)) <= written
        elif path.suffix == ".py":
            ast.parse(path.read_text())


def test_every_emitter_is_in_these_tests():
    assert set(EMITTERS) == {
        "torchrun",
        "fsdp2",
        "megatron",
        "deepspeed",
        "accelerate",
        "torchtitan",
        "slurm",
    }


@pytest.mark.parametrize("words", [("mbs=16",), ("mbs=4", "recompute=full")])
def test_the_training_script_runs_as_it_is(words, tmp_path):
    emit(planned(*words, "framework=torch", where="1xa100-sxm-80gb"), ["slurm"], tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ran = subprocess.run(
        [sys.executable, "-W", "error", tmp_path / "train.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, **place, "STEPS": "2", "SEQ": "16", "TORCH_COMPILE_DISABLE": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    assert re.findall(r"^step (\d): loss \d+\.\d+$", ran.stdout, re.MULTILINE) == ["1", "2"]


def test_a_plan_that_training_does_not_run_is_refused(tmp_path):
    for words, says in (
        (("cp=2", "seq=2048"), "--emit slurm: cp=2 is predicted but not run"),
        (("zb-h1",), "--emit slurm: it has no schedule=zb-h1"),
        (("framework=megatron-core",), "--emit slurm: framework=megatron-core is not what runs"),
    ):
        with pytest.raises(PlanError, match=says):
            emit(planned(*words), ["slurm"], tmp_path / "run")
    assert not (tmp_path / "run").exists()
