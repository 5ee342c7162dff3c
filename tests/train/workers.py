"""What the ranks of tests run; reached as `workers:NAME` with this folder on the path."""

import contextlib
import copy
import gc
import hashlib
import json
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.errors import RunError
from paceline.spec.compression import Float32
from paceline.train.comm import Collective, Engine
from paceline.train.launch import RESULTS
from paceline.train.strategies.auto import Auto, Choice


def ordered(jobs=60, seed=0):
    """Jobs of one to three collectives with random delays between, on two channels; the digest of what was
    issued and the results.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    chance = random.Random(seed * 100 + rank)

    def job(i):
        time.sleep(chance.random() * 3e-3)
        total = (yield Collective("sum", [torch.full((i + 1,), float(rank + i))]))[0][0]
        if i % 3:
            time.sleep(chance.random() * 3e-3)
            parts = yield Collective(
                "gather", [torch.tensor([rank, i], dtype=torch.int16), torch.full((3,), float(rank))]
            )
            assert [p[0].tolist() for p in parts] == [[r, i] for r in range(world)]
        if i % 3 == 2:
            (rows,) = yield Collective("exchange", [torch.arange(world * 2.0).view(world, 2) + 100 * rank])
            assert rows.tolist() == [[2 * rank + 100 * r, 2 * rank + 1 + 100 * r] for r in range(world)]
        return total[0].item()

    with Engine(timeout_s=30) as engine:
        tickets = []
        for i in range(jobs):
            channel = "gradients" if i % 4 or i % 3 else "parameters"
            tickets.append(
                engine.submit(
                    f"job {i}",
                    job(i),
                    channel=channel,
                    after=tickets[-1:] if i % 7 == 0 else (),
                    bare=i % 5 == 0,
                )
            )
            time.sleep(chance.random() * 1e-3)
        results = [t.wait() for t in tickets]
        assert results == [sum(r + i for r in range(world)) for i in range(jobs)]
        return engine.order()


def duplex(size=1 << 20, late=0.05, times=4):
    """Seconds of a gather of `size` bytes in which rank 1 comes late: what rank 0 has announced must not make
    one direction wait for the other.

    The least of a few: on a busy machine a single one may be held up.
    """

    def job():
        yield Collective("gather", [torch.zeros(size, dtype=torch.uint8)])

    with Engine(timeout_s=30) as engine:
        engine.submit("first", job()).wait()
        found = []
        for _ in range(times):
            dist.barrier()
            start = time.perf_counter()
            if dist.get_rank() == 1:
                time.sleep(late)
            engine.submit("second", job()).wait()
            dist.barrier()
            found.append(time.perf_counter() - start - late)
        return min(found)


def stalls(how):
    """Rank 1 never comes to the second all-reduce."""
    engine = Engine(timeout_s=2)

    def job():
        yield Collective("sum", [torch.ones(1000)])

    engine.submit("first", job()).wait()
    if dist.get_rank() == 1:
        if how == "dies":
            raise SystemExit(3)
        time.sleep(8)
        return ""
    try:
        engine.submit("conv1.weight", job()).wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def held(like=None, patience_s=10.0):
    """Threads and open files of this process; on a busy machine what was let go takes a moment to be gone: as
    few as `like`, if that can be had.
    """
    deadline = time.monotonic() + patience_s
    while True:
        found = [len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("task", "fd")]
        if (
            like is None
            or all(now <= then for now, then in zip(found, like, strict=True))
            or time.monotonic() > deadline
        ):
            return found
        time.sleep(0.05)


def opened_and_closed(rounds, strategies):
    """What is held after each round of one step with each strategy, and whether the optimizer is plain SGD
    again.
    """
    import paceline.train as pt

    seen = []
    for _ in range(rounds):
        for name in strategies:
            net = model()
            opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
            pt.parallelize(net, opt, plan=name, timeout_s=20)
            for step in range(2):
                x, y = batch(step, dist.get_rank())
                opt.zero_grad()
                torch.nn.functional.cross_entropy(net(x), y).backward()
                opt.step()
            pt.close(net)
        seen.append(held(*seen[:1]))
    assert not net._forward_pre_hooks and not any(p._post_accumulate_grad_hooks for p in net.parameters())
    assert {len(opt.state[p]) for p in net.parameters()} == {1}
    before = net[0].weight.detach().clone()
    torch.nn.functional.cross_entropy(net(x), y).backward()
    opt.step()
    return {"held": seen, "steps": not torch.equal(before, net[0].weight)}


def closes_without(how, strategy):
    """Seconds that rank 0 needs to close where rank 1 dies or does not come, and what is said before or
    then.
    """
    import paceline.train as pt

    net, told = model(), Path(os.environ[RESULTS], "closed")
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    pt.parallelize(
        net, opt, plan=strategy, timeout_s=6, **({"fc": "gradient"} if strategy == "overlap" else {})
    )
    for step in range(2):
        x, y = batch(step, dist.get_rank())
        opt.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        opt.step()
    pt.of(net).synchronize()
    if dist.get_rank() == 1:
        if how == "dies":
            Path(os.environ[RESULTS], "1.json").write_text("null")
            os._exit(0)
        deadline = time.monotonic() + 90
        while not told.exists() and time.monotonic() < deadline:  # longer than anyone should wait for it
            time.sleep(0.05)
        return None
    time.sleep(0.5)
    said = []
    for call in (
        (torch.nn.functional.cross_entropy(net(x), y).backward, opt.step, pt.of(net).synchronize)
        if how == "busy"
        else ()
    ):
        try:
            call()
        except RunError as error:
            said.append(str(error))
    start = time.perf_counter()
    try:
        pt.close(net)
    except RunError as error:
        said.append(str(error))
    seconds = time.perf_counter() - start
    told.touch()
    if how == "dies":  # the worker's last barrier would fail
        Path(os.environ[RESULTS], "0.json").write_text(json.dumps({"seconds": seconds, "said": said}))
        os._exit(0)
    return {"seconds": seconds, "said": said}


def model(seed=0, kind="mlp"):
    """A small network of one of several kinds."""
    from torch import nn

    torch.manual_seed(seed)
    if kind == "mlp":
        return nn.Sequential(
            nn.Linear(20, 64),
            nn.ReLU(),
            nn.Linear(64, 300),
            nn.ReLU(),
            nn.Linear(300, 70),
            nn.ReLU(),
            nn.Linear(70, 10),
        )
    if kind == "cnn":
        return nn.Sequential(
            nn.Unflatten(1, (1, 4, 5)),
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(320, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
    return Tied()


class Tied(torch.nn.Module):
    """Weights used twice, an attention that reads its projection's weight, a layer that is not always
    used.
    """

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(20, 32, bias=False)
        self.attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        self.spare = torch.nn.Linear(20, 20)
        self.head = torch.nn.Linear(20, 10)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls % 3 == 0:
            x = x + self.spare(x)
        h = self.embed(x).unsqueeze(1)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(torch.nn.functional.linear(h.squeeze(1), self.embed.weight.t()))


def optimizer_of(name, parameters):
    parameters = list(parameters)
    if name == "adam":
        return torch.optim.AdamW(parameters, lr=3e-3)
    if name in ("lars", "lamb"):
        from paceline.train import LAMB, LARS

        return (
            LARS(parameters, lr=0.5, weight_decay=1e-3, eta=0.02)
            if name == "lars"
            else LAMB(parameters, lr=0.01)
        )
    half = len(parameters) // 2
    return torch.optim.SGD(
        [{"params": parameters[:half]}, {"params": parameters[half:], "weight_decay": 1e-3}],
        lr=0.05,
        momentum=0.9,
    )


def batch(step, rank, size=8):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, 20, generator=generator)
    return x, (x[:, :10].argmax(1))


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


def decoder(kind="gpt"):
    """A tiny decoder of the catalog, the same on all ranks, and a batch of ids for all of them."""
    from paceline.catalog.models.gpt import gpt
    from paceline.catalog.models.llama import llama

    torch.manual_seed(0)
    if kind == "gpt":
        net, _, _ = gpt(batch=4, seq=16, width=32, depth=4, heads=4, vocab=50, context=16)
    else:
        net, _, _ = llama(batch=4, seq=16, width=32, depth=4, heads=4, kv_heads=2, inner=64, vocab=50)
    ids = torch.randint(0, 50, (8, 16), generator=torch.Generator().manual_seed(1))
    return net, ids


def token_loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def alone(kind, steps):
    """Losses of one process with the whole batch."""
    net, ids = decoder(kind)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = token_loss(net(ids), ids)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


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


def parallel_all(runs):
    return [globals()[name](**arguments) for name, arguments in runs]


class Switches(Auto):
    """Takes `overlap` after two steps, whatever the link."""

    def __init__(self):
        super().__init__(watch=2, trial=False)

    def _choose(self):
        return Choice(
            strategy="overlap",
            expected_s={},
            mixes={"overlap": {"0.weight": Float32()}},
            reason="",
            setting=None,
            profile=None,
        )


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


def wired(strategies, steps=4):
    """Bytes that the interface sent per step, and those that the strategy counts; of two ranks."""
    import paceline.train as pt
    from paceline.train.record import sent_bytes

    out = []
    for name in strategies:
        torch.manual_seed(0)
        net = torch.nn.Linear(1024, 512, bias=False)
        net, opt = pt.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), plan=name)
        x = torch.randn(8, 1024)
        for step in range(steps + 2):
            if step == 2:
                dist.barrier()
                before = sent_bytes()
            opt.zero_grad()
            net(x).square().sum().backward()
            opt.step()
        dist.barrier()
        sent = (sent_bytes() - before) / steps
        out.append((sent, pt.of(net).wire_bytes()))
        pt.close(net)
    return out


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
    scaled = (
        torch.amp.GradScaler("cpu", init_scale=8.0) if grad_scaler else pt.Scaler(8.0) if scaler else None
    )
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


def saves_badly(folder):
    """Three checkpoints; rank 1 finds no room for its part of the second."""
    import paceline.train as pt
    from paceline.train import checkpoint

    net = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    saved, real, out = pt.Checkpoints(folder), torch.save, {}

    def full(content, path):
        raise OSError(28, "No space left on device")

    for step in (1, 2, 3):
        if dist.get_rank() == 1 and step == 2:
            checkpoint.torch.save = full
        start = time.perf_counter()
        saved.save(step, net, opt)
        saved.wait()
        checkpoint.torch.save = real
        if step == 2:
            out = {"seconds": time.perf_counter() - start, "problem": saved.problem}
        dist.barrier()
    return {**out, "steps": saved.steps()}


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


def interrupted(
    folder, strategy, options=None, kind="mlp", optimizer="sgd", steps=9, at=4, options_then=None, size_then=8
):
    """Trains, and once more from the checkpoint of step `at` on: bits of parameters and optimizer state at
    both ends, and what layers exchange.
    """
    import paceline.train as pt

    rank, out = dist.get_rank(), []
    saved = pt.Checkpoints(folder, keep=1, asynchronous=False)
    for again in (False, True):
        net = model(kind=kind)
        opt = optimizer_of(optimizer, net.parameters())
        pt.parallelize(
            net,
            opt,
            plan=strategy,
            **((options_then if again and options_then is not None else options) or {}),
        )
        start = saved.load(net, opt) if again else 0
        found = any(getattr(pt.of(net), name, None) for name in ("parts", "_agreed", "steps"))
        if kind == "tied":
            net.calls = start
        for step in range(start, steps):
            x, y = batch(step, rank, size_then if again else 8)
            opt.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
            if step + 1 == at and not again:
                saved.save(at, net, opt)
                saved.wait()
                dist.barrier()
        arranged = getattr(pt.of(net), "_arrangement", None)
        state = pt.of(net).optimizer_state()["state"]
        pt.close(net)
        kept = [
            *net.state_dict().values(),
            *(value for one in state.values() for value in one.values() if isinstance(value, torch.Tensor)),
        ]
        bits = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in kept)).hexdigest()
        out.append(
            {
                "start": start,
                "found": found,
                "bits": bits,
                "arranged": arranged and [*arranged.factors.values()],
                "finite": all(bool(torch.isfinite(tensor).all()) for tensor in kept),
            }
        )
    return out


def interrupted_all(folder, runs):
    return [interrupted(f"{folder}/{i}", **one) for i, one in enumerate(runs)]


def split_and_whole(plans, rounds):
    """Threads and files held after each round of two steps under each plan; of the last round, what became of
    models and optimizers.
    """
    seen, out = [], []
    for number in range(rounds):
        out = [closed(plan, last=number == rounds - 1) for plan in plans]
        gc.collect()
        seen.append(held(*seen[:1]))
    return {"held": seen, "found": out, "alone": alone("gpt", 4)[2:]}


def closed(plan, last):
    """Two steps under a plan, then it is closed; two more of each rank by itself, with all samples, unless it
    has some stages only.
    """
    import paceline.train as pt

    net, ids = decoder("gpt")
    kinds, rank, said = [type(module) for module in net.modules()], dist.get_rank(), None
    if "pp=" in plan:
        runner = pt.Pipeline(
            net, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), plan, token_loss
        )
        opt, parts, mine = runner.optimizer, runner.stages, ids.chunk(runner.dp)[runner.replica]
        for _ in range(2):
            runner.step(mine, mine)
        for _ in range(2):  # the second time there is nothing left to do
            pt.close(runner)
        try:
            runner.step(mine, mine)
        except RunError as error:
            said = str(error)
    else:
        opt, parts, tp = (
            torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
            [net],
            2 if "tp=2" in plan else 1,
        )
        pt.parallelize(net, opt, plan=plan)
        for _ in range(2):
            descend(net, opt, ids.chunk(dist.get_world_size() // tp)[rank // tp])
        pt.close(net)
    if not last:
        return None
    parameters = {p for part in parts for p in part.parameters()}
    state = [value for entries in opt.state.values() for value in entries.values()]
    return {
        "plan": plan,
        "said": said,
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()),
        "plain": (
            {type(p).__name__ for p in parameters} == {"Parameter"}
            and {type(value).__name__ for value in state} == {"Tensor"}
        ),
        "state": len(opt.state) == len(parameters),
        "kinds": "tp=" in plan or kinds == [type(module) for module in net.modules()],
        "losses": None if "pp=" in plan else [descend(net, opt, ids) for _ in range(2)],
    }


def descend(net, opt, ids):
    """A step; its loss."""
    opt.zero_grad()
    loss = token_loss(net(ids), ids)
    loss.backward()
    opt.step()
    return loss.item()
