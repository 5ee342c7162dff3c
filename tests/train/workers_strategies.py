"""What the ranks of `test_strategies` run."""

import torch
import torch.distributed as dist
from networks import batch, model, optimizer_of


def follow(
    strategy=None, steps=20, kind="mlp", optimizer="sgd", buckets=3, accumulate=1, options=None, checksum=True
):
    """Trains; the parameters at the end (rank 0) with a checksum of every rank, and the losses."""
    import paceline.train as pt

    rank = dist.get_rank()
    net = model(kind=kind)
    opt = optimizer_of(optimizer, net.parameters())
    scheduler = None
    if strategy is None:
        total = sum(p.numel() for p in net.parameters()) * 4
        net = torch.nn.parallel.DistributedDataParallel(
            net, bucket_cap_mb=total / buckets / 1e6, find_unused_parameters=kind == "tied"
        )
    else:
        net, opt = pt.parallelize(net, opt, plan=strategy, **(options or {}))
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 10, 0.5)
    losses = []
    for step in range(steps):
        opt.zero_grad()
        for part in range(accumulate):
            x, y = batch(step * accumulate + part, rank)
            if part < accumulate - 1:
                with net.no_sync() if strategy is None else pt.of(net).no_sync():
                    torch.nn.functional.cross_entropy(net(x), y).backward()
            else:
                loss = torch.nn.functional.cross_entropy(net(x), y)
                loss.backward()
        opt.step()
        scheduler.step()
        losses.append(loss.item())
    state = (net.module if strategy is None else net).state_dict()
    values = torch.cat([v.double().reshape(-1) for k, v in state.items() if v.is_floating_point()])
    sums = [torch.zeros_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, values)
    same = all(torch.equal(sums[0], s) for s in sums)
    order = "" if strategy is None else pt.of(net).engine.order()
    if strategy is not None:
        pt.close(net)
    return {"same": same, "values": values.tolist() if rank == 0 else [], "losses": losses, "order": order}


def follow_all(runs):
    """Several trainings one after another in the same processes: starting Python and torch takes longer than
    they do.
    """
    return [follow(**run) for run in runs]


def pretend(runs, world=2):
    """The same trainings under torch's fake process group, in this process alone; the digests of what they
    issued.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        return [run["order"] for run in follow_all(runs)]
    finally:
        dist.destroy_process_group()


def added_up(steps, interval=1, most=4):
    """Under `lazy`, with gradients that stay the same: how many of them the bottom layer has had after each
    step, and the interval then.
    """
    import paceline.train as pt

    bottom, top = torch.nn.Linear(40, 40, bias=False), torch.nn.Linear(40, 40, bias=False)
    net = torch.nn.Sequential(bottom, top)
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    pt.parallelize(net, opt, plan="lazy", share=0.5, interval=interval, most=most, least_bytes=64)
    before, counts, intervals = bottom.weight.detach().clone(), [], []
    for _ in range(steps):
        opt.zero_grad()
        net(torch.zeros(1, 40))  # for the order of their use
        sum((layer.weight / 256).sum() for layer in net).backward()
        opt.step()
        pt.of(net).synchronize()
        counts.append(((before - bottom.weight.detach()) * 256).mean().item())
        intervals.append(pt.of(net).interval)
    pt.close(net)
    return counts, intervals
