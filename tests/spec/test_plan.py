"""Plans: what a user writes, what is filled in, and what is refused with a way out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.catalog import transformers
from paceline.errors import PlanError
from paceline.spec.plan import SHARDINGS, Plan, resolve, stage_layers

LLAMA = transformers.get("llama3-70b")


def test_the_words_of_the_documentation():
    plan = Plan.parse("dp=fsdp tp=8 mbs=1 gbs=1024 seq=8192")
    assert (plan.sharding, plan.tp, plan.mbs, plan.gbs, plan.seq, plan.dp) == ("fsdp", 8, 1, 1024, 8192, 0)
    plan = Plan.parse("tp=8 pp=8 vpp=3 mbs=1 gbs=64 recompute=selective sp")
    assert (plan.pp, plan.vpp, plan.recompute, plan.sp) == (8, 3, "selective", True)
    assert Plan.parse("dp=ddp bucket=25MB").bucket_bytes == 25e6
    assert Plan.parse("fsdp") == Plan.parse("dp=zero3") == Plan.parse("zero=3")
    assert Plan.parse("dp=8:zero1 no-reshard") == Plan(dp=8, sharding="zero1", reshard=False)


@pytest.mark.parametrize(("text", "says"), [
    ("tp=x", "tp must be a whole number of 1 or more, got 'x'"), ("tp=0", "whole number"), ("dp=zeroo", "expected one of"),
    ("recompute=half", "expected one of none, selective, full"), ("bucket=25XB", "unknown unit"), ("tpp=8", "did you mean 'tp'"),
    ("tp=2 tp=4", "gives tp twice"), ("sharded", "unknown 'sharded'"),
])
def test_a_mistake_is_one_line_that_helps(text, says):
    with pytest.raises(PlanError) as error:
        Plan.parse(text)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_what_is_left_out_is_filled_in():
    plan = resolve(Plan.parse("tp=8 pp=4 zero1"), 256, LLAMA)
    assert (plan.dp, plan.mbs, plan.gbs, plan.seq, plan.schedule, plan.ranks, plan.micro_batches) == (8, 1, 8, LLAMA.seq, "1f1b", 256, 1)
    assert resolve(Plan.parse("pp=2 vpp=2 gbs=512"), 256, LLAMA).schedule == "interleaved"
    assert resolve(Plan.parse("tp=8"), 8, LLAMA).sharding == "none"


@pytest.mark.parametrize(("text", "says"), [
    ("tp=8 pp=7", "dp 4 x tp 8 x pp 7 x cp 1 = 224 ranks, but the cluster has 256 devices"), ("tp=3", "tp 3 does not divide 64 heads"),
    ("tp=8 gbs=100", "gbs 100 is not a multiple of dp 32 x mbs 1 = 32"),
    ("tp=8 pp=8 vpp=4 gbs=16", "needs at least pp 8 micro-batches, but gbs 16 / (dp 4 x mbs 1) = 4"), ("pp=128", "128 chunks for 80 layers"),
    ("ep=8", "has no experts"), ("vpp=2", "without a pipeline"), ("cp=3 dp=1 seq=8192", "cp 3 does not divide seq 8192"),
    ("pp=4 vpp=2 gbs=512 1f1b", "one chunk per stage"),
])
def test_what_cannot_run_is_refused_with_every_factor(text, says):
    with pytest.raises(PlanError) as error:
        resolve(Plan.parse(text), 256, LLAMA)
    assert says in str(error.value) and "\n" not in str(error.value)


@given(tp=st.integers(1, 12), pp=st.integers(1, 12), dp=st.integers(0, 12), gbs=st.integers(1, 300), mbs=st.integers(1, 5), vpp=st.integers(1, 3))
def test_the_suggestion_can_run(tp, pp, dp, gbs, mbs, vpp):
    plan = Plan(tp=tp, pp=pp, dp=dp, gbs=gbs, mbs=mbs, vpp=vpp)
    try:
        resolve(plan, 64, LLAMA)
    except PlanError as error:
        if "nearest feasible plan: " in str(error):
            text = str(error).partition("nearest feasible plan: ")[2]
            assert resolve(Plan.parse(text), 64, LLAMA).ranks == 64


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 4))
def test_stages_hold_all_layers(layers, pp, vpp):
    if layers >= pp * vpp:
        stages = stage_layers(layers, pp, vpp)
        assert sum(stages) == layers and len(stages) == pp and max(stages) - min(stages) <= 1 and min(stages) >= 0


def test_a_written_plan_reads_as_itself():
    for sharding in SHARDINGS[1:]:
        plan = resolve(Plan.parse(f"{sharding} tp=4 pp=2 gbs=256 mbs=2 sp recompute=full"), 64, LLAMA)
        again = resolve(Plan.parse(str(plan)), 64, LLAMA)
        assert again == plan
