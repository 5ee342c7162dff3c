"""What the ranks of `test_03_clipping` run."""

import contextlib
import time

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import paceline.train as pt
from paceline.errors import RunError

STEPS = 5


def network():
    torch.manual_seed(0)
    nn = torch.nn
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))


def samples(number, part=0):
    seed = 100 * number + 10 * part + dist.get_rank()
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def backward(model, number, part=0):
    model(samples(number, part)).square().mean().backward()


def by_norm(model, optimizer, number):
    optimizer.zero_grad()
    backward(model, number)
    total = clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    return float(total)


def by_value(model, optimizer, number):
    optimizer.zero_grad()
    backward(model, number)
    clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    return float(next(model.parameters()).grad.abs().max())


def reading(model, optimizer, number):
    """Norms are read before the step and after it, as a log does; nothing is changed."""
    optimizer.zero_grad()
    backward(model, number)
    before = sum(float(p.grad.norm()) for p in model.parameters())
    optimizer.step()
    return [before, sum(p.grad.numpy().sum().item() for p in model.parameters())]


def replaced(model, optimizer, number):
    """One gradient is replaced, one changed by an operator, one set to zero; all zeroed in place before."""
    optimizer.zero_grad(set_to_none=False)
    backward(model, number)
    first, second, *_, last = model.parameters()
    first.grad = torch.full_like(first, 0.01)
    second.grad *= 2
    last.grad.zero_()
    optimizer.step()
    return 0.0


def by_data(model, optimizer, number):
    """As older loops change gradients: through `.data`, in place and by assignment."""
    optimizer.zero_grad()
    backward(model, number)
    first, second, *rest = model.parameters()
    first.grad.data = first.grad.data * 0.5
    second.grad.data /= 2
    for p in rest:
        p.grad.data.clamp_(-0.01, 0.01)
    optimizer.step()
    return 0.0


def accumulated(model, optimizer, number):
    """Clipped after each of three passes, of which the second is within `no_sync`."""
    optimizer.zero_grad()
    for part in range(3):
        with pt.of(model).no_sync() if part == 1 else contextlib.nullcontext():
            backward(model, number, part)
        if part != 1:
            clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    return 0.0


def thrown_away(model, optimizer, number):
    """A pass whose gradients are thrown away by hand, and a step without any."""
    for part in range(2):
        for p in model.parameters():
            p.grad = None
        backward(model, number, part)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    return 0.0


def scaled(model, optimizer, number):
    """torch's own loss scaling, with clipping between."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer.zero_grad()
    x = samples(number)
    if number == 2 and dist.get_rank() == 0:
        x[0] = float("inf")
    scaler.scale(model(x).square().mean()).backward()
    scaler.unscale_(optimizer)
    total = clip_grad_norm_(model.parameters(), 0.05)
    scaler.step(optimizer)
    scaler.update()
    return [float(total) if number != 2 else 0.0, scaler.get_scale()]


LOOPS = ("by_norm", "by_value", "reading", "replaced", "by_data", "accumulated", "thrown_away", "scaled")


def trained(plan, options, loop):
    """What each step returned, and the parameters at the end, which are the same on all ranks."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pt.parallelize(model, optimizer, plan=plan, timeout_s=20, **options)
    said = [globals()[loop](model, optimizer, number) for number in range(STEPS)]
    values = torch.cat([tensor.reshape(-1) for tensor in model.state_dict().values()])
    pt.close(model)
    every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(every, values)
    assert all(torch.equal(values, one) for one in every), f"{plan}, {loop}: replicas differ"
    assert all(p.grad is None or type(p.grad) is torch.Tensor for p in model.parameters())
    return torch.tensor(said), values


def against(plans):
    """By loop and plan, how far what steps return, and parameters, are from those of all-reduce."""
    found = {}
    for loop in LOOPS:
        told, expected = trained("allreduce", {}, loop)
        for plan, options in plans:
            said, values = trained(plan, options, loop)
            far = float((said - told).abs().max() / told.abs().max().clamp(min=1e-6))
            found[f"{loop} {plan} {options}"] = [far, float((values - expected).abs().max())]
    return found


def lazily(loop):
    """What the first step under `lazy` says."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pt.parallelize(model, optimizer, plan="lazy", timeout_s=20)
    try:
        globals()[loop](model, optimizer, 0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        pt.close(model)
    return ""


def lazily_all():
    return {loop: lazily(loop) for loop in ("by_norm", "by_value", "reading", "scaled")}


def alone():
    """What rank 0 is told that reads gradients by itself."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pt.parallelize(model, optimizer, plan="overlap", fc="gradient", timeout_s=8)
    said, engine = "", pt.of(model).engine
    try:
        for number in range(3):
            optimizer.zero_grad()
            backward(model, number)
            if dist.get_rank() == 0 and number == 2:
                float(next(model.parameters()).grad.norm())
            optimizer.step()
        backward(model, 3)
        pt.of(model).synchronize()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    while not engine.failed:  # the read that nobody joined ends with its time
        time.sleep(0.05)
    with contextlib.suppress(RunError):
        pt.close(model)
    return said
