"""What the ranks of `test_02_optimizer_state_is_whole` run."""

import time
from pathlib import Path

import torch
import torch.distributed as dist

import paceline.train as pt

STEPS, SAVED_AT = 6, 3


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))


def build(plan, options):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return pt.parallelize(model, optimizer, plan=plan, timeout_s=20, **options)


def backward(model, number):
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    model(x).square().mean().backward()


def step(model, optimizer, number):
    optimizer.zero_grad()
    backward(model, number)
    optimizer.step()


def moments(state):
    """Of a state as torch gives it, all numbers one behind another."""
    entries = [state["state"][i][name] for i in sorted(state["state"]) for name in ("exp_avg", "exp_avg_sq")]
    return torch.cat([tensor.reshape(-1) for tensor in entries])


def values(model):
    return torch.cat([tensor.reshape(-1) for tensor in model.state_dict().values()])


def states(plan, options):
    """The state after some steps, taken by all ranks, then by each alone; against that of all-reduce."""
    model, optimizer = build(plan, options)
    for number in range(SAVED_AT):
        step(model, optimizer, number)
    together = optimizer.state_dict()
    alone = None
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            alone = optimizer.state_dict()
        dist.barrier()
    step(model, optimizer, SAVED_AT)
    last = values(model)
    pt.close(model)
    model, optimizer = build("allreduce", {})
    for number in range(SAVED_AT):
        step(model, optimizer, number)
    plain = moments(optimizer.state_dict())
    step(model, optimizer, SAVED_AT)
    found = {
        "entries": [len(together["state"]), len(alone["state"])],
        "steps": {float(one["step"]) for one in together["state"].values()} == {SAVED_AT},
        "together": float((moments(together) - plain).abs().max()),
        "alone": torch.equal(moments(together), moments(alone)),
        "trained on": float((last - values(model)).abs().max()),
    }
    pt.close(model)
    return found


def resumed(folder, plan, options, *, waits):
    """Saves on rank 0 alone in the usual way, and goes on from that; how far from a run left alone it is."""
    model, optimizer = build(plan, options)
    path = Path(folder, "saved.pt")
    for number in range(STEPS):
        step(model, optimizer, number)
        if number + 1 == SAVED_AT:
            if dist.get_rank() == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
            if waits:
                dist.barrier()
    expected = values(model)
    pt.close(model)
    dist.barrier()
    model, optimizer = build(plan, options)
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for number in range(SAVED_AT, STEPS):
        step(model, optimizer, number)
    apart = float((values(model) - expected).abs().max())
    pt.close(model)
    return apart


def taken_back():
    """How far apart the same steps end that begin from the same state, taken back in the middle of a run."""
    model, optimizer = build("overlap", {"fc": "rows"})
    for number in range(SAVED_AT):
        step(model, optimizer, number)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    state = optimizer.state_dict()
    ends = []
    for _ in range(2):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        for number in range(SAVED_AT, STEPS):
            step(model, optimizer, number)
        ends.append(values(model))
    pt.close(model)
    return float((ends[0] - ends[1]).abs().max())


def split(folder, plan):
    """Of a model that is split: how far from a run left alone one ends that goes on from a checkpoint, and
    what is said where rank 0 alone has saved its part.
    """
    model, optimizer = build(plan, {})
    saved, part, said = pt.Checkpoints(Path(folder, plan.replace(" ", "-"))), Path(folder, "part.pt"), ""
    for number in range(STEPS):
        step(model, optimizer, number)
        if number + 1 == SAVED_AT:
            saved.save(SAVED_AT, model, optimizer)
            if dist.get_rank() == 0:
                torch.save(model.state_dict(), part)
            dist.barrier()
            try:
                model.load_state_dict(torch.load(part, weights_only=False))
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
    saved.wait()
    entries = pt.of(model).optimizer_state()["state"].values()
    whole = sum(one["exp_avg"].numel() for one in entries)
    pt.close(model)
    expected = values(model)
    model, optimizer = build(plan, {})
    at = saved.load(model, optimizer)
    for number in range(SAVED_AT, STEPS):
        step(model, optimizer, number)
    pt.close(model)
    return {"at": at, "apart": float((values(model) - expected).abs().max()), "whole": whole, "said": said}


def refused(how):
    """What rank 0 is told that asks alone where the others cannot answer."""
    model, optimizer = build("overlap", {"fc": "gradient"})
    for number in range(SAVED_AT):
        step(model, optimizer, number)
    said, engine = "", pt.of(model).engine
    optimizer.zero_grad()
    backward(model, SAVED_AT)
    if how == "ended":
        optimizer.step()
        pt.of(model).synchronize()
        if dist.get_rank():
            attendant, engine.attendant = engine.attendant, None
            attendant.leave(well=False)
    elif dist.get_rank():
        before = [part.updates for part in pt.of(model).parts]
        optimizer.step()
        while any(part.updates == was for part, was in zip(pt.of(model).parts, before, strict=True)):
            time.sleep(0.01)
    dist.barrier()
    if dist.get_rank() == 0:
        try:
            optimizer.state_dict()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    dist.barrier()
    if how != "ended" and dist.get_rank() == 0:
        optimizer.step()
    engine.attendant = None
    pt.close(model)
    return said


def several(calls):
    return [globals()[name](**arguments) for name, arguments in calls]
