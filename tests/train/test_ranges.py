"""Values of a loop are counted by power of two, exactly, on all ranks together."""

import math
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="values of torch tensors")
from torch import nn  # noqa: E402

import paceline.train as pt  # noqa: E402
from paceline.cost.format_losses import overflowing, subnormal, vanishing  # noqa: E402
from paceline.errors import RunError, SpecError, UnknownName  # noqa: E402
from paceline.spec.number_formats import BF16, E4M3, E5M2, FORMATS, FP16, BlockFormat  # noqa: E402
from paceline.spec.value_ranges import RangeRecord, TensorKind  # noqa: E402
from paceline.train.emulated_formats import rounded  # noqa: E402
from paceline.train.launch import run  # noqa: E402
from paceline.train.ranges import relative, tally  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from workers_ranges import gradients, network, samples  # noqa: E402

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors are faster so, the more so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def spread(count=5000, low=-60.0, high=20.0, seed=0):
    """Values over many powers of two, with those at which formats round to zero and powers of two."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.empty(count).uniform_(low, high, generator=generator)
    edges = torch.exp2(torch.arange(-60.0, 20.0))
    near = torch.cat([edges, edges * (1 + 2**-20), edges * (1 - 2**-20), torch.zeros(9)])
    return torch.cat([torch.randn(count, generator=generator) * torch.exp2(powers), near, -near])


def counted(values, **options):
    return tally(values, **options).record("layer", TensorKind.WEIGHTS)


def ceiling(value):
    mantissa, exponent = math.frexp(abs(value))
    return exponent - (mantissa == 0.5)


def test_counts_are_those_of_frexp():
    tiny = torch.tensor([2.0**-149, 3 * 2.0**-149, 2.0**-127, 2.0**-126, 1.5 * 2.0**-127])
    values = torch.cat([spread(40_000), tiny, torch.tensor([3.4e38, math.inf, -math.inf, math.nan])])
    found = counted(values)
    finite = [value for value in values.double().tolist() if math.isfinite(value)]
    expected = Counter(ceiling(value) for value in finite if value)
    assert {e: found.exponents.at(e) for e in expected} == expected
    assert (found.total, found.zeros) == (sum(expected.values()), finite.count(0))
    assert (found.infinities, found.nans) == (2, 1)
    assert found.largest == max(map(abs, finite))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_are_counted_too(dtype):
    values = spread(300, -10, 10).to(dtype)
    assert counted(values) == counted(values.float())


@pytest.mark.parametrize("scale", [-3, 0, 7, 20])
@pytest.mark.parametrize(
    ("form", "dtype"),
    [(FP16, torch.float16), (BF16, torch.bfloat16), (E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)],
)
def test_what_vanishes_is_what_the_cast_makes_zero(form, dtype, scale):
    values = spread(low=-140.0 if form is BF16 else -60.0)
    there = counted(values)
    cast = (values * 2.0**scale).to(dtype).float()
    assert vanishing(there, form, scale) == int(((cast == 0) & (values != 0)).sum())
    small = (values * 2.0**scale).abs() <= 2.0**form.least_exponent
    assert subnormal(there, form, scale) == int((small & (cast != 0)).sum())


@pytest.mark.parametrize("scale", [-2, 0, 3])
@pytest.mark.parametrize(("form", "dtype"), [(FP16, torch.float16), (E5M2, torch.float8_e5m2)])
def test_whether_anything_overflows_is_exact_and_how_much_is_close(form, dtype, scale):
    edge = form.overflow_edge / 2.0**scale
    below = torch.tensor([math.nextafter(edge, 0)], dtype=torch.float64).float()
    below = torch.nextafter(below, torch.zeros(1)) if float(below) >= edge else below
    assert overflowing(counted(below), form, scale) == 0
    assert overflowing(counted(torch.tensor([edge])), form, scale) == 1
    values = spread(20_000, 0.0, 25.0)
    lost = int((values * 2.0**scale).to(dtype).float().isinf().sum())
    assert overflowing(counted(values), form, scale) == pytest.approx(lost, rel=0.02)


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if isinstance(form, BlockFormat)])
def test_what_vanishes_in_blocks(name):
    values = torch.cat([spread(3000, -20.0, 4.0), torch.zeros(64)])[:3333]
    lost = int(((rounded(values, name) == 0) & (values != 0)).sum())
    assert lost > 50
    assert vanishing(counted(values), FORMATS[name]) == lost


def test_a_loop_is_counted_by_layer_and_kind():
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with pt.Ranges(net, optimizer, every=2) as ranges:
        for step in range(5):
            optimizer.zero_grad()
            x, y = samples(0)
            nn.functional.mse_loss(net(x), y).backward()
            if step == 4:
                last = net[2].weight.grad.clone()
            optimizer.step()
        with torch.no_grad():
            net(samples(1)[0])  # evaluation is not counted
    record = ranges.result("mine")
    assert (record.steps, record.ranks, record.layers) == (3, 1, ("0", "1", "2"))
    sizes = {(each.layer, each.kind): each.elements for each in record.ranges}
    assert sizes["0", TensorKind.WEIGHTS] == sizes["0", TensorKind.WEIGHT_GRADIENTS] == 3 * 35
    assert sizes["1", TensorKind.ACTIVATIONS] == sizes["1", TensorKind.ACTIVATION_GRADIENTS] == 3 * 35
    assert ("1", TensorKind.WEIGHTS) not in sizes
    assert last.abs().max() <= record.of(layer="2", kind=TensorKind.WEIGHT_GRADIENTS)[0].largest
    net(samples(0)[0]).sum().backward()
    optimizer.step()
    assert ranges.result("mine") == record, "closed: counts no more"


def test_layers_scales_and_updates():
    class Twice:
        def get_scale(self):
            return 8.0

    records = []
    for scaler in (None, Twice()):
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        ranges = pt.Ranges(net, optimizer, layers=["2"], scaler=scaler)
        x, y = samples(0)
        (nn.functional.mse_loss(net(x), y) * (8.0 if scaler else 1.0)).backward()
        if scaler:
            for parameter in net.parameters():
                parameter.grad /= 8.0
        optimizer.step()
        records.append(ranges.result())
    assert records[0].layers == ("2",)
    assert records[0] == records[1], "gradients are those without the scale"
    before, after = torch.tensor([3.0, 0.0, -0.75]), torch.tensor([3.5, 1.0, -0.5])
    assert relative(after, before).tolist() == [0.25, 0.0, 0.5]


def test_two_ranks_are_added_up():
    first, second = run("workers_ranges:count", world=2, environment=HERE, timeout_s=280)
    assert first == second
    record = RangeRecord.from_dict(first)
    assert (record.ranks, record.steps) == (2, 1)
    alone = []
    for rank in (0, 1):
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        ranges = pt.Ranges(net, optimizer)
        gradients(net, rank)
        optimizer.step()
        alone.append(ranges.result())
    for found, *parts in zip(record.ranges, *(each.ranges for each in alone), strict=True):
        assert found.largest == max(part.largest for part in parts)
        assert found.elements == sum(part.elements for part in parts)
        for name in ("exponents", "below_tensor", "below_block"):
            whole, pieces = getattr(found, name), [getattr(part, name) for part in parts]
            assert all(whole.at(e) == sum(piece.at(e) for piece in pieces) for e in range(-150, 130))


def test_ranks_may_look_at_different_layers():
    first, second = run(
        "workers_ranges:count", world=2, arguments={"both": False}, environment=HERE, timeout_s=280
    )
    sizes = {(each.layer, each.kind): each.elements for each in RangeRecord.from_dict(first).ranges}
    assert first["ranges"] and second["steps"] == 1
    assert sizes["0", TensorKind.WEIGHTS] == 35
    assert sizes["2", TensorKind.WEIGHTS] == 2 * 18


def test_mistakes_are_one_line():
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(UnknownName, match="unknown layer 'l2'; did you mean"):
        pt.Ranges(nn.ModuleDict({"l1": net[0], "l22": net[2]}), optimizer, layers=["l2"])
    with pytest.raises(SpecError, match="every must be a whole number of 1 or more, got 0"):
        pt.Ranges(net, optimizer, every=0)
    with pytest.raises(RunError, match=r"no step of Sequential was counted.*optimizer"):
        pt.Ranges(net, optimizer).result()
    with pytest.raises(SpecError, match="needs a torch optimizer, got list"):
        pt.Ranges(net, [])
    with pytest.raises(SpecError, match="no parameter that is trained"):
        pt.Ranges(net.requires_grad_(False), optimizer)
