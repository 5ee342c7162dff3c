"""Emulated formats have the bits of torch's casts; fp16 without a loss scale loses what was predicted."""

import math

import pytest

torch = pytest.importorskip("torch", reason="values of torch tensors")
from torch import nn  # noqa: E402

import paceline.train as pt  # noqa: E402
from paceline.cost.format_losses import losses  # noqa: E402
from paceline.errors import UnknownName  # noqa: E402
from paceline.spec.number_formats import FORMATS, FP16  # noqa: E402
from paceline.spec.value_ranges import TensorKind  # noqa: E402
from paceline.train.emulated_formats import Emulated, EmulatedFormats, rounded  # noqa: E402
from paceline.whatif.precision import precision  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors are faster so, the more so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


CASTS = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8-e4m3": torch.float8_e4m3fn,
    "fp8-e5m2": torch.float8_e5m2,
}


def hard_values(dtype):
    """Random bits, every number of a type, and what lies halfway between neighbours."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), dtype=torch.int32, generator=generator)
    near = torch.randn(100_000, generator=generator) * torch.exp2(torch.randint(-30, 18, (100_000,)))
    size = torch.empty(0, dtype=dtype).element_size()
    kind = torch.uint8 if size == 1 else torch.int16
    every = torch.arange(2 ** (8 * size)).to(kind).view(dtype).float()
    every = every[every.isfinite()]
    middle = (every[1:].double() + every[:-1].double()) / 2
    edges = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 464.0, 464.1, 65519.9, 65520.0, 61440.0])
    both = torch.cat([bits.view(torch.float32), near, every, middle.float(), edges])
    return torch.cat([both, torch.nextafter(both, torch.zeros(1)), torch.nextafter(both, torch.ones(1))])


@pytest.mark.parametrize("name", CASTS)
def test_bits_are_those_of_the_cast(name):
    values = hard_values(CASTS[name])
    if name == "fp8-e4m3":  # beyond the largest number, versions of torch differ
        values = values[values.abs() < FORMATS[name].overflow_edge]
    found, expected = rounded(values, name), values.to(CASTS[name]).float()
    numbers = ~expected.isnan()
    assert torch.equal(found.isnan(), ~numbers)
    assert torch.equal(found[numbers].view(torch.int32), expected[numbers].view(torch.int32))


def test_e4m3_saturates():
    values = torch.tensor([448.0, 464.0, 465.0, -1e9, math.nan])
    assert rounded(values, "fp8-e4m3")[:4].tolist() == [448.0, 448.0, 448.0, -448.0]
    assert rounded(values, "fp8-e4m3")[4].isnan()


def test_tf32_has_ten_bits_and_fp32_is_as_it_is():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    found = rounded(values, "tf32")
    assert not int((found.view(torch.int32) & 0x1FFF).any())
    assert float(((found - values) / values).abs().max()) <= 2.0**-11
    assert torch.equal(rounded(values, "fp32"), values)


def element(value, form):
    """One number rounded to a format, in exact arithmetic."""
    if not value:
        return 0.0
    exponent = max(math.frexp(abs(value))[1] - 1, form.least_exponent)
    step = 2.0 ** (exponent - form.mantissa_bits)
    return math.copysign(min(round(abs(value) / step) * step, form.largest), value)


@pytest.mark.parametrize("name", ["mxfp8-e4m3", "mxint8", "flex16", "fp8-e4m3/tensor", "fp8-e5m2/tensor"])
def test_blocks_share_the_scale_of_their_largest(name):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(5, 33, generator=generator) * torch.exp2(torch.randint(-14, 9, (5, 33)))
    form = FORMATS[name]
    flat = values.double().flatten().tolist()
    block = form.block or len(flat)
    expected = []
    for start in range(0, len(flat), block):
        part = flat[start : start + block]
        power = math.frexp(max(map(abs, part)))[1] - 1 - form.element.largest_exponent
        expected += [element(value / 2.0**power, form.element) * 2.0**power for value in part]
    found = rounded(values, name)
    assert found.shape == values.shape
    assert found.double().flatten().tolist() == expected
    assert torch.equal(rounded(torch.zeros(40), name), torch.zeros(40))


def test_both_passes_are_rounded_and_parameters_are_not():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    kept = [parameter.detach().clone() for parameter in net.parameters()]
    x = torch.randn(16, 8)
    emulated = Emulated(net, EmulatedFormats(forward="fp8-e4m3", backward="bf16", keep={"2": "fp32"}))
    output = emulated(x)

    def narrow(values):
        return values.to(torch.float8_e4m3fn).float()

    hidden = narrow(nn.functional.linear(narrow(x), narrow(kept[0]), narrow(kept[1])))
    assert torch.equal(output, nn.functional.linear(narrow(torch.tanh(hidden)), *kept[2:]))
    output.square().mean().backward()
    for name, parameter in net.named_parameters():
        narrowed = torch.equal(parameter.grad, parameter.grad.bfloat16().float())
        assert narrowed == (not name.startswith("2")), name
    emulated.close()
    hidden = torch.tanh(nn.functional.linear(x, *kept[:2]))
    assert torch.equal(net(x), nn.functional.linear(hidden, *kept[2:]))


def test_unknown_names():
    with pytest.raises(UnknownName, match="unknown number format 'fp61'; did you mean 'fp16'"):
        EmulatedFormats(forward="fp61")
    with pytest.raises(UnknownName, match="unknown layer 'weights'"):
        Emulated(nn.Linear(2, 2), EmulatedFormats(keep={"weights": "fp32"}))


def tiny_gradients():
    """A net of sigmoids whose loss is a mean over as many outputs as a large image has pixels."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 24), nn.Sigmoid(), nn.Linear(24, 24), nn.Sigmoid(), nn.Linear(24, 16)]
    x = torch.randn(64, 3) @ torch.randn(3, 16)
    return nn.Sequential(*layers), x


def fit(run, scale, steps=150):
    """Trains on `tiny_gradients`; the error at the end, and the record."""
    net, x = tiny_gradients()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02, eps=1e-16)
    scaler = pt.Scaler(scale, growth=10**9)
    ranges = pt.Ranges(net, optimizer, every=30, scaler=scaler)
    running = run(net)
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale((running(x).float() - x).square().sum() / 1e8).backward()
        scaler.step(optimizer)
        scaler.update()
    ranges.close()
    with torch.no_grad():
        return float((net(x) - x).square().mean()), ranges.result()


def test_fp16_loses_gradients_as_predicted_and_the_advised_scale_brings_them_back():
    fp16 = EmulatedFormats(forward="fp16", backward="fp16")
    exact, record = fit(lambda net: net, 1.0)
    window = precision(record).window("fp16")
    broken, _ = fit(lambda net: Emulated(net, fp16), 1.0)
    mended, _ = fit(lambda net: Emulated(net, fp16), 2.0**window.advised)
    assert window.lost_plain > 0.5 and window.lost_advised < 0.001
    assert broken > 10 * exact
    assert mended < 1.1 * exact


def one_step(run):
    net, x = tiny_gradients()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    ranges = pt.Ranges(net, optimizer)  # before what rounds, to see rounded gradients
    ((run(net)(x).float() - x).square().sum() / 1e7).backward()
    optimizer.step()
    return ranges.result()


def test_share_of_gradients_lost_is_as_predicted():
    plain = one_step(lambda net: net)
    emulated = one_step(lambda net: Emulated(net, EmulatedFormats(forward="fp16", backward="fp16")))
    kind = TensorKind.ACTIVATION_GRADIENTS
    predicted = losses(plain.of(kind=kind), FP16).vanish
    there, left = (sum(each.total for each in record.of(kind=kind)) for record in (plain, emulated))
    assert 0.2 < predicted < 0.95
    assert 1 - left / there == pytest.approx(predicted, abs=0.03)
