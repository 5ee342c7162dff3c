"""`auto` on real processes: what the model cannot tell apart is tried, the fastest stays, and a run that goes
on stays with it.
"""

import os
from dataclasses import replace
from pathlib import Path

from paceline.train.launch import run
from paceline.train.profile import Layer, Profile
from paceline.train.strategies.auto import choose, near, undecided
from paceline.train.strategies.estimate import Setting
from paceline.train.strategies.probe import Machine

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}


def train(folder, until):
    """On each rank: steps until it has settled and `until` is reached, then a checkpoint; how it went."""
    import torch
    import torch.distributed as dist

    import paceline.train as pt
    from paceline.train.strategies import auto as module

    module._NEAR = float("inf")  # whatever the model says of this machine
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    net, opt = pt.parallelize(net, optimizer, plan="auto", watch=2, loss="some")
    auto, saved = pt.of(net), pt.Checkpoints(folder)
    start = step = saved.load(net, opt)
    first, used = auto.settled, [type(auto.inner).__name__]
    while step < until or not auto.settled:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        opt.zero_grad()
        loss = (net(x) - x.flip(1)).square().mean()
        loss.backward()
        opt.step()
        step += 1
        if used[-1] != type(auto.inner).__name__:
            used.append(type(auto.inner).__name__)
    kept = auto.state_dict()
    saved.save(step, net, opt)
    saved.wait()
    bits = torch.cat([value.reshape(-1) for value in net.state_dict().values()]).numpy().tobytes()
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, bits)
    said = module.explain(auto.choice) if auto.choice is not None else None
    pt.close(net)
    return {
        "start": start,
        "end": step,
        "settled": [first, auto.settled],
        "same": len(set(every)) == 1,
        "loss": loss.item(),
        "used": used,
        "strategy": kept["strategy"],
        "said": said,
    }


def test_what_is_near_is_tried_and_a_restart_stays_with_the_fastest(tmp_path):
    def both(until, world=2):
        ranks = run(
            "test_auto:train",
            world=world,
            arguments={"folder": str(tmp_path), "until": until},
            environment=HERE,
            timeout_s=200,
        )
        assert all(rank["same"] for rank in ranks) and len({rank["strategy"] for rank in ranks}) == 1
        return ranks[0]

    first = both(30)
    assert first["settled"] == [False, True]
    tried = first["said"]["measured_s"]
    assert len(tried) == 3 and first["strategy"] in tried
    assert f"{first['strategy']} took" in first["said"]["reason"]
    again = both(first["end"] + 5)
    assert again["start"] == first["end"] and again["end"] == again["start"] + 5
    assert (
        again["settled"] == [True, True]
        and again["strategy"] == first["strategy"]
        and len(again["used"]) == 1
    )
    assert again["loss"] < 1.5 * first["loss"]
    # with another number of ranks it looks again
    assert both(again["end"], world=3)["settled"] == [False, True]


def test_only_what_may_be_the_fastest_is_tried():
    layers = tuple(
        Layer(name=f"l{i}.weight", shape=(1024, 1024), need_s=0.005 * i, ready_s=0.01 * (8 - i))
        for i in range(8)
    )
    profile = Profile(layers=layers, forward_s=0.04, backward_s=0.08, update_s=0.004)

    def candidates(link):
        machine = Machine(latency_s=1e-4, link_Bps=link, reduce_Bps=link, flops=1e11)
        choice = choose(profile, Setting(machine=machine, world=2, cores=4), ("terngrad", "dgc"))
        return choice, near(choice)

    slow, tried = candidates(2.5e6)
    assert slow.strategy == "dgc" and tried == []  # nothing comes close: it is taken at once
    quick, tried = candidates(1e11)
    assert len(tried) == 3 and quick.strategy in tried
    assert "dgc" not in tried or tried[-1] == "dgc"  # which holds gradients back, that another would lose
    assert near(
        replace(quick, expected_s={"allreduce": 1.0, "dgc": 1.2, "overlap": 1.31}, strategy="allreduce")
    ) == ["allreduce", "dgc"]


def test_trials_go_on_while_it_is_not_clear_which_is_the_fastest():
    # each the same whenever it is tried: the first pass decides, also between two that are alike
    assert (
        undecided({"overlap": [1.0, 1.001], "dgc": [1.3, 1.301]})
        == []
        == undecided({"overlap": [1.0, 1.001], "dgc": [1.0, 0.999]})
    )
    # a machine that changes its pace: those stay in that may be the fastest, in their order
    unsteady = {"terngrad": [1.0, 1.2], "overlap": [1.5, 1.6], "dgc": [1.05, 1.1]}
    assert undecided(unsteady) == ["terngrad", "dgc"]
    # who left is not asked again, even where the others became slower since
    assert undecided(
        {"terngrad": [1.0, 1.2, 1.7, 1.8], "overlap": [1.5, 1.6], "dgc": [1.05, 1.1, 1.6, 1.7]}
    ) == ["terngrad", "dgc"]
    # and it ends
    assert undecided({"terngrad": [1.0, 1.2] * 4, "dgc": [1.05, 1.1] * 4}) == []
