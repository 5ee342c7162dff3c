"""Loops that are not the plain one, on real processes: the same result as that of `allreduce` (or one clear
line) under every strategy.
"""

import os
from pathlib import Path

import pytest

from paceline.train.launch import run

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
DEFERRED = ("overlap:fc=gradient", "overlap:fc=factors", "priority")


def check(names):
    """On each rank, what each function called so returns, or the line that it raises."""
    found = {}
    for name in names:
        try:
            found[name] = globals()[name]()
        except Exception as error:  # what it says is what is tested
            found[name] = f"{type(error).__name__}: {error}"
    return found


def build(plan, make, optimizer=None, **options):
    import torch

    import paceline.train as pt

    torch.manual_seed(0)
    net = make()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) if optimizer is None else optimizer(net)
    return pt.parallelize(net, opt, plan=plan, timeout_s=20, **options)


def data(step, rows=8):
    import torch
    import torch.distributed as dist

    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def ends(plan, make, step, steps=8, **options):
    """Parameters after some steps, and whether they are the same on all ranks."""
    import torch
    import torch.distributed as dist

    import paceline.train as pt

    net, opt = build(plan, make, **options)
    for number in range(steps):
        step(net, opt, number)
    mine = torch.cat([value.reshape(-1) for value in net.state_dict().values()])
    pt.close(net)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    assert all(torch.equal(one, mine) for one in every), f"{plan}: replicas differ"
    return mine


def apart(make, step, plans=DEFERRED, **options):
    """How far from `allreduce` each plan ends."""
    expected = ends("allreduce", make, step, **options)
    return {plan: float((ends(plan, make, step, **options) - expected).abs().max()) for plan in plans}


def mlp():
    import torch

    return torch.nn.Sequential(
        torch.nn.Linear(16, 24),
        torch.nn.Tanh(),
        torch.nn.Linear(24, 24),
        torch.nn.Tanh(),
        torch.nn.Linear(24, 4),
    )


def plain_step(net, opt, number):
    opt.zero_grad()
    net(data(number)).square().mean().backward()
    opt.step()


class Turns:
    """Two encoders, used in turn, and a head."""

    def __new__(cls):
        import torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two, self.head = (
                    torch.nn.Linear(16, 24),
                    torch.nn.Linear(16, 24),
                    torch.nn.Linear(24, 4),
                )

            def forward(self, x, which):
                return self.head((self.one if which else self.two)(x).tanh())

        return Net()


def alternating():
    def step(net, opt, number):
        opt.zero_grad()
        net(data(number), number % 2).square().mean().backward()
        opt.step()

    return apart(Turns, step, steps=14)


def accumulating():
    """Without `no_sync`, as DDP allows; a pass that is thrown away does not count."""

    def step(net, opt, number):
        opt.zero_grad()
        net(data(number + 50)).square().mean().backward()
        opt.zero_grad() if number % 2 else net.zero_grad()
        for part in range(3):
            net(data(10 * number + part)).square().mean().backward()
        opt.step()

    return apart(mlp, step)


def accumulating_in_turns():
    """The second pass of a step does not use what the first did."""

    def step(net, opt, number):
        opt.zero_grad()
        for part in range(2):
            net(data(10 * number + part), part).square().mean().backward()
        opt.step()

    return apart(Turns, step)


def by_another_method():
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = torch.nn.Parameter(torch.ones(16))
            self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)
            self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)

        def loss(self, x):
            y = self.first(x * self.temperature)[:, None]
            return self.last(self.attention(y, y, y)[0]).square().mean()

    def step(net, opt, number):
        opt.zero_grad()
        net.loss(data(number)).backward()
        opt.step()

    return apart(Net, step)


def in_evaluation_mode():
    def step(net, opt, number):
        net.eval()
        plain_step(net, opt, number)

    return apart(mlp, step)


def clipped():
    """Norms of the first updates."""
    import torch

    import paceline.train as pt

    def norms(plan):
        net, opt = build(plan, mlp, lambda net: torch.optim.SGD(net.parameters(), lr=1.0), clip_norm=1e-3)
        found = []
        for number in range(3):
            before = [p.detach().clone() for p in net.parameters()]
            plain_step(net, opt, number)
            pt.of(net).synchronize()
            found.append(
                float(
                    torch.cat(
                        [(p - b).reshape(-1) for p, b in zip(net.parameters(), before, strict=True)]
                    ).norm()
                )
            )
        pt.close(net)
        return found

    return {plan: norms(plan) for plan in DEFERRED}


def reentrant():
    from torch.utils.checkpoint import checkpoint

    def step(net, opt, number):
        opt.zero_grad()
        checkpoint(net, data(number).requires_grad_(), use_reentrant=True).square().mean().backward()
        opt.step()

    ends("priority", mlp, step)


def broken():
    net, opt = build("allreduce", mlp)
    handle = net[0].weight.register_hook(lambda gradient: 1 / 0)
    try:
        plain_step(net, opt, 0)
    except ZeroDivisionError:
        handle.remove()
    plain_step(net, opt, 1)


def stranger():
    import torch

    scale = torch.nn.Parameter(torch.ones(2))
    build("allreduce", mlp, lambda net: torch.optim.SGD([*net.parameters(), scale], lr=0.1))


def thawed():
    def frozen():
        net = mlp()
        net[0].requires_grad_(False)
        return net

    net, opt = build("overlap", frozen)
    plain_step(net, opt, 0)
    net[0].requires_grad_(True)
    plain_step(net, opt, 1)


def penalty():
    def step(net, opt, number):
        opt.zero_grad()
        (net(data(number)).square().mean() + net[0].weight.square().sum()).backward()
        opt.step()

    ends("overlap:fc=factors", mlp, step)


def twice():
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)

        def forward(self, x, times):
            for _ in range(times):
                x = self.first(x).tanh()
            return self.last(x)

    def step(net, opt, number):
        opt.zero_grad()
        net(data(number), 1 + number // 2).square().mean().backward()
        opt.step()

    ends("overlap:fc=factors", Net, step)


def factored():
    import torch

    build("overlap", mlp, lambda net: torch.optim.Adafactor(net.parameters()))


def lazily_scaled():
    import paceline.train as pt

    net, opt = build("lazy", mlp)
    scaler = pt.Scaler(4.0)
    for number in range(3):
        opt.zero_grad()
        scaler.scale(net(data(number)).square().mean()).backward()
        scaler.step(opt)


def lazily_accumulated():
    net, opt = build("lazy", mlp)
    for number in range(2):
        plain_step(net, opt, number)
    opt.zero_grad()
    for _ in range(2):
        net(data(2)).square().mean().backward()


def copied():
    """A copy is a model of its own: plain, with its own weights, and the one that it was made of trains
    on.
    """
    import copy

    import torch

    import paceline.train as pt

    found = {}
    for plan in (*DEFERRED, "terngrad", "local"):
        net, opt = build(plan, mlp)
        plain_step(net, opt, 0)
        plain_step(net, opt, 1)
        pt.of(net).synchronize()
        twin = copy.deepcopy(net)
        expected = net(data(5)).detach()
        plain_step(net, opt, 2)
        pt.of(net).synchronize()
        twin.zero_grad()
        twin(data(5)).sum().backward()
        found[plan] = (
            torch.equal(twin(data(5)), expected),
            not torch.equal(net(data(5)), expected),
            twin[0].weight.grad is not None,
        )
        plain_step(net, opt, 3)
        pt.close(net)
    return found


def one_after_another():
    """As on NCCL: the same result, and one order of all collectives on all ranks."""
    import torch.distributed as dist

    import paceline.train as pt
    from paceline.train import comm

    found = {}
    for plan in (
        *DEFERRED,
        "allreduce",
        "terngrad",
        "powersgd",
        "dgc:ratio=0.1",
        "lazy:adapt=false",
        "local:period=2",
    ):
        expected = ends(plan, mlp, plain_step)
        plain, comm.in_turn = comm.in_turn, lambda: True
        try:
            same = float((ends(plan, mlp, plain_step) - expected).abs().max()) == 0
            net, opt = build(plan, mlp)
            for number in range(4):
                plain_step(net, opt, number)
            pt.of(net).synchronize()
            order = [None] * dist.get_world_size()
            dist.all_gather_object(order, pt.of(net).engine.order())
            pt.close(net)
        finally:
            comm.in_turn = plain
        found[plan] = (same, len(set(order)) == 1 and not order[0].startswith("0:"))
    return found


def late_in_turn():
    """A rank that is late is named there, too."""
    import time

    import torch.distributed as dist

    import paceline.train as pt
    from paceline.train import comm

    comm.in_turn = lambda: True
    net, opt = build("terngrad", mlp)
    pt.of(net).engine.timeout_s = 2.0
    plain_step(net, opt, 0)
    if dist.get_rank():
        time.sleep(8)
    else:
        plain_step(net, opt, 1)


SAME = ("alternating", "accumulating", "accumulating_in_turns", "by_another_method", "in_evaluation_mode")


@pytest.mark.parametrize("world", [2, 3])
def test_the_same_result_as_allreduce(world):
    for rank in run(
        "test_hard_loops:check", world=world, arguments={"names": SAME}, environment=HERE, timeout_s=280
    ):
        for name, found in rank.items():
            assert isinstance(found, dict), f"{name}: {found}"
            assert all(distance < 2e-6 for distance in found.values()), f"{name}: {found}"


def test_the_first_step_is_clipped_too():
    for rank in run(
        "test_hard_loops:check", world=2, arguments={"names": ["clipped"]}, environment=HERE, timeout_s=200
    ):
        for norms in rank["clipped"].values():
            assert norms == pytest.approx([1e-3] * 3, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reentrant", "use_reentrant=False"),
        ("broken", "did not come to its end"),
        ("stranger", "shape (2,) that is not the model's"),
        ("thawed", "'0.weight' needs a gradient now"),
        ("penalty", "use fc='gradient'"),
        ("twice", "first ran more than once"),
        ("factored", "Adafactor is not known"),
        ("lazily_scaled", "loss scales differ"),
        ("lazily_accumulated", "no_sync()"),
    ],
)
def test_what_cannot_be_done_is_one_line(name, said):
    for rank in run(
        "test_hard_loops:check", world=2, arguments={"names": [name]}, environment=HERE, timeout_s=100
    ):
        assert (
            said in rank[name]
            and rank[name].startswith(("RunError: ", "SpecError: "))
            and "\n" not in rank[name]
        )


def test_copies_of_a_model_are_models_of_their_own():
    for rank in run(
        "test_hard_loops:check", world=2, arguments={"names": ["copied"]}, environment=HERE, timeout_s=200
    ):
        assert isinstance(rank["copied"], dict), rank["copied"]
        assert all(all(each) for each in rank["copied"].values()), rank["copied"]


def test_jobs_one_after_another_as_on_nccl():
    found = run(
        "test_hard_loops:check",
        world=2,
        arguments={"names": ["one_after_another", "late_in_turn"]},
        environment=HERE,
        timeout_s=250,
    )
    for rank in found:
        assert isinstance(rank["one_after_another"], dict), rank["one_after_another"]
        assert all(all(each) for each in rank["one_after_another"].values()), rank["one_after_another"]
    assert "no sign of rank 1" in found[0]["late_in_turn"] and "all-reduce" in found[0]["late_in_turn"]
