"""A parameter whose update is on its way waits where it is read, and only there."""

import copy
import io

import pytest
import torch
from torch import nn

from paceline.train.strategies.pending import Pending, arrive, await_with, here


@pytest.fixture
def pending():
    """A parameter of zeros that becomes ones when it arrives, and how often it was asked to."""
    parameter, asked = nn.Parameter(torch.zeros(2, 3)), []

    def bring():
        asked.append(True)
        here(parameter)
        with torch.no_grad():
            parameter.fill_(1)

    await_with(parameter, bring)
    return parameter, asked


def saved(parameter):
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    return torch.load(file)


READS = {
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "operator": lambda p: p + 0,
    "lists": lambda p: torch._foreach_add([p], 0)[0],
    "in place": lambda p: torch.zeros(2, 3).lerp_(p.detach(), 1.0),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "deepcopy": copy.deepcopy,
    "pickle": saved,
    "keyword": lambda p: torch.add(torch.zeros(2, 3), other=p),
    "pointer": lambda p: (p.data_ptr(), p)[1],
    "words": lambda p: (str(p), p)[1],
    "equal": lambda p: (torch.equal(p, p), p)[1],
}


@pytest.mark.parametrize("read", READS)
def test_reading_waits(pending, read):
    parameter, asked = pending
    found = READS[read](parameter)
    assert asked == [True]
    assert torch.equal(found.detach(), torch.ones(2, 3)) and type(parameter) is nn.Parameter
    assert type(found) is not Pending


def test_looking_does_not(pending):
    parameter, asked = pending
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.zero_grad()
    parameter.grad = None
    assert (
        parameter.shape == (2, 3)
        and parameter.numel() == 6
        and parameter.dim() == 2
        and parameter.requires_grad
        and parameter.is_leaf
    )
    assert (
        parameter.dtype == torch.float32
        and parameter.device.type == "cpu"
        and isinstance(parameter, nn.Parameter)
    )
    assert {parameter: 1}[parameter] == 1
    assert not asked and type(parameter) is Pending


def test_others_are_left_alone(pending):
    parameter, asked = pending
    other = nn.Parameter(torch.ones(2))
    here(other)
    arrive(other)
    arrive("text")
    await_with(parameter, lambda: pytest.fail("it is awaited already"))
    assert torch.equal(other.detach() + other.detach(), torch.full((2,), 2.0)) and not asked
    arrive(parameter)
    assert asked == [True]


def test_an_update_that_fails_is_said_once():
    parameter = nn.Parameter(torch.zeros(2))

    def bring():
        here(parameter)
        raise RuntimeError("rank 1 is gone")

    await_with(parameter, bring)
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        parameter.sum()
    assert float(parameter.detach().sum()) == 0
