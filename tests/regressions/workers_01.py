"""What the ranks of `test_01_capture_leaves_a_live_module_alone` run."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import paceline as pl
import paceline.train as pt

STEPS, ASKED_AT = 8, (0, 4)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))


def samples(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(model, optimizer, ask=None):
    """Before some steps, `ask` is called."""
    for step in range(STEPS):
        if ask is not None and step in ASKED_AT:
            ask(model)
        optimizer.zero_grad()
        model(samples(step)).square().mean().backward()
        optimizer.step()


def captured(model):
    return pl.capture((model, torch.randn(4, 8), lambda out: out.square().mean()), batch=4)


def parallel(plan, ask=None):
    """The parameters after training."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = pt.parallelize(model, optimizer, plan=plan, timeout_s=30)
    train(model, optimizer, ask)
    pt.close(model)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def all_of(plans):
    """By plan: whether both captures are those of a module outside training, and how far ends are apart."""
    expected, found = captured(network()).to_dict(), {}
    for plan in plans:
        workloads = []
        asked = parallel(plan, lambda model, to=workloads: to.append(captured(model).to_dict()))
        same = [one["segments"] == expected["segments"] for one in workloads]
        found[plan] = [*same, float((asked - parallel(plan)).abs().max())]
    return found


def sharded():
    """What a capture of an FSDP2 module says, and how far its parameters are from those without the ask."""
    ends, said = [], []

    def ask(model):
        try:
            captured(model)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    for asking in (None, ask):
        model = fully_shard(network(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        train(model, torch.optim.AdamW(model.parameters(), lr=0.01), asking)
        ends.append(torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()]))
    return [said[0], float((ends[0] - ends[1]).abs().max())]
