"""What the ranks of `test_parallel` run."""

import torch
import torch.distributed as dist
from networks import alone, batch, decoder, model, token_loss

from paceline.spec.compression import Float32, parse
from paceline.train.strategies.auto import Auto, Choice


def planned(kind, plan, steps=4, spans=()):
    """Losses under a plan without pipeline stages (mean over ranks), beside those of one process; `spans` of
    modules are computed again.
    """
    import paceline.train as pt
    from paceline.spec.recomputation import RecomputePolicy, RecomputeSpan

    net, ids = decoder(kind)
    pt.recompute(net, RecomputePolicy(spans=tuple(RecomputeSpan(modules=tuple(span)) for span in spans)))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net, opt = pt.parallelize(net, opt, plan=plan)
    ranks = 1 if "tp=" in plan else dist.get_world_size()
    mine = ids.chunk(ranks)[dist.get_rank() % ranks]
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = token_loss(net(mine), mine)
        loss.backward()
        opt.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    pt.close(net)
    return losses, alone(kind, steps)


def staged(kind, plan, steps=4):
    """The same for pipelines: losses of last stages."""
    from paceline.train import Pipeline

    net, ids = decoder(kind)
    runner = Pipeline(
        net, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), plan, token_loss
    )
    mine = ids.chunk(runner.dp)[runner.replica]
    losses = []
    for _ in range(steps):
        loss = runner.step(mine, mine)
        total = torch.tensor([loss or 0.0, float(loss is not None)])
        dist.all_reduce(total)
        losses.append((total[0] / total[1]).item())
    return losses, alone(kind, steps)


class Switches(Auto):
    """Takes `overlap` after two steps, whatever the link."""

    def __init__(self):
        super().__init__(watch=2, trial=False)

    def _choose(self):
        return Choice(
            strategy="overlap", expected_s={}, mixes={"overlap": {"0.weight": Float32()}}, reason=""
        )


class Compresses(Auto):
    """Takes DGC after two steps, which keeps what it does not send."""

    def __init__(self):
        super().__init__(watch=2, trial=False, loss="some")

    def _choose(self):
        mixes = {"dgc": {name: parse("dgc") for name in self.names.values()}}
        return Choice(strategy="dgc", expected_s={}, mixes=mixes, reason="")


def scaled(strategy, steps=6, tell=True):
    """Loss scaling with a gradient of one rank that is not finite in one step: all skip it, and go on with
    half the scale.
    """
    import paceline.train as pt

    rank = dist.get_rank()
    net = model()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = pt.Scaler(1024.0, growth=100)
    options = {"scaler": scaler} if tell and strategy not in ("overlap", "priority", "switches") else {}
    net, opt = pt.parallelize(net, opt, plan=Switches() if strategy == "switches" else strategy, **options)
    stepped = []
    for step in range(steps):
        x, y = batch(step, rank)
        if rank == 1 and step == 3:
            x[0] = float("inf")
        opt.zero_grad()
        scaler.scale(torch.nn.functional.cross_entropy(net(x), y)).backward()
        stepped.append(scaler.step(opt))
    values = torch.cat([v.reshape(-1) for v in net.state_dict().values()])
    pt.close(net)
    both = [torch.zeros_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(both, values)
    same, finite = all(torch.equal(both[0], b) for b in both), bool(torch.isfinite(values).all())
    return {"stepped": stepped, "same": same, "finite": finite, "scale": scaler.value}


def scaled_by_torch(strategy, steps=6):
    """How far parameters are, after steps under torch's GradScaler, from those without any scaling."""
    import paceline.train as pt

    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        net = model()
        opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        plan = {"switches": Switches, "compresses": Compresses}.get(strategy, lambda: strategy)()
        net, opt = pt.parallelize(net, opt, plan=plan)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        for step in range(steps):
            x, y = batch(step, dist.get_rank())
            opt.zero_grad()
            scaler.scale(torch.nn.functional.cross_entropy(net(x), y)).backward()
            scaler.step(opt)
            scaler.update()
        found.append(torch.cat([v.reshape(-1) for v in net.state_dict().values()]))
        pt.close(net)
    return float((found[0] - found[1]).norm() / found[0].norm())


def resumed(folder, strategy, steps, until):
    """Trains up to step `until`, saving every 2; the parameters' sum at the end and where it began."""
    import paceline.train as pt

    rank, world = dist.get_rank(), dist.get_world_size()
    net = model()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    net, opt = pt.parallelize(net, opt, plan=strategy)
    saved = pt.Checkpoints(folder)
    start = saved.load(net, opt)
    for step in range(start, until):
        x, y = batch(step, 0, 12)
        mine = slice(rank * 12 // world, (rank + 1) * 12 // world)
        opt.zero_grad()
        torch.nn.functional.cross_entropy(net(x[mine]), y[mine]).backward()
        opt.step()
        if (step + 1) % 2 == 0:
            saved.save(step + 1, net, opt)
    saved.wait()
    total = sum(v.double().sum().item() for v in net.state_dict().values())
    pt.close(net)
    return {"start": start, "total": total, "steps": saved.steps()}


def handed_on(folder, names):
    """Two steps with each strategy, from the checkpoint of the one before."""
    import paceline.train as pt

    out = []
    for name in names:
        net = torch.nn.Linear(20, 10)
        opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        pt.parallelize(net, opt, plan=name)
        saved = pt.Checkpoints(folder)
        start = saved.load(net, opt)
        for step in range(start, start + 2):
            x, y = batch(step, dist.get_rank())
            opt.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
        saved.save(start + 2, net, opt)
        saved.wait()
        dist.barrier()
        pt.close(net)
        out.append(
            {
                "start": start,
                "momentum": opt.param_groups[0]["momentum"],
                "weight_decay": opt.param_groups[0]["weight_decay"],
            }
        )
    return out


def paused(plan):
    """How far apart the gradients of ranks are after a pass within `no_sync`, and after the one behind it."""
    import paceline.train as pt

    net, ids = decoder()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    net, opt = pt.parallelize(net, opt, plan=plan)
    mine = ids.chunk(dist.get_world_size())[dist.get_rank()]

    def apart():
        gradient = torch.cat([p.grad.flatten() for p in net.parameters()])
        mean = gradient.clone()
        dist.all_reduce(mean)
        return float((gradient - mean / dist.get_world_size()).norm() / gradient.norm())

    with pt.of(net).no_sync():
        token_loss(net(mine), mine).backward()
    within = apart()
    token_loss(net(mine), mine).backward()
    found = [within, apart()]
    pt.close(net)
    return found


def parallel_all(runs):
    return [globals()[name](**arguments) for name, arguments in runs]
