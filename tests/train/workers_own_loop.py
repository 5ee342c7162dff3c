"""What the ranks of `test_own_loop` run."""

import contextlib
import copy

import torch
import torch.distributed as dist
from networks import batch


class Odd(torch.nn.Module):
    """Tied, frozen and sometimes unused weights, running statistics."""

    def __init__(self):
        super().__init__()
        nn = torch.nn
        self.embed, self.head = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight
        self.conv, self.norm = nn.Conv1d(64, 64, 3, padding=1), nn.BatchNorm1d(64)
        self.spare, self.frozen, self.mid = (
            nn.Linear(64, 64),
            nn.Linear(64, 64).requires_grad_(False),
            nn.Linear(64, 64),
        )
        self.calls = 0

    def forward(self, ids):
        self.calls += 1
        h = torch.relu(self.norm(self.conv(self.embed(ids).transpose(1, 2)))).mean(-1)
        if self.calls % 2:
            h = h + self.spare(h)
        return self.head(torch.relu(self.mid(self.frozen(h))))


def odd(strategy, options, steps=6):
    """A loop with a scheduler, accumulation, an evaluation and states saved and loaded on the way; each rank
    begins with weights of its own.
    """
    import paceline.train as pt

    rank, ddp = dist.get_rank(), strategy == "ddp"
    torch.manual_seed(rank)
    net = Odd()
    frozen = net.frozen.weight.clone()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    options = {"find_unused_parameters": True} if ddp else options
    outer, opt = pt.parallelize(net, opt, plan=strategy, **options)
    assert outer is net
    scheduler, losses = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps), []
    for step in range(steps):
        opt.zero_grad()
        for part in range(2):
            ids = torch.randint(
                0, 50, (8, 12), generator=torch.Generator().manual_seed(100 * step + 10 * part + rank)
            )
            with contextlib.nullcontext() if part else pt.of(net).no_sync():
                loss = torch.nn.functional.cross_entropy(outer(ids), ids[:, 0]) / 2
                loss.backward()
        opt.step()
        scheduler.step()
        losses.append(float(loss.detach()))
        if step == 3:
            outer.load_state_dict(copy.deepcopy(outer.state_dict()))
            opt.load_state_dict(opt.state_dict())
            outer.eval()
            with torch.no_grad():
                assert torch.isfinite(outer(ids)).all()
            outer.train()
    # running statistics are each rank's own under DDP
    values = torch.cat(
        [
            v.reshape(-1)
            for k, v in net.state_dict().items()
            if v.is_floating_point() and not (ddp and "running" in k)
        ]
    )
    every = [torch.zeros_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(every, values)
    pt.close(outer)
    return {
        "same": all(torch.equal(every[0], one) for one in every),
        "losses": losses,
        "tied": net.head.weight is net.embed.weight,
        "frozen": rank > 0 or torch.equal(frozen, net.frozen.weight),
    }


def mistaken(plan, options=None, twice=False, grad_scaler=False, scaler=False, parameters="all"):
    """The error that a loop ends with, as one line; nothing where there is none."""
    import paceline.train as pt

    net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    opt = torch.optim.SGD((net if parameters == "all" else net[0]).parameters(), lr=0.05, momentum=0.9)
    scaled = pt.Scaler(8.0) if scaler else None
    if grad_scaler:
        scaled = torch.amp.GradScaler("cpu", init_scale=8.0)
    try:
        for _ in range(1 + twice):
            pt.parallelize(net, opt, plan=plan, **(options or {}))
        for step in range(3):
            x, y = batch(step, dist.get_rank())
            opt.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), y)
            (loss if scaled is None else scaled.scale(loss)).backward()
            opt.step() if scaled is None else scaled.step(opt)
            if scaled is not None:
                scaled.update()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        pt.close(net)
    return ""


def parallel_all(runs):
    return [globals()[name](**arguments) for name, arguments in runs]
