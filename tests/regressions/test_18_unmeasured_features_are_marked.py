"""A plan that wins by what was never measured says so, beside the best plan that was."""

import dataclasses
import json

import numpy as np
import pytest

import paceline as pl
from paceline import cli
from paceline.bench.validate.sets import SETS
from paceline.plan import evidence
from paceline.plan.general import plan_module
from paceline.plan.request import Request
from paceline.plan.run import plan_transformer
from paceline.plan.space import Limits, Space
from paceline.spec.plan import SCHEDULES, Plan
from paceline.spec.transformer import Transformer
from paceline.spec.vocabulary import ContextExchange, Offload, Recompute, Sharding

MODEL = Transformer(name="small", layers=8, hidden=2048, heads=16, ffn=8192, vocab=32_000, seq=2048)
NODE = pl.clusters.get("1xdgx-a100")
#: words of each field in the order in which a plan has them
WORDS = {
    "sharding": Sharding,
    "schedule": ("", *SCHEDULES),
    "recompute": Recompute,
    "context": ContextExchange,
    "offload": Offload,
}
NEVER = {
    "hsdp",
    "gpipe",
    "looped-bfs",
    "zb-h1",
    "zb-v",
    "dualpipev",
    "all-to-all",
    "offload=optimizer",
    "offload=activations",
}


def with_memory(size):
    return dataclasses.replace(NODE, device=dataclasses.replace(NODE.device, memory_bytes=size))


def test_the_list_is_of_words_that_exist_and_sets_that_exist():
    for table in (evidence.TRANSFORMERS, evidence.MODULES):
        for field, measured in table.items():
            if field != "relax":
                assert set(measured) <= set(WORDS[field])
            assert all(place in SETS or place.endswith((".jsonl", ".csv")) for place in measured.values())
    assert set(evidence.TRANSFORMERS) == set(WORDS)
    found = {
        word
        for field, words in WORDS.items()
        for value in words
        for word in evidence.unmeasured({field: value})
    }
    assert found == NEVER


def test_blocks_say_of_each_plan_what_the_list_says():
    space = Space(MODEL, (NODE,), 16, 2048, Limits.of())
    for block in space.blocks[:: max(1, len(space.blocks) // 20)]:
        said = block.measured.ravel()
        wanted = [not evidence.unmeasured(vars(block.plan(i))) for i in range(len(block))]
        assert np.array_equal(said, wanted)


@pytest.mark.parametrize(
    ("where", "fix", "word", "settled"),
    [
        (NODE, ["pp=4"], "zb-v", False),
        (with_memory(3.2e9), [], "offload=optimizer", True),
        (with_memory(4e9), [], "offload=activations", False),
    ],
)
def test_a_winner_that_was_never_measured_is_marked(where, fix, word, settled):
    found = plan_transformer(MODEL, Request(where=(where,), gbs=32, fix=fix, most=32))
    best, other = found.best, found.measured
    assert best.unmeasured == (word,) == evidence.unmeasured(vars(best.plan))
    assert other is not None and not other.unmeasured and other.value > best.value
    assert found.settled == settled == (best.prediction.step_s_high < other.prediction.step_s)
    against = "more" if settled else "less"
    assert (
        f"no step with {word} was ever measured" in found.doubt
        and f"{against} than the" in found.doubt
        and str(other.plan) in found.doubt
    )
    assert found.by_evaluation <= 32
    told = json.loads(json.dumps(found.to_dict()))
    assert (
        told["doubt"] == found.doubt
        and told["settled"] == settled
        and told["measured"]["plan"] == str(other.plan)
    )
    assert told["best"]["unmeasured"] == [word] and told["top"][0]["unmeasured"] == [word]


def test_the_best_measured_plan_is_the_one_a_search_without_the_others_finds():
    found = plan_transformer(MODEL, Request(where=(NODE,), gbs=32, fix=["pp=4"], most=64))
    alone = plan_transformer(
        MODEL,
        Request(
            where=(NODE,),
            gbs=32,
            fix=["pp=4"],
            most=64,
            forbid=["offload", "hsdp", "gpipe", "looped-bfs", "zb-h1", "zb-v", "dualpipev", "all-to-all"],
        ),
    )
    assert found.measured.value == pytest.approx(alone.best.value, rel=1e-3) and not alone.best.unmeasured
    assert alone.doubt == "" and alone.measured is None and alone.settled


def test_where_nothing_else_fits_that_is_said():
    found = plan_transformer(MODEL, Request(where=(NODE,), gbs=32, fix=["offload=optimizer"], most=8))
    assert (
        found.measured is None and not found.settled and "no plan that fits was found without" in found.doubt
    )


def test_plans_of_captured_modules_too():
    saved, where = pl.capture("alexnet", batch=8), pl.clusters.get("2xp100-node-10gbe")
    found = plan_module(saved, Request(where=(where,), gbs=64))
    for ranked in found.top:
        assert ranked.unmeasured == tuple(
            word for word in [ranked.plan.sharding] if word not in ("none", "ddp")
        )
    fixed = plan_module(saved, Request(where=(where,), gbs=64, fix=["local-sgd"]))
    assert fixed.best.unmeasured == ("local-sgd",) and "local-sgd" in fixed.doubt
    assert plan_module(saved, Request(where=(where,), gbs=64, fix=["dgc"])).doubt == ""
    assert evidence.unmeasured(vars(Plan.parse("terngrad")), evidence.MODULES) == ()


def shown(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", *words])
    assert stop.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_answer_shows_it(capsys, tmp_path):
    page = tmp_path / "plan.html"
    asked = ("--gbs", "32", "--fix", "pp=4", "zb-v", "--forbid", "offload", "--most", "8")
    text = shown(capsys, "gpt3-1.3b", "--cluster", "1xdgx-a100", *asked, "--html", str(page))
    for answer in (text, " ".join(page.read_text().split())):
        assert "(never measured, wins by less than its uncertainty)" in answer and "never measured" in answer
        assert "not measured: no step with zb-v was ever measured" in answer
    study = shown(capsys, "gpt3-1.3b", "--cluster", "1xdgx-a100,1xdgx-h100", *asked)
    assert study.count("no step with zb-v was ever measured") == 2 and study.count("(never measured)") == 2


def test_the_best_measured_plan_is_shown_beside_it(capsys):
    text = shown(
        capsys,
        "gpt3-1.3b",
        "--cluster",
        "1xdgx-a100",
        "--gbs",
        "32",
        "--fix",
        "pp=4",
        "--forbid",
        "offload",
        "interleaved",
    )
    assert "the best of measured features" in text and "1f1b" in text
