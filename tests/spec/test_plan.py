"""Plans: what a user writes, what is filled in, and what is refused with a way out."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.catalog import clusters, transformers
from paceline.errors import PlanError, SpecError
from paceline.predict.simulated import predict
from paceline.spec.plan import SCHEDULES, Plan, divisors, problems, resolve, stage_layers
from paceline.spec.vocabulary import Sharding

LLAMA = transformers.get("llama3-70b")


def test_the_words_of_the_documentation():
    plan = Plan.parse("dp=fsdp tp=8 mbs=1 gbs=1024 seq=8192")
    assert (plan.sharding, plan.tp, plan.mbs, plan.gbs, plan.seq, plan.dp) == ("fsdp", 8, 1, 1024, 8192, 0)
    plan = Plan.parse("tp=8 pp=8 vpp=3 mbs=1 gbs=64 recompute=selective sp")
    assert (plan.pp, plan.vpp, plan.recompute, plan.sp) == (8, 3, "selective", True)
    assert Plan.parse("dp=ddp bucket=25MB").bucket_bytes == 25e6
    assert Plan.parse("fsdp") == Plan.parse("dp=zero3") == Plan.parse("zero=3")
    assert Plan.parse("dp=8:zero1 no-reshard") == Plan(dp=8, sharding="zero1", reshard=False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tp=x", "tp must be a whole number of 1 or more, got 'x'"),
        ("tp=0", "whole number"),
        ("dp=zeroo", "expected one of"),
        ("recompute=half", "expected one of none, selective, full"),
        ("bucket=25XB", "unknown unit"),
        ("tpp=8", "did you mean 'tp'"),
        ("tp=2 tp=4", "gives tp twice"),
        ("sharded", "unknown 'sharded'"),
    ],
)
def test_a_mistake_is_one_line_that_helps(text, says):
    with pytest.raises(PlanError) as error:
        Plan.parse(text)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_what_is_left_out_is_filled_in():
    plan = resolve(Plan.parse("tp=8 pp=4 zero1"), 256, LLAMA)
    assert (plan.dp, plan.mbs, plan.gbs, plan.seq, plan.schedule, plan.ranks, plan.micro_batches) == (
        8,
        1,
        8,
        LLAMA.seq,
        "1f1b",
        256,
        1,
    )
    assert resolve(Plan.parse("pp=2 vpp=2 gbs=512"), 256, LLAMA).schedule == "interleaved"
    assert resolve(Plan.parse("tp=8"), 8, LLAMA).sharding == "none"
    assert resolve(Plan.parse("tp=8 1f1b"), 64, LLAMA).schedule == ""  # without a pipeline
    assert (
        resolve(Plan.parse("hsdp"), 96, LLAMA).shard == 8
        and resolve(Plan.parse("hsdp"), 100, LLAMA).shard == 4
    )
    assert resolve(Plan.parse("pp=8 vpp=2 zb-v gbs=64"), 64, LLAMA) == resolve(
        Plan.parse("pp=8 zb-v gbs=64"), 64, LLAMA
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tp=8 pp=7", "dp 4 x tp 8 x pp 7 x cp 1 = 224 ranks, but the cluster has 256 devices"),
        ("tp=3", "tp 3 does not divide 64 heads"),
        ("tp=8 gbs=100", "gbs 100 is not a multiple of dp 32 x mbs 1 = 32"),
        ("tp=8 pp=8 vpp=4 gbs=16", "needs at least pp 8 micro-batches, but gbs 16 / (dp 4 x mbs 1) = 4"),
        ("pp=128", "128 chunks for 80 layers"),
        ("ep=8", "has no experts"),
        ("vpp=2", "without a pipeline"),
        ("cp=3 dp=1 seq=8192", "cp 3 does not divide seq 8192"),
        ("pp=4 vpp=2 gbs=512 1f1b", "one chunk per stage"),
        ("pp=8 vpp=3 gbs=512 dualpipev", "dualpipev has two chunks per stage, but vpp is 3"),
        (
            "tp=8 pp=8 gbs=60 dualpipev",
            "dualpipev needs at least 2 x pp 8 = 16 micro-batches, but gbs 60 / (dp 4 x mbs 1) = 15",
        ),
        (
            "tp=8 pp=8 vpp=2 gbs=132",
            (
                "interleaved runs micro-batches in 33 // pp 8 = 4 equal rounds, but gbs 132 / (dp 4 x mbs 1)"
                " = 33"
            ),
        ),
        ("tp=8 pp=8 gbs=16 framework=torch", "1f1b needs at least pp 8 micro-batches"),
        ("fsdp shard=4", "shard 4 is of hsdp, but the sharding is fsdp"),
        ("hsdp shard=3", "hsdp shard 3 does not divide dp 256"),
        ("pp=64 gbs=256 zb-v", "pp 64 x 2 of zb-v = 128 chunks for 80 layers"),
        ("tp=8 cp=16 all-to-all", "cp 16 does not divide the 64 heads / tp 8 = 8 of a rank"),
    ],
)
def test_what_cannot_run_is_refused_with_every_factor(text, says):
    with pytest.raises(PlanError) as error:
        resolve(Plan.parse(text), 256, LLAMA)
    assert (
        says in str(error.value)
        and "\n" not in str(error.value)
        and "; nearest feasible plan: " in str(error.value)
    )


MIXTRAL = transformers.get("mixtral-8x7b")
SMALL = st.sampled_from([1, 1, 2, 3, 4, 5, 8, 12, 16])
PLANS = st.builds(
    Plan,
    dp=st.integers(0, 12),
    tp=SMALL,
    pp=SMALL,
    cp=st.sampled_from([1, 1, 1, 2, 3, 8]),
    ep=st.sampled_from([1, 1, 2, 3, 8, 16]),
    vpp=st.sampled_from([1, 1, 2, 3, 7]),
    mbs=st.integers(0, 5),
    gbs=st.integers(0, 300),
    seq=st.sampled_from([0, 2048, 1000]),
    sharding=st.sampled_from(Sharding),
    shard=st.sampled_from([0, 0, 2, 3, 8]),
    sp=st.booleans(),
    schedule=st.sampled_from(["", *SCHEDULES]),
    context=st.sampled_from(["ring", "all-to-all"]),
    framework=st.sampled_from(["", "torch", "megatron-core"]),
)


@settings(max_examples=300)
@given(PLANS, st.sampled_from([1, 12, 64, 96]), st.sampled_from([LLAMA, MIXTRAL]))
def test_the_suggestion_can_run(plan, devices, model):
    """Every refusal names a plan, and that plan, read as it is written, is accepted as it stands."""
    try:
        accepted = resolve(plan, devices, model)
    except PlanError as error:
        accepted = resolve(Plan.parse(str(error).partition("; nearest feasible plan: ")[2]), devices, model)
    assert accepted.ranks == devices and not list(problems(accepted, devices, model))
    assert resolve(Plan.parse(str(accepted)), devices, model) == accepted


@settings(max_examples=100)
@given(PLANS)
@example(Plan(schedule="dualpipev"))
def test_what_is_accepted_runs(plan):
    """No plan that is accepted leaves the ranks of its pipeline waiting for one another."""
    small = replace(LLAMA, layers=8)
    try:
        accepted = resolve(plan, 16, small)
    except PlanError as error:
        accepted = resolve(Plan.parse(str(error).partition("; nearest feasible plan: ")[2]), 16, small)
    accepted = replace(accepted, seq=64 * accepted.cp * accepted.tp)
    assert predict(small, clusters.get("2xdgx-h100"), accepted).step_s > 0


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 4))
def test_stages_hold_all_layers(layers, pp, vpp):
    if layers >= pp * vpp:
        stages = stage_layers(layers, pp, vpp)
        assert (
            sum(stages) == layers
            and len(stages) == pp
            and max(stages) - min(stages) <= 1
            and min(stages) >= 0
        )


def test_a_written_plan_reads_as_itself():
    for sharding in tuple(Sharding)[1:]:
        plan = resolve(Plan.parse(f"{sharding} tp=4 pp=2 gbs=256 mbs=2 sp recompute=full"), 64, LLAMA)
        again = resolve(Plan.parse(str(plan)), 64, LLAMA)
        assert again == plan


def test_a_plan_in_a_file(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('tp = 8\npp = 8\nsharding = "zero1"\nbucket = "100 MB"\nsp = true\nreshard = false\n')
    assert Plan.parse(str(path)) == Plan.parse("tp=8 pp=8 zero1 bucket=100MB sp no-reshard")
    for text, message in (
        ("tp = [8]", "tp must be a number"),
        ("tp = ", "Invalid value"),
        ("tq = 8", "unknown .tq."),
    ):
        path.write_text(text)
        with pytest.raises(PlanError, match=message):
            Plan.parse(str(path))
    with pytest.raises(SpecError, match="cannot read plan file"):
        Plan.parse(str(tmp_path / "none.toml"))


def test_divisors_are_all_and_are_found_at_once():
    for n in range(1, 150):
        assert divisors(n) == tuple(i for i in range(1, n + 1) if n % i == 0)
    assert divisors(2**40) == tuple(2**i for i in range(41))
