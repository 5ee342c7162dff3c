"""Words that fix a plan are honoured or refused, and a study takes every flag of `paceline plan`."""

import json
from dataclasses import fields

import numpy as np
import pytest

import paceline as pl
from paceline import cli
from paceline.errors import PacelineError, PlanError
from paceline.plan import general, space
from paceline.plan.bound import bounds
from paceline.plan.memory import peaks
from paceline.plan.request import Request
from paceline.plan.run import plan_transformer
from paceline.plan.space import Limits, Space
from paceline.plan.table import Table
from paceline.predict.distributed import TransformerStep
from paceline.predict.memory import stage_memory
from paceline.predict.simulated import predict_step
from paceline.spec.plan import SHARED, SPREAD, Plan
from paceline.spec.synchronisation import Relaxation
from paceline.spec.transformer import Transformer

TINY = Transformer(
    name="tiny", layers=4, hidden=1024, heads=8, ffn=4096, vocab=32_000, seq=1024, experts=4, top_k=2
)
CLUSTER = pl.clusters.get("2xdgx-a100")
#: words that set each field to an unusual value; a new field that is no degree has to be added here
UNUSUAL = {
    **{name: f"{name}=2" for name in (*SPREAD, *SHARED)},
    "dp": "dp=4",
    "vpp": "pp=2 vpp=2",
    "mbs": "mbs=2",
    "gbs": "gbs=32",
    "seq": "seq=2048",
    "sharding": "zero1",
    "shard": "hsdp shard=2",
    "sp": "sp",
    "schedule": "zb-v",
    "recompute": "recompute=full",
    "precision": "fp16",
    "context": "cp=2 all-to-all",
    "bucket_bytes": "bucket=50MB",
    "prefetch": "prefetch=3",
    "reshard": "no-reshard",
    "offload": "offload=optimizer",
    "adapters": "adapters",
    "framework": "framework=nemo",
    "relax": "terngrad",
}


@pytest.fixture(scope="module")
def saved():
    return pl.capture("alexnet", batch=8, precision="fp32")


def test_every_field_is_searched_or_refused():
    names = {field.name for field in fields(Plan)}
    assert names == set(UNUSUAL)
    searched = {field.name for part in space.PARTS for field in fields(part)}
    assert searched | {*space.REFUSED} == names and searched.isdisjoint(space.REFUSED)
    assert names >= general.REFUSED.keys()


@pytest.mark.parametrize("name", UNUSUAL)
def test_plans_of_a_transformer_have_what_was_fixed(name):
    words = UNUSUAL[name]
    try:
        limits = Limits.of([words])
    except PlanError as error:
        assert name in space.REFUSED and words in str(error) and "paceline compare" in str(error)
        return
    found = Space(TINY, (CLUSTER,), limits.fixed.get("gbs", 16), limits.fixed.get("seq", 1024), limits)
    plans = [block.plan(i) for block in found.blocks for i in range(len(block))]
    assert plans and {getattr(plan, name) for plan in plans} == {getattr(Plan.parse(words), name)}


#: words for a captured module, where those above do not go with it
CAPTURED = {
    "mbs": "mbs=8",
    "gbs": "gbs=64",
    "dp": "dp=8",
    "framework": "framework=horovod",
    "schedule": "pp=2 gpipe",
    "vpp": "pp=2 vpp=2 mbs=8 interleaved",
}
#: fields that the capture of a saved workload has settled
SETTLED = ("seq", "precision", "recompute")


@pytest.mark.parametrize("name", UNUSUAL)
def test_plans_of_a_captured_module_have_what_was_fixed(name, saved):
    where, words = pl.clusters.get("2xp100-node-10gbe"), CAPTURED.get(name, UNUSUAL[name])
    asked = {"fix": [words], "top": 1000, "gbs": None if name == "gbs" else 64}
    if name in general.REFUSED or name in SETTLED:
        with pytest.raises(PlanError, match=f"(?s)--fix|by what is fixed.*{name}"):
            general.plan_module(saved, Request(where=(where,), **asked))
        return
    found = general.plan_module(saved, Request(where=(where,), **asked))
    assert {getattr(ranked.plan, name) for ranked in found.top} == {getattr(Plan.parse(words), name)}


def test_usual_values_are_honoured_too():
    for words, name, value in (
        ("no-sp", "sp", False),
        ("zero=0", "sharding", "ddp"),
        ("bucket=25MB", "bucket_bytes", 25e6),
    ):
        assert Limits.of([words]).fixed == {name: value}


def test_contradictions_are_refused(saved):
    with pytest.raises(PlanError, match="gbs is given twice: --gbs 16 and --fix gbs=32"):
        plan_transformer(TINY, Request(where=(CLUSTER,), gbs=16, fix=["gbs=32"]))
    with pytest.raises(PlanError, match="seq is given twice: --seq 1024 and --fix seq=2048"):
        plan_transformer(TINY, Request(where=(CLUSTER,), gbs=16, seq=1024, fix=["seq=2048"]))
    with pytest.raises(PlanError, match="compress is both allowed and forbidden"):
        general.plan_module(saved, Request(where=(CLUSTER,), allow=["compress"], forbid=["compress"]))
    with pytest.raises(PlanError, match="ratio=0.1 does not say of what"):
        general.plan_module(saved, Request(where=(CLUSTER,), fix=["ratio=0.1"]))


def test_a_fixed_batch_and_sequence_are_those_of_the_answer():
    found = plan_transformer(
        TINY,
        Request(
            where=(CLUSTER,), fix=["gbs=32", "seq=2048", "zero1", "tp=1", "pp=1"], forbid=["offload"], most=8
        ),
    )
    assert (found.gbs, found.seq, found.best.plan.gbs, found.best.plan.seq) == (32, 2048, 32, 2048)


def test_what_is_fixed_is_marked_where_it_changes_training(saved):
    found = general.plan_module(
        saved, Request(where=(pl.clusters.get("2xp100-node-10gbe"),), gbs=64, fix=["dgc", "ratio=0.01"])
    )
    assert found.best.plan.relax == Relaxation(compress="dgc", ratio=0.01) and found.best.lossy == "compress"


def test_bounds_and_memory_hold_with_adapters():
    rng = np.random.default_rng(0)
    found, table = Space(TINY, (CLUSTER,), 16, 1024, Limits.of(["adapters"])), Table(TINY, CLUSTER)
    for _ in range(12):
        block = found.blocks[rng.integers(len(found.blocks))]
        index = int(rng.integers(len(block)))
        step = TransformerStep.of(TINY, CLUSTER, block.plan(index), None, None)
        assert step.plan.adapters
        assert bounds(block, table).ravel()[index] <= predict_step(step).step_s * (1 + 1e-9)
        memory = max(stage_memory(step, stage, i).reserved_bytes for i, stage in enumerate(step.parts.stages))
        assert peaks(block, table).ravel()[index] == pytest.approx(memory, abs=8)


def run(capsys, *words, code=0):
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", *words])
    shown = capsys.readouterr()
    assert stop.value.code == code, shown.err
    return shown.out if code == 0 else shown.err


NARROW = ("--fix", "fsdp", "tp=1", "pp=1", "cp=1", "--forbid", "offload")


def test_a_study_shows_the_whole_job_and_the_front(capsys):
    shown = run(
        capsys,
        "gpt3-1.3b",
        "--cluster",
        "1xdgx-a100,1xdgx-h100",
        "--gbs",
        "16",
        "--tokens",
        "1B",
        "--deadline",
        "30d",
        "--objective",
        "cost",
        "--top",
        "2",
        "--pareto",
        "time,memory",
        *NARROW,
    )
    assert (
        "whole job" in shown
        and "USD" in shown
        and shown.count("no other plan is better in every respect") == 2
    )
    assert sum(line.startswith("gpt3-1.3b  dgx-") for line in shown.splitlines()) == 4


def test_flags_beside_a_study_count_as_written_in_it(tmp_path, capsys):
    path = tmp_path / "study.toml"
    path.write_text('models = ["gpt3-1.3b"]\ngbs = 16\n')
    asked = ("--cluster", "1xdgx-a100", "--tokens", "1B", *NARROW, "--most", "4", "--seq", "1024")
    answer = json.loads(run(capsys, str(path), *asked, "--json"))[0]
    assert answer["question"] == {
        "model": "gpt3-1.3b",
        "cluster": "1xdgx-a100",
        "gbs": 16,
        "seq": 1024,
        "fix": ["fsdp", "tp=1", "pp=1", "cp=1"],
        "forbid": ["offload"],
        "most": 4,
        "tokens": 1e9,
    }
    assert answer["best"]["job_s"] == pytest.approx(1e9 / (16 * 1024) * answer["best"]["step_s"])
    assert "no plan for gpt3-1.3b meets the deadline" in run(
        capsys, str(path), *asked, "--deadline", "1s", code=2
    )
    assert "gbs is given twice: by" in run(capsys, str(path), *asked, "--gbs", "32", code=2)
    assert "--output is the folder of --emit" in run(capsys, str(path), *asked, "-o", str(tmp_path), code=2)


def test_top_and_most_are_whole_numbers_above_zero():
    for name in ("top", "most"):
        with pytest.raises(PacelineError, match=f"{name} must be a whole number of 1 or more, got 0"):
            pl.plan(TINY, CLUSTER, gbs=16, **{name: 0})
