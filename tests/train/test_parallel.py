"""Plans, checkpoints and loss scaling on real processes."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.errors import RunError
from paceline.train.checkpoint import Checkpoints
from paceline.train.launch import run

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}


def test_sharded_and_tensor_parallel_plans_follow_one_process():
    runs = [
        ("planned", {"kind": kind, "plan": plan})
        for kind, plan in (
            ("gpt", "fsdp fp32"),
            ("llama", "fsdp fp32 recompute=full"),
            ("gpt", "hsdp shard=1 fp32"),
            ("gpt", "tp=2 fp32"),
            ("llama", "tp=2 fp32"),
            ("gpt", "zero1 fp32 recompute=selective"),
            ("gpt", "ddp fp32 offload=activations"),
        )
    ]
    # spans over several modules, one within the other, which FSDP gathers and shards as they run again
    spans = [["blocks.0", "blocks.1"], ["blocks.0"]]
    runs += [("planned", {"kind": kind, "plan": "fsdp fp32", "spans": spans}) for kind in ("gpt", "llama")]
    first, *_ = run(
        "workers_parallel:parallel_all", world=2, arguments={"runs": runs}, environment=HERE, timeout_s=250
    )
    for (_, request), (losses, alone) in zip(runs, first, strict=True):
        assert losses == pytest.approx(alone, rel=2e-3), request


@pytest.mark.parametrize("strategy", ["allreduce", "overlap", "switches"])
def test_losses_that_torch_scales_give_the_same_steps(strategy):
    found = run(
        "workers_parallel:scaled_by_torch", world=2, arguments={"strategy": strategy}, environment=HERE
    )
    assert max(found) < 1e-5


@pytest.mark.parametrize("strategy", ["dgc", "compresses"])
def test_what_is_kept_for_later_has_to_know_the_scale(strategy):
    with pytest.raises(
        RunError, match="dgc keeps part of the gradients .* parallelize\\(..., scaler=scaler\\)"
    ):
        run("workers_parallel:scaled_by_torch", world=2, arguments={"strategy": strategy}, environment=HERE)


@pytest.mark.parametrize("plan", ["ddp fp32", "local-sgd island=2 fp32"])
def test_gradients_within_no_sync_stay_on_their_rank(plan):
    for within, outside in run(
        "workers_parallel:paused", world=2, arguments={"plan": plan}, environment=HERE, timeout_s=250
    ):
        assert within > 0.05 and outside < 1e-5


def test_compressed_gradients_go_through_fsdp():
    runs = [
        ("planned", {"kind": "gpt", "plan": f"fsdp fp32 {scheme}", "steps": 12})
        for scheme in ("terngrad", "qsgd", "onebit")
    ]
    first, second = run(
        "workers_parallel:parallel_all", world=2, arguments={"runs": runs}, environment=HERE, timeout_s=250
    )
    for (_, request), (losses, alone), (other, _) in zip(runs, first, second, strict=True):
        assert losses == other and losses[-1] < losses[0] - 0.3 * (alone[0] - alone[-1]), request


@pytest.mark.parametrize(
    ("world", "plans"),
    [
        (
            2,
            (
                ("gpt", "pp=2 gpipe mbs=2 gbs=8"),
                ("llama", "pp=2 1f1b mbs=2 gbs=8 recompute=full"),
                ("gpt", "pp=2 vpp=2 interleaved mbs=2 gbs=8 recompute=full"),
                ("llama", "pp=2 vpp=2 zb-v mbs=2 gbs=8"),
            ),
        ),
        (
            4,
            (
                ("gpt", "pp=2 1f1b mbs=2 gbs=8"),
                ("gpt", "pp=2 tp=2 1f1b mbs=2 gbs=8"),
                ("gpt", "pp=2 zero1 1f1b mbs=2 gbs=8"),
                ("llama", "pp=2 fsdp 1f1b mbs=2 gbs=8"),
                ("gpt", "pp=2 fsdp 1f1b mbs=2 gbs=8 recompute=selective"),
            ),
        ),
    ],
)
def test_pipelines_follow_one_process(world, plans):
    runs = [("staged", {"kind": kind, "plan": f"{plan} fp32"}) for kind, plan in plans]
    first, *_ = run(
        "workers_parallel:parallel_all",
        world=world,
        arguments={"runs": runs},
        environment=HERE,
        timeout_s=250,
    )
    for (_, request), (losses, alone) in zip(runs, first, strict=True):
        assert losses == pytest.approx(alone, rel=2e-3), request


def test_overflow_skips_the_step_on_all_ranks():
    runs = [
        ("scaled", {"strategy": name})
        for name in ("allreduce", "terngrad", "onebit", "overlap", "priority", "switches")
    ]
    # keeps nothing back: finds out by itself
    runs.append(("scaled", {"strategy": "terngrad", "tell": False}))
    ranks = run(
        "workers_parallel:parallel_all", world=2, arguments={"runs": runs}, environment=HERE, timeout_s=250
    )
    for i, (_, request) in enumerate(runs):
        for rank in ranks:
            assert rank[i]["stepped"] == [True, True, True, False, True, True], request
            assert rank[i]["same"] and rank[i]["finite"] and rank[i]["scale"] == 512, request


@pytest.mark.parametrize("strategy", ["overlap", "onebit"])
def test_a_run_goes_on_from_its_checkpoint_also_at_another_world_size(tmp_path, strategy):
    def train(folder, until, world):
        return run(
            "workers_parallel:resumed",
            world=world,
            arguments={"folder": str(folder), "strategy": strategy, "steps": 10, "until": until},
            environment=HERE,
            timeout_s=250,
        )[0]

    whole = train(tmp_path / "whole", 8, 2)
    assert whole["steps"] == [6, 8]
    train(tmp_path / "cut", 5, 2)
    on = train(tmp_path / "cut", 8, 2)
    assert on["start"] == 4
    assert on["total"] == pytest.approx(whole["total"], rel=1e-6)
    # the newest is broken: the one before is taken
    victim = tmp_path / "cut" / "step-000000008" / "model.pt"
    os.truncate(victim, victim.stat().st_size // 2)
    more = train(tmp_path / "cut", 8, 3)
    assert more["start"] == 6
    assert more["total"] == pytest.approx(whole["total"], rel=1e-3)
    assert json.loads((tmp_path / "cut" / "step-000000008" / "manifest.json").read_text())["world"] == 3


def test_a_run_goes_on_under_another_strategy(tmp_path):
    names = ["dgc", "overlap", "terngrad", "lazy", "local", "diloco", "auto", "allreduce"]
    both = run(
        "workers_parallel:handed_on",
        world=2,
        arguments={"folder": str(tmp_path), "names": names},
        environment=HERE,
        timeout_s=250,
    )
    for rank in both:
        assert [one["start"] for one in rank] == [2 * i for i in range(len(names))]
        # dgc takes momentum and weight decay away from the optimizer, and must not hand that on
        assert {(one["momentum"], one["weight_decay"]) for one in rank} == {(0.9, 0.01)}
    with pytest.raises(
        RunError, match="is of another model or optimizer: .*size mismatch for bias.*; name another folder"
    ):
        Checkpoints(tmp_path).load(net := nn.Linear(7, 7), torch.optim.SGD(net.parameters(), lr=0.1))
