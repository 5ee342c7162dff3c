"""What ranks of `test_extend.py` run; they know what the process that started them has loaded."""

import hashlib

import torch
import torch.distributed as dist

import paceline.train as pt
from paceline.catalog.models.gpt import gpt


def compressed(plan, steps=30):
    """Losses of a rank, a digest of its parameters at the end, and the bytes of one step's gradients."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
    net, optimizer = pt.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9), plan=plan)
    x = torch.randn(32, 20, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), x[:, :10].argmax(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    sent = pt.of(net).wire_bytes()
    pt.close(net)
    values = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    return {"losses": losses, "digest": hashlib.sha256(values).hexdigest(), "wire_bytes": sent}


def turns(plan, steps=30):
    """Losses of a rank, digests of its parameters after each step, the layers that each step changed, and a
    digest of its own last gradients.
    """
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
    net, optimizer = pt.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9), plan=plan)
    x = torch.randn(32, 20, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses, digests, changed, own = [], [], [], ""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), x[:, :10].argmax(1))
        loss.backward()
        own = _digest([p.grad for p in net.parameters()])
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        optimizer.step()
        moved = [name for name, p in net.named_parameters() if not torch.equal(p, before[name])]
        changed.append(sorted({name.partition(".")[0] for name in moved}))
        digests.append(_digest(net.parameters()))
        losses.append(loss.item())
    pt.close(net)
    return {"losses": losses, "digests": digests, "changed": changed, "gradients": own}


def _digest(tensors):
    values = b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(values).hexdigest()


def piped(plans, steps=3):
    """Losses under each plan with pipeline stages; the last stage has them."""
    return [_piped(plan, steps) for plan in plans]


def _piped(plan, steps):
    torch.manual_seed(0)
    net, _, _ = gpt(batch=4, seq=16, width=32, depth=4, heads=4, vocab=50, context=16)
    ids = torch.randint(0, 50, (8, 16), generator=torch.Generator().manual_seed(1))
    runner = pt.Pipeline(net, _optimizer, plan, _loss)
    losses = [runner.step(ids, ids) for _ in range(steps)]
    runner.close()
    return losses


def _optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
