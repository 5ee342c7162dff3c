"""What the ranks of `test_10_one_loop_for_all_plans` run."""

import contextlib
import math

import torch
import torch.distributed as dist

import paceline.train as pt

STEPS = 6


def build(rank=0):
    torch.manual_seed(rank)
    nn = torch.nn
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def samples(number, part=0):
    seed = 100 * number + 10 * part + dist.get_rank()
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def portable(plan, options):
    """A loop with every call that a strategy has, and what was there."""
    model, optimizer = build()
    model, optimizer = pt.parallelize(model, optimizer, plan=plan, **options)
    strategy, losses = pt.of(model), []
    for number in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            with contextlib.nullcontext() if part else strategy.no_sync():
                loss = model(samples(number, part)).square().mean()
                loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    strategy.synchronize()
    state = strategy.optimizer_state()
    strategy.load_optimizer_state(state)
    strategy.load_state_dict(strategy.state_dict())
    name = strategy.name
    pt.close(model)
    try:
        pt.of(model)
    except Exception as error:
        after = type(error).__name__
    found = {"finite": all(map(math.isfinite, losses)), "learns": losses[-1] < losses[0]}
    return {**found, "name": name, "state": sorted(state), "after": after}


def scaled(plan, options, how):
    """The usual loop of a GradScaler with another scaler in its place: what it did, and how all ranks end."""
    model, optimizer = build()
    pt.parallelize(model, optimizer, plan=plan, timeout_s=20, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if how == "torch" else pt.Scaler(64.0)
    for number in range(STEPS):
        optimizer.zero_grad()
        x = samples(number)
        if number == 3 and dist.get_rank() == 1:
            x[0] = float("inf")
        scaler.scale(model(x).square().mean()).backward()
        if how != "plain":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    values = torch.cat([tensor.reshape(-1) for tensor in model.state_dict().values()])
    pt.close(model)
    every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(every, values)
    return [scaler.get_scale(), torch.equal(*every), values.tolist()]


def several(calls):
    return [globals()[name](**arguments) for name, arguments in calls]
