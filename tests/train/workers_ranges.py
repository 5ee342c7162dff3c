"""What the ranks of `test_ranges` run."""

import torch
import torch.distributed as dist
from torch import nn


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def samples(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(7, 6, generator=generator) * 10.0**-rank, torch.randn(7, 3, generator=generator)


def gradients(net, rank):
    """One step that changes nothing, on the samples of a rank."""
    x, y = samples(rank)
    nn.functional.mse_loss(net(x), y).backward()


def count(both=True):
    """The record of all ranks; rank 1 looks at one layer only where not both look at all."""
    from paceline.train import Ranges

    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    rank = dist.get_rank()
    ranges = Ranges(net, optimizer, layers=None if both or not rank else ["2"])
    gradients(net, rank)
    optimizer.step()
    return ranges.result("two ranks").to_dict()
