"""What is predicted is what is run: every field of a plan is honoured or refused by name, and where a plan
does not say, the running strategy has the settings that were predicted.
"""

import os
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.catalog import clusters
from paceline.errors import PlanError
from paceline.spec import defaults, trained
from paceline.spec.plan import SHARED, SPREAD, Plan, resolve
from paceline.spec.synchronisation import PLAIN, Relaxation
from paceline.spec.vocabulary import ALIASES, Mode, Sharding
from paceline.sync import rarely
from paceline.sync.servers import servers
from paceline.train.launch import run

#: ranks import their functions from here, and the package that is tested
HERE = {"PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parent, Path(pl.__file__).parents[1])))}

#: field -> plans that set it, what is looked at on two running ranks, and what is seen there
HONOURED = {
    "dp": [("ddp dp=2 fp32", "strategy", "ddp")],
    "tp": [("tp=2 fp32", "split", 16)],
    "pp": [("pp=2 mbs=2 gbs=8 fp32", "stages", 1)],
    "vpp": [
        ("pp=2 vpp=2 interleaved mbs=2 gbs=8 fp32", "stages", 2),
        ("pp=2 vpp=2 zb-v mbs=2 gbs=8 fp32", "stages", 2),
    ],
    "schedule": [
        ("pp=2 gpipe mbs=2 gbs=8 fp32", "schedule", "ScheduleGPipe"),
        ("pp=2 1f1b mbs=2 gbs=8 fp32", "schedule", "Schedule1F1B"),
    ],
    "mbs": [
        ("ddp mbs=4 fp32", "first_step", "the plan says mbs=4, samples of a pass, but the model was given 8"),
        ("pp=2 mbs=1 gbs=8 fp32", "micro_batches", 8),
    ],
    "gbs": [
        ("ddp mbs=8 gbs=32 fp32", "first_step", "a step has 2 passes on each rank, but the first one had 1"),
        ("pp=2 mbs=2 gbs=16 fp32", "micro_batches", 8),
    ],
    "seq": [("ddp seq=8 fp32", "first_step", "the plan says seq=8, tokens of a sample, but the model was")],
    "sharding": [
        ("zero1 fp32", "strategy", "overlap"),
        ("fsdp fp32", "mesh", [2]),
        ("hsdp shard=1 fp32", "mesh", [2, 1]),
    ],
    "shard": [("hsdp shard=2 fp32", "mesh", [1, 2])],
    "recompute": [("ddp recompute=full fp32", "calls", 2), ("ddp fp32", "calls", 1)],
    "precision": [
        ("ddp bf16", "logits", "torch.bfloat16"),
        ("ddp fp16", "logits", "torch.float16"),
        ("ddp tf32", "matmul", "high"),
        ("ddp fp32", "logits", "torch.float32"),
    ],
    "bucket_bytes": [
        ("ddp bucket=1MB fp32", "ddp_bucket", 1_000_000),
        ("zero1 bucket=1MB fp32", "pieces", [1_000_000, 1_000_000]),
        ("terngrad bucket=1MB fp32", "bucket_bytes", 1e6),
    ],
    "prefetch": [("fsdp prefetch=3 fp32", "prefetch", 3)],
    "reshard": [("fsdp no-reshard fp32", "reshard", False), ("fsdp fp32", "reshard", True)],
    "offload": [("ddp offload=activations fp32", "offloaded", 1)],
    "framework": [("ddp framework=torch-compile fp32", "compiled", True), ("ddp fp32", "compiled", False)],
    "relax": [("terngrad fp32", "strategy", "averaging")],
    "compress": [
        ("powersgd fp32", "scheme", {"name": "powersgd"}),
        ("ps-sync compress=bf16", "codec", "Rounded"),
    ],
    "ratio": [("dgc ratio=0.05 fp32", "scheme", {"ratio": 0.05})],
    "rank": [("powersgd rank=3 fp32", "scheme", {"rank": 3})],
    "average": [("priority fp32", "strategy", "priority")],
    "mode": [("diloco fp32", "strategy", "diloco"), ("local fp32", "strategy", "local-sgd")],
    "period": [
        ("local-sgd period=3 fp32", "period", 3),
        ("diloco period=7 fp32", "period", 7),
        ("easgd period=6 fp32", "period", 6),
        ("gossip period=2 fp32", "period", 2),
    ],
    "island": [("local-sgd island=2 fp32", "island", [2, 2])],
    "servers": [("ps-async servers=2 fp32", "servers", 2)],
    "staleness": [("ps-bounded staleness=3 fp32", "staleness", ["bounded", 3])],
    "backup": [("ps-backup backup=1 fp32", "backup", ["backup", 1])],
}
#: degrees that training does not run
DEGREES = [name for name in (*SPREAD, *SHARED) if trained.TRAINED[name] == "refused"]
#: field -> values that are refused, and what is said
REFUSED = {
    "dp": [("ddp dp=3", "the plan's dp 3 x pp 1 x tp 1 = 3 is not the 2 ranks that were started")],
    "pp": [("pp=2", "a plan with pp=2 has no single model to return; run it with paceline.train.Pipeline")],
    **{name: [(f"{name}=2", f"{name}=2 is predicted but not run")] for name in DEGREES},
    "vpp": [("vpp=2", "vpp=2 is of a pipeline, but pp is 1")],
    "schedule": [("1f1b", "schedule=1f1b is of a pipeline, but pp is 1")],
    "gbs": [("ddp mbs=3 gbs=8", "gbs 8 is not a multiple of dp 2 x mbs 3")],
    "shard": [("fsdp shard=2", "shard 2 is of hsdp"), ("hsdp shard=4", "hsdp shard 4 does not divide dp 2")],
    "sp": [("tp=2 sp", "sp is predicted but not run")],
    "precision": [
        ("ddp fp8", "precision fp8 is not run"),
        ("fsdp fp16", "with sharded parameters is not run"),
    ],
    "context": [("all-to-all", "context=all-to-all is of context-parallel ranks")],
    "bucket_bytes": [
        (
            "fsdp bucket=1MB",
            "bucket=1MB is of gradients that travel in buckets .*, which those of fsdp do not",
        ),
        ("overlap bucket=1MB", "which those of overlap do not"),
        ("local-sgd bucket=1MB", "which those of local-sgd do not"),
    ],
    "prefetch": [("ddp prefetch=2", "prefetch=2 is of fsdp and hsdp, but the sharding is ddp")],
    "reshard": [("zero2 no-reshard", "no-reshard is of fsdp and hsdp, but the sharding is zero2")],
    "offload": [("ddp offload=optimizer", "offload=optimizer is predicted but not run")],
    "adapters": [("ddp adapters", "adapters is predicted but not run")],
    "framework": [("ddp framework=megatron-core", "framework=megatron-core is not what runs here")],
    "relax": [("tp=2 terngrad", "terngrad goes with whole replicas, .*; got ddp and tp=2")],
    "compress": [
        (
            "local-sgd terngrad",
            "terngrad goes with gradients that are sent every step, which local-sgd does not",
        ),
        ("zero1 terngrad", "terngrad goes with whole replicas, or where it compresses with fsdp"),
        ("fsdp powersgd", "powersgd does not go with sharded parameters"),
    ],
    "ratio": [("terngrad ratio=0.1", "ratio=0.1 is of .*; got terngrad")],
    "rank": [("ddp rank=2", "rank=2 is of powersgd; got allreduce")],
    "average": [("overlap terngrad", "overlap goes with full gradients of replicas; got terngrad, too")],
    "mode": [("fsdp ps-async", "ps-async goes with whole replicas")],
    "period": [("ps-async period=2", "period=2 is of local-sgd, diloco, easgd, gossip; got ps-async")],
    "island": [("easgd island=2", "island=2 is of local-sgd, diloco; got easgd")],
    "servers": [("gossip servers=2", "servers=2 is of ps-sync, .*; got gossip")],
    "staleness": [("ps-async staleness=2", "staleness=2 is of ps-bounded; got ps-async")],
    "backup": [("ps-sync backup=1", "backup=1 is of ps-backup; got ps-sync")],
}


def looked_at(runs):
    """What is seen on each of two ranks."""
    return run("plan_workers:look_at_all", world=2, arguments={"runs": runs}, environment=HERE, timeout_s=500)


def test_every_field_is_accounted_for():
    names = {field.name for kind in (Plan, Relaxation) for field in fields(kind)}
    assert names == set(HONOURED) | set(REFUSED) == set(trained.TRAINED)
    never = {name for name, does in trained.TRAINED.items() if does.startswith("refused")}
    assert never == names - set(HONOURED)


@pytest.mark.parametrize("name", sorted({*HONOURED, *REFUSED}))
def test_a_plan_of_the_table_sets_the_field(name):
    plans = [Plan.parse(case[0]) for table in (HONOURED, REFUSED) for case in table.get(name, [])]
    holders = [plan if hasattr(plan, name) else plan.relax for plan in plans]
    usual = Plan() if hasattr(Plan(), name) else PLAIN
    assert any(getattr(holder, name) != getattr(usual, name) for holder in holders)


def test_a_pipeline_refuses_what_it_does_not_run():
    for words, says in (("terngrad", "terngrad with pp=2 is not run"), ("sp", "sp is predicted but")):
        with pytest.raises(PlanError, match=says):
            trained.resolved(Plan.parse(f"pp=2 mbs=1 gbs=4 {words}"), 2)


@pytest.mark.parametrize(("words", "says"), [case for cases in REFUSED.values() for case in cases])
def test_what_is_not_run_is_refused_by_name(words, says):
    from paceline.train.parallel import check

    with pytest.raises(PlanError, match=says) as refused:
        check(f"{words} fp32" if "fp" not in words.replace("fsdp", "") else words, 2)
    assert "\n" not in str(refused.value)


def test_what_is_honoured_is_seen_on_the_running_strategy():
    cases = [case for cases in HONOURED.values() for case in cases]
    runs = [(words, [name]) for words, name, _ in cases]
    ranks = looked_at(runs)
    for found in ranks:
        for (words, name, wanted), seen in zip(cases, found, strict=True):
            got = seen[name]
            if name == "first_step":
                assert wanted in got, words
            elif isinstance(wanted, dict):
                assert wanted.items() <= got.items(), words
            else:
                assert got == wanted, words


# -- defaults --------------------------------------------------------------------------------------

#: two ranks of one node, as in these tests
PAIR = replace(clusters.get("1x2xv100-sxm2-16gb"), name="pair")


def predicted(words):
    """The settings that a prediction has for a plan without them."""
    plan = resolve(Plan.parse(words), PAIR)
    relax = plan.relax
    return {
        "ddp_bucket": int(plan.bucket_bytes),
        "bucket_bytes": plan.bucket_bytes,
        "pieces": [int(plan.bucket_bytes)] * 2,
        "scheme": relax.scheme.to_dict(),
        "period": relax.every,
        "island": [rarely.island(plan, PAIR, plan.dp), None] if relax.mode.averages_rarely else None,
        "servers": servers(PAIR, plan.dp, relax.servers).count,
        "staleness": ["bounded", relax.staleness],
        "backup": ["backup", relax.backup],
        "mesh": [plan.dp // plan.shard, plan.shard] if plan.shard else [plan.dp],
        "reshard": plan.reshard,
    }


#: strategy -> what of it has a default
WITH_DEFAULTS = {
    "ddp": ["ddp_bucket"],
    "zero1": ["pieces"],
    "fsdp": ["mesh", "reshard"],
    "hsdp": ["mesh", "reshard"],
    **{name: ["bucket_bytes", "scheme"] for name in ("terngrad", "dgc", "powersgd", "topk", "qsgd")},
    "local-sgd": ["period", "island"],
    "diloco": ["period", "island"],
    "gossip": ["period"],
    "easgd": ["period", "servers"],
    "ps-sync": ["servers"],
    "ps-async": ["servers"],
    "ps-bounded": ["servers", "staleness"],
    "ps-backup": ["servers", "backup"],
}


def test_defaults_that_are_predicted_are_those_that_run():
    runs = [(f"{words} fp32", seen) for words, seen in WITH_DEFAULTS.items()]
    # by name alone as well
    runs += [(words, seen) for words, seen in WITH_DEFAULTS.items() if words not in tuple(Sharding)[2:]]
    ranks = looked_at(runs)
    for (words, seen), found in zip(runs, ranks[0], strict=True):
        assert found == {name: predicted(words)[name] for name in seen}, words


@given(mode=st.sampled_from([Mode.LOCAL_SGD, Mode.DILOCO]), nodes=st.integers(1, 5), each=st.integers(1, 8))
def test_islands_are_those_that_are_predicted(mode, nodes, each):
    cluster = replace(clusters.get("2xdgx-a100"), nodes=nodes, node_devices=each)
    plan = Plan(relax=Relaxation(mode=mode))
    wanted = rarely.island(plan, cluster, nodes * each)
    assert defaults.island(mode, nodes * each, each, nodes) == wanted
    assert defaults.servers(nodes) == servers(cluster, nodes * each).count or nodes == 1


def test_the_documentation_has_these_tables():
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    rows = [f"| `{name}` | {does} |" for name, does in trained.TRAINED.items() if name not in DEGREES]
    rows += [f"| `{word}` | `{same}` |" for word, same in ALIASES.items()]
    rows += [f"| `{way}` |" for way in defaults.DEFAULTS]
    assert not [row for row in rows if row not in text]
    assert f"| {defaults.DEFAULTS[Mode.DILOCO].source} |" in text
