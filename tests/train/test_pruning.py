"""Pruning by granularity: what is kept, that it stays so, and what a task loses."""

import math

import pytest
import torch
from torch import nn

from paceline.errors import SpecError
from paceline.spec.sparsity import Granularity, PrunedRun
from paceline.train.pruning import keep_pruned, kept_share, prune, unit_mask
from paceline.train.tasks import get
from paceline.train.tasks.pruned import DENSITIES, pruned_runs, ways

CONVOLUTION = torch.randn(16, 8, 3, 3, generator=torch.Generator().manual_seed(0))


def units(mask, height, width):
    """Kept values of each whole unit of a mask."""
    matrix = mask.reshape(len(mask), -1)
    return matrix.reshape(len(matrix) // height, height, -1, width).transpose(1, 2).sum((2, 3))


@pytest.mark.parametrize(
    ("granularity", "height", "width"),
    [("element", 1, 1), ("vector", 1, 8), ("kernel", 1, 9), ("block", 8, 8), ("filter", 1, 72)],
)
@pytest.mark.parametrize("density", [0.5, 0.25])
def test_whole_units_of_the_largest_magnitude_are_kept(granularity, height, width, density):
    mask = unit_mask(CONVOLUTION, Granularity.of(granularity), density)
    counts = units(mask, height, width)
    kept = counts > 0
    assert set(counts.flatten().tolist()) == {0, height * width}
    assert int(kept.sum()) == round(density * kept.numel())
    sizes = units(CONVOLUTION.abs(), height, width)
    assert sizes[kept].min() >= sizes[~kept].max()


def test_two_of_four():
    mask = unit_mask(CONVOLUTION, Granularity.TWO_FOUR, 0.5)
    fours = mask.reshape(-1, 4)
    assert (fours.sum(1) == 2).all()
    magnitudes = CONVOLUTION.abs().reshape(-1, 4)
    assert torch.equal((magnitudes * fours).sum(1), magnitudes.topk(2).values.sum(1))


def test_ragged_edges_are_units_too():
    mask = unit_mask(torch.ones(10, 10), Granularity.BLOCK, 0.25)
    assert int(mask.sum()) in (64, 16, 4)
    assert int(unit_mask(torch.ones(2, 9), Granularity.TWO_FOUR, 0.5).sum()) == 2 * (2 + 2 + 1)


def test_the_last_layer_stays():
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    before = net[2].weight.clone()
    masks = prune(net, Granularity.ELEMENT, 0.25)
    assert list(masks) == ["0.weight"] and kept_share(masks) == 0.25
    assert torch.equal(net[2].weight, before) and int((net[0].weight != 0).sum()) == 16


def test_weights_stay_pruned_through_momentum_and_decay():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    net(torch.randn(8, 16)).sum().backward()
    optimizer.step()  # momentum of weights that are pruned afterwards
    masks = prune(net, Granularity.TWO_FOUR)
    keep_pruned(optimizer, net, masks)
    before = net[0].weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(8, 16)).sum().backward()
        optimizer.step()
    assert not net[0].weight[~masks["0.weight"]].any()
    assert not torch.equal(net[0].weight, before)


@pytest.mark.parametrize(
    ("granularity", "density", "message"),
    [
        ("element", 0.0, "above 0 and at most 1"),
        ("element", 1.5, "above 0 and at most 1"),
        ("2:4", 0.25, "2:4 keeps a half"),
        ("kernel", 0.5, "no layer to prune by kernel"),
    ],
)
def test_densities_and_layers_that_do_not_fit(granularity, density, message):
    with pytest.raises(SpecError, match=message):
        prune(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Granularity.of(granularity), density)


def test_an_unknown_granularity_names_the_nearest():
    with pytest.raises(SpecError, match="did you mean 'vector'"):
        Granularity.of("vectr")


def test_ways_of_a_network_without_convolutions():
    kinds = {way.granularity for way in ways(get("text-mlp").model())}
    assert kinds == set(Granularity) - {Granularity.KERNEL}
    assert len(list(ways(get("digits-cnn").model()))) == 1 + 5 * len(DENSITIES) + 1


def test_a_task_pruned_in_every_way():
    runs = pruned_runs("digits-cnn", [0, 1], steps=60)
    assert len(runs) == 17 and all(len(run.retrained) == 2 for run in runs)
    by_way = {(run.granularity, round(run.density, 1)): run for run in runs}
    assert by_way[Granularity.ELEMENT, 1.0].pruned == by_way[Granularity.ELEMENT, 1.0].dense
    free, coarse = by_way[Granularity.ELEMENT, 0.5], by_way[Granularity.BLOCK, 0.1]
    assert free.dense == coarse.dense
    assert sum(free.retrained) > sum(coarse.retrained)
    assert free.lost[0] < 0.1 < coarse.lost[0]


def test_the_interval_is_that_of_paired_seeds():
    run = PrunedRun(
        task="t",
        granularity=Granularity.ELEMENT,
        density=0.5,
        dense=(0.9, 0.8, 0.7),
        pruned=(0.1, 0.1, 0.1),
        retrained=(0.88, 0.77, 0.66),
    )
    mean, half = run.lost
    assert math.isclose(mean, 0.03) and math.isclose(half, 4.303 * 0.01 / math.sqrt(3), rel_tol=1e-6)
