"""The optimizer's state as workers save it, and as servers keep it: one and the same, however parameters are
cut.
"""

import pytest
import torch

from paceline.train.asynchronous.flat import FlatVector
from paceline.train.asynchronous.moments import divided, packed, unpacked, whole
from paceline.train.asynchronous.policy import UpdatePolicy
from paceline.train.asynchronous.shard import Shard


def trained(steps):
    """A model with two parameter groups after some steps of Adam, and its gradients."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)
    optimizer = torch.optim.Adam(
        [{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters()}], lr=0.01
    )
    for _ in range(steps):
        for p in (*first.parameters(), *second.parameters()):
            p.grad = torch.randn_like(p)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_servers_go_on_from_it_and_give_it_back(servers):
    optimizer = trained(3)
    flat = FlatVector(optimizer)
    shards = flat.shards(servers)
    kept = [unpacked(packed(one)) for one in divided(flat.parameters, shards, optimizer.state)]
    sizes = [size for size, _ in shards]
    served = [
        Shard(start, parts, torch.optim.Adam, UpdatePolicy())
        for start, (_, parts) in zip(flat.values().split(sizes), shards, strict=True)
    ]
    for shard, one in zip(served, kept, strict=True):
        shard.load_moments(one)
    for p in flat.parameters:
        p.grad = torch.randn_like(p)
    for shard, piece in zip(served, flat.gradients().split(sizes), strict=True):
        shard.push(0, 1, 0, piece)
    optimizer.step()
    assert torch.equal(torch.cat([shard.values.detach() for shard in served]), flat.values())
    found = whole(flat.parameters, shards, [shard.moments() for shard in served])
    for p in flat.parameters:
        assert found[p].keys() == optimizer.state[p].keys()
        for name, value in optimizer.state[p].items():
            assert torch.equal(found[p][name], value) and found[p][name].shape == value.shape


def test_without_state_there_is_none():
    optimizer = trained(0)
    flat = FlatVector(optimizer)
    kept = divided(flat.parameters, flat.shards(2), optimizer.state)
    assert kept == [[{}], [{}, {}]] or not any(any(one) for one in kept)
    assert whole(flat.parameters, flat.shards(2), kept) == {}
