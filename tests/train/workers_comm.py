"""What the ranks of `test_comm` run."""

import gc
import json
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from networks import alone, batch, decoder, descend, model, token_loss

from paceline.errors import RunError
from paceline.train.comm import Collective, Engine
from paceline.train.launch import RESULTS


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
