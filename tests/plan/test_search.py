"""The search finds the best plan there is, or says by how much it may be beaten."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from paceline import cli
from paceline.catalog import clusters
from paceline.errors import PlanError, SpecError
from paceline.plan.request import Request, goal
from paceline.plan.run import plan_transformer
from paceline.plan.search import search
from paceline.plan.space import Limits, Space
from paceline.predict.distributed import TransformerStep
from paceline.predict.memory import stage_memory
from paceline.predict.simulated import predict_step
from paceline.spec.transformer import Transformer


def exhaust(space):
    """The best time of a space, every plan of it simulated."""
    best = float("inf")
    for block in space.blocks:
        for i in range(len(block)):
            step = TransformerStep.of(space.model, block.cluster, block.plan(i), None, None)
            if all(stage_memory(step, stage, n).fits for n, stage in enumerate(step.parts.stages)):
                best = min(best, predict_step(step).step_s)
    return best


@settings(max_examples=3, deadline=None)
@given(
    layers=st.sampled_from([2, 4]),
    heads=st.sampled_from([4, 8]),
    vocab=st.sampled_from([1000, 50_000]),
    batch=st.sampled_from([4, 8]),
    name=st.sampled_from(["1x4xa100-sxm-80gb", "2x2xv100-sxm-16gb@25Gb/s/node"]),
    most=st.sampled_from([8, 40]),
)
def test_nothing_beats_the_certificate(layers, heads, vocab, batch, name, most):
    model = Transformer(
        name="random", layers=layers, hidden=128 * heads, heads=heads, ffn=512 * heads, vocab=vocab, seq=1024
    )
    limits = Limits.of(
        forbid=["offload", "recompute=selective", "bucket=100MB"], fix=["reshard", "prefetch=1"]
    )
    space = Space(model, (clusters.get(name),), batch, 1024, limits)
    found = search(space, goal("time", space.clusters), most=most, processes=1)
    best = exhaust(space)
    assert found.tried[0].value * (1 - found.gap) <= best * (1 + 1e-9)
    assert found.tried[0].value >= best * (1 - 1e-9)
    assert found.by_memory + found.by_bound + found.undecided + len(found.tried) == found.space == len(space)


def test_processes_change_nothing(tiny, nodes):
    space = Space(tiny, (nodes,), 32, 1024, Limits.of())
    one, two = (search(space, goal("time", (nodes,)), most=24, processes=n) for n in (1, 2))
    assert [t.plan for t in one.tried] == [t.plan for t in two.tried]
    assert (one.gap, one.by_memory, one.by_bound, one.undecided) == (
        two.gap,
        two.by_memory,
        two.by_bound,
        two.undecided,
    )


def test_the_answer_is_predicted_again_from_its_words(tiny, node):
    found = plan_transformer(tiny, Request(where=(node,), gbs=16, forbid=["hsdp", "zero2"], most=16))
    again = pl.predict(tiny, plan=str(found.best.plan), cluster=node)
    assert again.step_s == pytest.approx(found.best.prediction.step_s) and found.best.prediction.fit.fits
    assert all(ranked.lost for ranked in found.top[1:])
    assert {r.what for r in found.ranges} >= {"global batch", "memory of a device"}


@pytest.mark.parametrize("gbs", [10**9, 2**40])
def test_a_batch_as_large_as_any_is_planned(tiny, node, gbs):
    """Larger ones are tried, too, to see where the winner stays: none is larger than the largest."""
    fix = ["zero1", "tp=1", "pp=1"]
    found = plan_transformer(tiny, Request(where=(node,), gbs=gbs, fix=fix, forbid=["offload"], most=4))
    assert found.best.plan.gbs == gbs and "global batch" in {r.what for r in found.ranges}


def test_interrupted_the_best_so_far_stands(tiny, node):
    def stop(what, done, total, best):
        if what == "simulating" and done >= 8:
            raise KeyboardInterrupt

    found = plan_transformer(tiny, Request(where=(node,), gbs=16, forbid=["zero2"], progress=stop, most=64))
    assert found.interrupted and found.top and found.gap_pct >= 0


#: what the tests below do not need: their spaces are smaller without
LESS = ("offload", "cp", "hsdp", "zero2", "recompute=selective")


def test_objectives_and_deadline(tiny):
    where = [clusters.get(f"{n}xdgx-h100") for n in (1, 2)]
    fast, cheap = (
        plan_transformer(tiny, Request(where=where, gbs=64, objective=name, forbid=LESS, most=16))
        for name in ("time", "cost")
    )
    assert fast.best.prediction.devices == 16 and cheap.best.prediction.devices == 8
    assert cheap.best.cost < fast.best.cost
    steps = 1000
    hurried = plan_transformer(
        tiny,
        Request(
            where=where,
            gbs=64,
            objective="cost",
            tokens=steps * 64 * 1024,
            forbid=LESS,
            most=16,
            deadline_s=0.9 * steps * cheap.best.prediction.step_s,
        ),
    )
    assert hurried.best.prediction.devices == 16
    with pytest.raises(PlanError, match="meets the deadline"):
        plan_transformer(tiny, Request(where=where, gbs=64, tokens=1e12, deadline_s=1.0, forbid=LESS, most=8))
    with pytest.raises(SpecError, match="needs --tokens"):
        plan_transformer(tiny, Request(where=where, gbs=64, deadline_s=1.0))
    with pytest.raises(SpecError, match="did you mean 'cost'"):
        plan_transformer(tiny, Request(where=where, gbs=64, objective="costs"))


def test_no_plan_fits_says_what_would(node):
    model = Transformer(name="huge", layers=96, hidden=12_288, heads=96, ffn=49_152, vocab=50_257, seq=2048)
    small = dataclasses.replace(node, device=dataclasses.replace(node.device, memory_bytes=20e9))
    with pytest.raises(
        PlanError, match=r"the leanest \(.*\) needs .* of the .* of a device; it fits on \d+ devices"
    ):
        plan_transformer(model, Request(where=(small,), gbs=64))


def test_pareto_front(tiny):
    where = [clusters.get(f"{n}xdgx-h100") for n in (1, 2)]
    found = plan_transformer(
        tiny, Request(where=where, gbs=64, pareto=["time", "memory"], forbid=LESS, most=24)
    )
    points = [(r.prediction.step_s, r.prediction.peak_bytes) for r in found.pareto]
    assert points == sorted(points) and [m for _, m in points] == sorted((m for _, m in points), reverse=True)


def run(*words):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 0


def test_command_line(tmp_path, capsys):
    page = tmp_path / "plan.html"
    run(
        "plan",
        "gpt3-1.3b",
        "--cluster",
        "1xdgx-a100",
        "--gbs",
        "32",
        "--fix",
        "tp=1",
        "pp=1",
        "--forbid",
        "offload",
        "--json",
        "--html",
        str(page),
        "--pareto",
        "time,memory",
    )
    answer = json.loads(capsys.readouterr().out)
    assert answer["space"] > 0 and answer["gap_pct"] >= 0 and answer["elapsed_s"] > 0
    assert (
        answer["excluded"].keys() == {"memory", "bound", "evaluation", "undecided"}
        and sum(answer["excluded"].values()) == answer["space"]
    )
    assert {"step_s", "peak_bytes", "plan"} <= answer["best"].keys() and answer["top"][0]["plan"] == answer[
        "best"
    ]["plan"]
    assert "certificate" in page.read_text()
    run(
        "plan",
        "gpt3-1.3b",
        "--cluster",
        "1xdgx-a100",
        "--gbs",
        "32",
        "--fix",
        "tp=1 pp=1",
        "--forbid",
        "offload,cp",
    )
    shown = capsys.readouterr().out
    assert "best plan" in shown and "no plan of the" in shown and "lost by" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt3-1.3b"], "give a cluster, or a number of GPUs"),
        (["gpt3-1.3b", "--gpus", "8"], "give a cluster, or a number of GPUs"),
        (
            ["gpt3-1.3b", "--gpus", "many", "--device", "h100-sxm"],
            "takes a number or a range such as 64..4096",
        ),
        (["gpt3-1.3b", "--cluster", "1xdgx-a100", "--gbs", "7", "--fix", "dp=8"], "gbs 7"),
        (["gpt3-1.3b", "--cluster", "1xdgx-a100", "--pareto", "tim"], "did you mean 'time'"),
        (
            [
                "gpt3-1.3b",
                "--cluster",
                "1xdgx-a100",
                "--emit",
                "megatrn",
                "--gbs",
                "32",
                "--fix",
                "tp=1",
                "pp=1",
                "fsdp",
            ],
            "did you mean 'megatron'",
        ),
    ],
)
def test_bad_requests(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", *words])
    assert stop.value.code == 2 and message in capsys.readouterr().err
