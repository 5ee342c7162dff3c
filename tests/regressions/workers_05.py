"""Ranks of `test_05_two_passes_before_a_step`: gradients of several passes of one step, by compressor."""

import torch
import torch.distributed as dist

import paceline.train as pt


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 64, bias=False),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 4),
    )


class Turns(torch.nn.Module):
    """Two halves, of which a pass uses one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.halves = torch.nn.ModuleList(torch.nn.Linear(32, 48) for _ in range(2))
        self.head = torch.nn.Linear(48, 4)

    def forward(self, x, which):
        return self.head(self.halves[which](x).tanh())


def data(number):
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def optimizer_for(net, **settings):
    chosen = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, **settings}
    return torch.optim.SGD(net.parameters(), **chosen)


def losses(net, step, passes=2):
    return [net(data(10 * step + number)).square().mean() for number in range(passes)]


def parallel(plan, wrapped=False, make=network, **settings):
    inner = make()
    optimizer = optimizer_for(inner, **settings)
    outer = inner
    if wrapped:  # gradients lie in buckets under Nesterov, for both cases
        views = settings.get("nesterov", False)
        outer = torch.nn.parallel.DistributedDataParallel(
            inner, gradient_as_bucket_view=views, find_unused_parameters=make is Turns
        )
    return (inner, *pt.parallelize(outer, optimizer, plan=plan))


def true_gradients(step, passes=2):
    """Means over ranks of the sum of the passes at the first parameters, in one vector."""
    net = network()
    sum(losses(net, step, passes)).backward()
    mean = joined(p.grad for p in net.parameters())
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def joined(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def trained(plan, loop, wrapped=False, steps=12, **settings):
    """Parameters after some steps of one of the loops below."""
    inner, net, optimizer = parallel(plan, wrapped, **settings)
    for step in range(steps):
        optimizer.zero_grad()
        loop(net, step)
        optimizer.step()
    pt.close(net)
    return joined(inner.parameters())


def two_passes(net, step):
    for number in range(2):
        net(data(10 * step + number)).square().mean().backward()


def one_pass(net, step):
    sum(losses(net, step)).backward()


def one_graph(net, step):
    """Two passes through one forward pass."""
    loss = sum(losses(net, step))
    (0.25 * loss).backward(retain_graph=True)
    (0.75 * loss).backward()


def some_paused(net, step):
    """Sent, added up, sent."""
    (0.5 * net(data(10 * step)).square().mean()).backward()
    with pt.of(net).no_sync():
        (0.5 * net(data(10 * step)).square().mean()).backward()
    net(data(10 * step + 1)).square().mean().backward()


def in_turns(net, step):
    for number in range(2):
        net(data(10 * step + number), number).square().mean().backward()


def both_halves(net, step):
    sum(net(data(10 * step + number), number).square().mean() for number in range(2)).backward()


def thrown_away(net, step):
    net(data(10 * step + 5)).square().mean().backward()
    net.zero_grad()
    two_passes(net, step)


def exact(wrapped=False):
    """How far from DDP plans end that send everything, by plan and loop; momentum and decay are of steps."""
    found = {}
    loops = [two_passes, some_paused]
    if not wrapped:  # DDP wants a forward pass before each backward pass
        loops.append(one_graph)
    plans = [
        "dgc:ratio=1,min_elements=0,masking=false",
        "dgc:ratio=1,masking=false",
        "topk:ratio=1,min_elements=0",
        "randomk:ratio=1,min_elements=0",
        "powersgd:rank=64",
        "allreduce",
    ]
    for nesterov in (False, True):
        expected = trained("ddp", one_pass, nesterov=nesterov)
        for plan in plans:
            for loop in loops:
                far = (trained(plan, loop, wrapped, nesterov=nesterov) - expected).abs().max()
                found[f"{plan} {loop.__name__} nesterov={nesterov}"] = float(far)
        expected = trained("ddp", both_halves, make=Turns, nesterov=nesterov)
        for plan in plans:
            far = (trained(plan, in_turns, wrapped, make=Turns, nesterov=nesterov) - expected).abs().max()
            found[f"{plan} in_turns nesterov={nesterov}"] = float(far)
    plan = "dgc:ratio=1,min_elements=0,masking=false,momentum=0"
    far = (trained(plan, thrown_away, wrapped, momentum=0) - trained("ddp", one_pass, momentum=0)).abs().max()
    found["thrown away"] = float(far)
    return found


def owed(plan, wrapped=False, scaled=False):
    """How far what two passes sent plus what is held back (mean over ranks) is from the true gradient,
    relative.
    """
    inner, net, _ = parallel(plan, wrapped, weight_decay=0.0, momentum=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scaled else None
    if scaled:
        pt.of(net).scaler = scaler
    for number in range(2):
        loss = net(data(number)).square().mean()
        (scaler.scale(loss) if scaled else loss).backward()
    strategy = pt.of(net)
    sent = joined(p.grad for p in inner.parameters()) / (64.0 if scaled else 1.0)
    held = joined(_held(strategy, name, p) for name, p in strategy.parameters)
    dist.all_reduce(held)
    every = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(every, sent)
    assert all(torch.equal(one, sent) for one in every), plan
    pt.close(net)
    true = true_gradients(0)
    return float((sent + held / dist.get_world_size() - true).norm() / true.norm())


def _held(strategy, name, parameter):
    kept = strategy.compressors[name].state.get(name, {}).get("residual")
    return torch.zeros(parameter.numel()) if kept is None else kept


def conserved(plans, wrapped=False, scaled=False):
    return {plan: owed(plan, wrapped, scaled) for plan in plans}


def apart(plans):
    """Of each plan without memory, whether the second pass adds what it would send by itself, drawn anew."""
    found = {}
    for plan in plans:
        inner, net, _ = parallel(plan, weight_decay=0.0, momentum=0.0)
        loss = losses(net, 0, passes=1)[0]
        loss.backward(retain_graph=True)
        weight = inner[2].weight
        first = weight.grad.clone()
        loss.backward()
        second = weight.grad - first
        like = torch.cosine_similarity(first.reshape(1, -1), second.reshape(1, -1))
        found[plan] = {
            "same": torch.allclose(first, second, rtol=1e-4, atol=1e-7),
            "like": float(like),
            "times": float(second.norm() / first.norm()),
        }
        pt.close(net)
    return found


def long_runs(plans):
    """The largest parameter after 60 steps of two passes, for every plan."""
    return {plan: float(trained(plan, two_passes, steps=60).abs().max()) for plan in plans}
