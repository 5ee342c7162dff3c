"""What the ranks of `test_06_replicas_meet` run."""

import torch
import torch.distributed as dist

import paceline.train as pt


def build(plan, options):
    torch.manual_seed(0)
    nn = torch.nn
    model = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return pt.parallelize(model, optimizer, plan=plan, timeout_s=20, **options)


def step(model, optimizer, number):
    seed = 100 * number + dist.get_rank()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def values(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def gathered(tensor):
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor)
    return every


def same(tensor):
    return all(torch.equal(tensor, one) for one in gathered(tensor))


def drifted(plan, options, steps):
    """Whether replicas are their mean after `synchronize` and after `close`; one rank saves before."""
    found = {}
    for end in ("synchronize", "close"):
        model, optimizer = build(plan, options)
        for number in range(steps):
            step(model, optimizer, number)
        apart = gathered(values(model))
        found["apart"] = not torch.equal(*apart)
        if dist.get_rank() == 0:  # no other rank needs to take part
            model.state_dict()
        pt.of(model).synchronize() if end == "synchronize" else pt.close(model)
        found[end] = same(values(model)) and torch.allclose(values(model), sum(apart) / 2, atol=1e-6)
        if end == "synchronize":
            before = values(model)
            pt.of(model).synchronize()
            found["once"] = torch.equal(before, values(model))
            for number in range(steps, 2 * steps):
                step(model, optimizer, number)
            pt.close(model)
            found["goes on"] = same(values(model))
    return found


def left_over():
    """Under `lazy`, with gradients that stay the same: those applied before and after `close`."""
    bottom, top = torch.nn.Linear(40, 40, bias=False), torch.nn.Linear(40, 40, bias=False)
    model = torch.nn.Sequential(bottom, top)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pt.parallelize(model, optimizer, plan="lazy", share=0.5, interval=4, adapt=False, least_bytes=64)
    before, steps = bottom.weight.detach().clone(), 7
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.zeros(1, 40))  # for the order of their use
        sum((layer.weight / 256).sum() for layer in model).backward()
        optimizer.step()
    pt.of(model).synchronize()
    held = float(((before - bottom.weight.detach()) * 256).mean())
    pt.close(model)
    return [held, float(((before - bottom.weight.detach()) * 256).mean()), same(values(model))]


def alone():
    """What ranks are told of which one averages by itself."""
    model, optimizer = build("local", {"period": 4})
    said = ""
    try:
        for number in range(4):
            step(model, optimizer, number)
            if number == 1 and dist.get_rank() == 0:
                pt.of(model).synchronize()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    try:
        pt.close(model)
    except Exception:
        return said
    return said


def several(calls):
    return [globals()[name](**arguments) for name, arguments in calls]
