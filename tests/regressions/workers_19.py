"""Ranks of `test_19_defaults_that_train`: `auto` until it has settled, and signSGD on a task."""

import contextlib
import io

import torch
import torch.distributed as dist

import paceline.train as pt
from paceline.train.strategies import auto as module


class Sees(module.Auto):
    """An `auto` whose model of the machine says that compression is fastest by far."""

    def _choose(self):
        found = super()._choose()
        seconds = dict.fromkeys(found.expected_s, 1.0)
        best = "dgc" if "dgc" in seconds else "overlap"
        return module.replace(found, strategy=best, expected_s={**seconds, best: 0.1})


class Undecided(module.Auto):
    """An `auto` to whose model of the machine all strategies are alike, so that it tries them."""

    def _choose(self):
        found = super()._choose()
        return module.replace(found, expected_s=dict.fromkeys(found.expected_s, 1.0))


def settles(options, folder=None, kind=Sees):
    """What `auto` took, whether gradients went compressed, and what it printed."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        net, optimizer = pt.parallelize(net, optimizer, plan=kind(watch=2, **options))
        strategy = pt.of(net)
        if folder is not None:
            pt.Checkpoints(folder).load(net, optimizer)
        for step in range(5):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    taken = strategy.state_dict().get("strategy")
    saved = None
    if folder is not None and options:
        saved = pt.Checkpoints(folder)
        saved.save(5, net, optimizer)
        saved.wait()
    with contextlib.redirect_stderr(said):
        pt.close(net)
    return {"taken": taken, "said": said.getvalue().splitlines()}


def all_of(folder):
    return {
        "default": settles({}),
        "some": settles({"loss": "some"}, folder),
        "again": settles({"loss": "some"}, folder),
        "no longer": settles({}, folder),
        "too short": settles({}, kind=Undecided),
    }
