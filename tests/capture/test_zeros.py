"""Zeros of networks whose zeros are known."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from paceline.capture import real_step
from paceline.capture.zeros import count_zeros
from paceline.errors import SpecError


def known():
    """Two linear layers round a ReLU: a quarter of the hidden units is never above zero."""
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].weight[:, 0] = 1.0
        net[0].bias.zero_()
        net[0].bias[:8] = -100.0  # eight adjacent units are off, the others follow the input
        net[2].weight.fill_(1.0)
    x = torch.zeros(8, 4)
    x[:, 0] = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
    return net, x


def found(net, x, times=1):
    return count_zeros(net, [partial(lambda: net(x).sum())] * times)


def test_known_zeros():
    net, x = known()
    zeros = found(net, x)
    first, last = zeros.layers
    assert first.inputs == 0.75 and first.dead_inputs == 0.75 and first.weight_zeros == 0.75
    assert last.inputs == 0.75  # eight of 16 units always, the others in half of the samples
    assert last.dead_inputs == 0.5
    assert last.input_vectors == 0.75  # units are off in groups of eight
    assert first.output_gradients == 0.75 and last.output_gradients == 0.0
    assert first.multiply_adds == 8 * 4 * 16 and last.multiply_adds == 8 * 16 * 2
    assert not first.passes_gradient and last.passes_gradient
    relu = zeros.activations[0]
    assert relu.kind == "ReLU" and relu.outputs == 0.75 and relu.output_gradients == 0.0


def test_skippable_products():
    first, last = found(*known()).layers
    assert first.skippable == (1 - 0.25 * 0.25, 1 - 0.25 * 0.25)
    forward, backward = last.skippable
    assert forward == 0.75 and backward == 0.75 + 0.0  # of the weights' gradient, none of the input's


def test_several_passes_are_pooled_and_nothing_is_left_behind():
    net, x = known()
    assert found(net, x, 3).layers[1].inputs == found(net, x).layers[1].inputs
    assert found(net, x, 3).layers[1].multiply_adds == 3 * 8 * 16 * 2
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_in_place_relu_is_seen_by_the_next_layer():
    net, x = known()
    net[1] = nn.ReLU(inplace=True)
    zeros = found(net, x)
    assert zeros.layers[1].inputs == 0.75 and zeros.layers[0].output_gradients == 0.75


def test_channels_of_a_convolution():
    net = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(4, 2, 1))
    x = torch.ones(2, 8, 5, 5)
    x[:, :, 0] = 0  # all channels of a row of points
    x[:, 3] = 0
    first = found(net, x).layers[0]
    assert math.isclose(first.inputs, 1 - 7 / 8 * 4 / 5)
    assert math.isclose(first.input_vectors, 0.2) and first.dead_inputs == 1 / 8
    assert (first.outputs, first.inputs_each, first.points) == (4, 72, 9)
    assert first.multiply_adds == 2 * 25 * 4 * 72


def test_a_ragged_last_vector_counts_as_long_as_it_is():
    net, x = nn.Sequential(nn.Linear(10, 3)), torch.ones(4, 10)
    x[:, 8:] = 0
    assert math.isclose(found(net, x).layers[0].input_vectors, 0.2)


def test_networks_without_layers_and_losses_that_are_no_numbers():
    with pytest.raises(SpecError, match="no linear layer or convolution"):
        scale = nn.Parameter(torch.ones(()))
        count_zeros(nn.Sequential(nn.ReLU()), [lambda: scale * 1])
    net, x = known()
    with pytest.raises(SpecError, match="the loss of a measured pass is nan"):
        count_zeros(net, [lambda: net(x * math.nan).sum()])


def test_catalog_models_run_with_values():
    job = real_step.real_step("gpt2-124m", batch=1, seq=8)
    assert not any(parameter.is_meta for parameter in job.module.parameters())
    assert job.args[0].shape == (1, 8) and int(job.args[0].max()) > 0
    assert torch.isfinite(real_step.loss_of(job))


def test_files_are_built_with_their_own_values(tmp_path):
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "def build(batch):\n"
        "    net = nn.Linear(128, 64)\n"
        "    nn.init.constant_(net.weight, 2.0)\n"
        "    return net, torch.ones(batch, 128), lambda out: out.mean()\n"
    )
    job = real_step.real_step(f"{file}:build", batch=3)
    assert float(job.module.weight.detach().min()) == 2.0 and float(job.args[0].sum()) == 3 * 128
    before = float(real_step.loss_of(job).detach())
    real_step.take_steps(job, 2)
    assert float(real_step.loss_of(job).detach()) < before
