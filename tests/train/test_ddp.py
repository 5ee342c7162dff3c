"""Compressed averaging within torch's DistributedDataParallel, on real processes: the same bits as without
it, and the same words where it fails.
"""

import contextlib
import os
import time
from pathlib import Path

import pytest

from paceline.errors import SpecError
from paceline.train.launch import run

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
PLANS = ("allreduce", "terngrad", "dgc:ratio=0.01", "powersgd", "fp16", "onebit")


def network(wrapped, plan, **options):
    """Of 13 parameters, of which some go in float32, in several buckets of DDP's."""
    import torch

    import paceline.train as pt

    torch.manual_seed(0)
    inner = torch.nn.Sequential(
        *(m for _ in range(6) for m in (torch.nn.Linear(64, 64, bias=False), torch.nn.Tanh())),
        torch.nn.Linear(64, 10),
    )
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    model = torch.nn.parallel.DistributedDataParallel(inner, bucket_cap_mb=0.03) if wrapped else inner
    return (inner, *pt.parallelize(model, optimizer, plan=plan, **options))


def train(model, optimizer, steps, accumulate=1):
    import torch
    import torch.distributed as dist

    import paceline.train as pt

    for step in steps:
        optimizer.zero_grad()
        for part in range(accumulate):
            x = torch.randn(
                8, 64, generator=torch.Generator().manual_seed(1000 * step + 10 * dist.get_rank() + part)
            )
            with pt.of(model).no_sync() if part < accumulate - 1 else contextlib.nullcontext():
                (model(x) - x[:, :10]).square().mean().backward()
        optimizer.step()


def values(inner):
    import torch

    return torch.cat([p.detach().reshape(-1) for p in inner.parameters()])


def both_ways(accumulate=1):
    """Of every plan, whether parameters are the same bits with and without DDP, and on all ranks; and that
    DDP trains on when it is let go.
    """
    import torch
    import torch.distributed as dist

    import paceline.train as pt

    found = {}
    for plan in PLANS:
        ends = []
        for wrapped in (True, False):
            inner, model, optimizer = network(wrapped, plan)
            train(model, optimizer, range(10), accumulate)
            pt.close(model)
            ends.append(values(inner))
            if wrapped:
                train_on = ends[0].clone()
                for step in range(2):
                    optimizer.zero_grad()
                    model(torch.full((4, 64), float(step + dist.get_rank()))).square().mean().backward()
                    optimizer.step()
                every = [torch.empty_like(train_on) for _ in range(dist.get_world_size())]
                dist.all_gather(every, values(inner))
                found[plan, "after"] = all(torch.equal(one, every[0]) for one in every) and not torch.equal(
                    every[0], train_on
                )
        every = [torch.empty_like(ends[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(every, ends[0])
        found[plan, "same"] = torch.equal(*ends)
        found[plan, "near"] = torch.allclose(*ends, rtol=1e-4, atol=1e-5)
        found[plan, "one model"] = all(torch.equal(one, every[0]) for one in every)
    return {" ".join(key): value for key, value in found.items()}


def goes_on(folder):
    """A run with DDP that stops at a checkpoint and goes on without DDP, against one that was left alone:
    bits of what both end with.
    """
    import paceline.train as pt

    inner, model, optimizer = network(True, "dgc:ratio=0.01")
    saved = pt.Checkpoints(folder)
    train(model, optimizer, range(6))
    saved.save(6, model, optimizer)
    saved.wait()
    train(model, optimizer, range(6, 10))
    pt.close(model)
    again, plain, optimizer = network(False, "dgc:ratio=0.01")
    start = pt.Checkpoints(folder).load(plain, optimizer)
    train(plain, optimizer, range(start, 10))
    pt.close(plain)
    return [start, bool((values(again) == values(inner)).all())]


def wait_for_nobody():
    import torch.distributed as dist

    _, model, optimizer = network(True, "terngrad", timeout_s=2)
    try:
        train(model, optimizer, range(2))
        if dist.get_rank() == 1:
            time.sleep(8)
            return ""
        train(model, optimizer, range(1))
    except Exception as error:  # what it says is what is tested
        return f"{type(error).__name__}: {error}"
    return "through"


def refused():
    import torch

    said = []
    for plan in ("overlap", "auto", "ddp"):
        try:
            network(True, plan)
        except SpecError as error:
            said.append(str(error))
    _, model, _ = network(True, "fp16")
    import paceline.train as pt

    pt.close(model)
    try:
        pt.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="fp16")
    except SpecError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_same_bits_with_and_without_ddp(accumulate):
    for rank in run(
        "test_ddp:both_ways", world=2, arguments={"accumulate": accumulate}, environment=HERE, timeout_s=200
    ):
        assert len(rank) == 4 * len(PLANS) and [key for key, well in rank.items() if not well] == []


def test_on_three_ranks_sums_begin_elsewhere_and_replicas_stay_one_model():
    for rank in run("test_ddp:both_ways", world=3, environment=HERE, timeout_s=200):
        assert rank["allreduce near"]
        assert all(rank[f"{plan} {what}"] for plan in PLANS for what in ("one model", "after"))


def test_a_checkpoint_of_ddp_is_taken_up_without_it(tmp_path):
    for start, same in run(
        "test_ddp:goes_on", world=2, arguments={"folder": str(tmp_path)}, environment=HERE, timeout_s=200
    ):
        assert start == 6 and same


def test_a_rank_that_hangs_is_named():
    first, _ = run("test_ddp:wait_for_nobody", world=2, environment=HERE, timeout_s=100)
    assert (
        first.startswith("RunError: rank 0 of 2: all-reduce")
        and "no sign of rank 1" in first
        and "12.bias" in first
    )


def test_what_does_not_go_within_ddp_is_refused():
    overlap, auto, ddp, twice = run("test_ddp:refused", world=2, environment=HERE, timeout_s=100)[0]
    assert "'overlap'" in overlap and "'auto'" in auto and "pass the module that it wraps" in overlap
    assert "already" in ddp and "only be called once" in twice
