"""What the ranks of `test_07_ddp_keeps_the_objects` run."""

import contextlib
import gc
import weakref

import torch
import torch.distributed as dist

import paceline.train as pt
from paceline.spec.plan import Plan

STEPS = 4


def build():
    torch.manual_seed(dist.get_rank())  # rank 0's weights must win
    nn = torch.nn
    model = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, no_sync):
    """Two micro-batches a step."""
    for number in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            seed = 100 * number + 10 * part + dist.get_rank()
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
            with contextlib.nullcontext() if part else no_sync():
                model(x).square().mean().backward()
        optimizer.step()


def values(model):
    return torch.cat([tensor.detach().reshape(-1) for tensor in model.parameters()])


def gathered(tensor):
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor)
    return every


def objects(plan):
    """What `parallelize` returns, what training does against torch's wrapper, what `close` leaves."""
    model, optimizer = build()
    keys = list(model.state_dict())
    plan = Plan.parse(plan[1:]) if plan.startswith("=") else plan
    returned = pt.parallelize(model, optimizer, plan=plan)
    same = returned[0] is model and returned[1] is optimizer
    found = {"objects": same, "keys": list(model.state_dict()) == keys}
    if dist.get_rank() == 0:  # one rank may evaluate alone
        model.eval()
        with torch.no_grad():
            model(torch.zeros(2, 16))
        model.train()
    train(model, optimizer, pt.of(model).no_sync)
    pt.of(model).synchronize()
    ends = gathered(values(model))
    found["replicas"] = torch.equal(*ends)
    other, theirs = build()
    wrapped = torch.nn.parallel.DistributedDataParallel(other)
    train(wrapped, theirs, wrapped.no_sync)
    found["apart"] = float((values(other) - ends[0]).abs().max())
    inner = weakref.ref(pt.of(model)._passes.ddp) if plan == "ddp" else lambda: None
    pt.close(model)
    gc.collect()
    found["gone"] = inner() is None and "forward" not in model.__dict__ and not model._forward_pre_hooks
    found["state"] = len(optimizer.state_dict()["state"]) == 6
    optimizer.zero_grad()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x).square().sum().backward()
    found["alone"] = not torch.equal(*gathered(model[0].weight.grad))  # nothing is averaged any more
    return found


def by_part():
    """What the first step says where no pass went through the model itself."""
    model, optimizer = build()
    pt.parallelize(model, optimizer, plan="ddp")
    model[0](torch.ones(2, 16)).sum().backward()
    try:
        optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        pt.close(model)
    return ""


def several(calls):
    return [globals()[name](**arguments) for name, arguments in calls]
