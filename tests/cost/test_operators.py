"""Formulas: never slower with a better device or less work, never faster than the hardware allows."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.catalog import devices
from paceline.cost.chip import chip
from paceline.cost.curves import curves_for
from paceline.cost.operators import times
from paceline.cost.pack import conv_shape, pack_ops
from paceline.spec.device import parse
from paceline.spec.workload import ITEMSIZE, Access, Op

NAMES = [
    "h200",
    "h100-pcie",
    "b200",
    "a100-sxm-80gb",
    "rtx3090",
    "v100-sxm-16gb",
    "t4",
    "p100-pcie",
    "k80",
    "mi300x",
    "tpu-v4",
    "haswell-cori",
]
DTYPES = ["fp32", "tf32", "fp16", "bf16"]

sizes = st.integers(1, 16384)
factors = st.floats(1, 8)
named = st.sampled_from(NAMES).map(devices.get)


def accesses(*counts, itemsize=4, reuse=-1):
    return tuple(Access(i, int(count) * itemsize, reuse) for i, count in enumerate(counts, 1))


def gemm(m, n, k, dtype="bf16", batch=1):
    size = ITEMSIZE[dtype]
    return Op(
        "aten.mm",
        "gemm",
        "forward",
        "",
        dtype,
        2.0 * batch * m * n * k,
        accesses(batch * m * k, batch * k * n, itemsize=size),
        accesses(batch * m * n, itemsize=size),
        (batch, m, n, k),
        ("tt", "align8"),
    )


def conv(n, c, k, side, taps, which, layout, dtype):
    size, points = ITEMSIZE[dtype], side * side
    reads, writes = (
        accesses(n * c * points, k * c * taps, itemsize=size),
        accesses(n * k * points, itemsize=size),
    )
    dims = (n, c, k, 1, points, points, taps, 1)
    return Op(
        "aten.convolution",
        "conv",
        "forward",
        "",
        dtype,
        2.0 * n * points * k * c * taps,
        reads,
        writes,
        dims,
        (which, layout),
    )


def attention(b, h, s, d, dtype, causal):
    size, elements = ITEMSIZE[dtype], b * h * s * d
    return Op(
        "aten.scaled_dot_product_attention",
        "attention",
        "forward",
        "",
        dtype,
        4.0 * b * h * s * s * d * (0.5 if causal else 1),
        accesses(*[elements] * 3, itemsize=size),
        accesses(elements, itemsize=size),
        (b, h, h, s, s, d, d),
        ("forward", *["causal"] * causal),
    )


def pointwise(elements, dtype="fp32", reuse=-1, kind="elementwise"):
    size = ITEMSIZE[dtype]
    reads, writes = (
        accesses(elements, elements, itemsize=size, reuse=reuse),
        accesses(elements, itemsize=size),
    )
    return Op("aten.add", kind, "forward", "", dtype, 0.0, reads, writes, (elements,))


dtypes = st.sampled_from(DTYPES)
gemms = st.builds(gemm, sizes, sizes, sizes, dtypes, st.integers(1, 16))
convs = st.builds(
    conv,
    st.integers(1, 64),
    st.integers(1, 512),
    st.integers(1, 512),
    st.integers(1, 64),
    st.sampled_from([1, 9, 25, 49]),
    st.sampled_from(["fprop", "dgrad", "wgrad"]),
    st.sampled_from(["nchw", "nhwc"]),
    dtypes,
)
attentions = st.builds(
    attention,
    st.integers(1, 16),
    st.integers(1, 32),
    st.integers(1, 4096),
    st.sampled_from([32, 64, 128]),
    st.sampled_from(["fp32", "bf16"]),
    st.booleans(),
)
streams = st.builds(
    pointwise,
    st.integers(1, 10**8),
    dtypes,
    st.sampled_from([-1, 0, 10**6, 10**9]),
    st.sampled_from(["elementwise", "copy", "cast", "gather", "cat", "fill", "sort", "scan"]),
)
operators = gemms | convs | attentions | streams


def seconds(op, device):
    found = times(pack_ops([op]), chip(device), curves_for(device))
    assert found.kernels[0] > 0 and np.isfinite(found.busy[0])
    return float(found.busy[0])


@given(operators, named, factors)
def test_more_bandwidth_is_never_slower(op, device, factor):
    assert seconds(op, replace(device, memory_bandwidth_Bps=device.memory_bandwidth_Bps * factor)) <= seconds(
        op, device
    ) * (1 + 1e-9)


@given(operators, named, factors, st.none() | dtypes)
def test_more_flops_are_never_slower(op, device, factor, dtype):
    faster = {
        name: peak * (factor if dtype in (None, name) else 1) for name, peak in device.peak_flops.items()
    }
    assert seconds(op, replace(device, peak_flops=faster)) <= seconds(op, device) * (1 + 1e-9)


@given(operators, named, factors)
def test_more_cache_and_clock_are_never_slower(op, device, factor):
    assume(device.l2_bytes and device.clock_hz)
    better = replace(device, l2_bytes=device.l2_bytes * factor, clock_hz=device.clock_hz * factor)
    assert seconds(op, better) <= seconds(op, device) * (1 + 1e-9)


@given(operators, named, st.floats(0, 1), st.integers(-1, 10**9))
def test_fewer_bytes_are_never_slower(op, device, share, reuse):
    less = [tuple(replace(a, bytes=int(a.bytes * share)) for a in part) for part in (op.reads, op.writes)]
    assume(op.kind != "cast")  # which kernel casts follows from the bytes
    assert seconds(replace(op, reads=less[0], writes=less[1]), device) <= seconds(op, device) * (1 + 1e-9)
    recent = tuple(
        replace(a, reuse=min(reuse, a.reuse) if min(reuse, a.reuse) >= 0 else a.reuse) for a in op.reads
    )
    assert seconds(replace(op, reads=recent), device) <= seconds(op, device) * (1 + 1e-9)


@given(st.tuples(sizes, sizes, sizes), st.integers(0, 2), st.integers(1, 8), dtypes, named)
def test_larger_products_are_never_faster(shape, grown, factor, dtype, device):
    larger = [size * (factor if i == grown else 1) for i, size in enumerate(shape)]
    assert seconds(gemm(*larger, dtype), device) >= seconds(gemm(*shape, dtype), device) * (1 - 1e-9)


@given(
    st.integers(1, 8),
    st.integers(1, 32),
    st.integers(1, 2048),
    dtypes.filter(lambda d: d in ("fp32", "bf16")),
    st.booleans(),
    named,
)
def test_twice_the_attention_is_never_faster(b, h, s, dtype, causal, device):
    one = seconds(attention(b, h, s, 64, dtype, causal), device)
    assert seconds(attention(2 * b, h, s, 64, dtype, causal), device) >= one * (1 - 1e-9)
    if not causal or s >= 128:
        assert seconds(attention(b, h, 2 * s, 64, dtype, causal), device) >= one * (1 - 1e-9)


@given(gemms | streams.filter(lambda op: all(a.reuse < 0 for a in op.reads)), named)
def test_no_faster_than_the_roofline(op, device):
    assume(device.name in ("h200", "a100-sxm-80gb", "v100-sxm-16gb", "t4", "p100-pcie"))
    assert seconds(op, device) >= 0.9 * max(
        op.flops / device.peak(op.dtype), (op.bytes_read + op.bytes_written) / 2 / device.memory_bandwidth_Bps
    )


@pytest.mark.parametrize("name", NAMES)
def test_large_products_come_near_the_peak(name):
    device = devices.get(name)
    op = gemm(8192, 8192, 8192, "bf16" if "bf16" in device.peak_flops else "fp32")
    assert 0.2 < op.flops / seconds(op, device) / device.peak(op.dtype) <= 1.05


@pytest.mark.parametrize("name", NAMES)
def test_large_copies_come_near_the_bandwidth(name):
    device, op = devices.get(name), pointwise(2**28)
    assert (
        0.3 < (op.bytes_read + op.bytes_written) / seconds(op, device) / device.memory_bandwidth_Bps <= 1.25
    )


def test_waves():
    """One tile more than the multiprocessors hold costs more than one tile less."""
    device = devices.get("h200")
    tiles = [seconds(gemm(128 * count, 128, 8192), device) for count in (131, 132, 133)]
    assert tiles[1] - tiles[0] < tiles[2] - tiles[1]


def test_cache_hits_are_cheaper():
    device = devices.get("h200")
    assert seconds(pointwise(2**20, reuse=0), device) < seconds(pointwise(2**20), device)
    assert seconds(pointwise(2**28, reuse=0), device) == seconds(pointwise(2**28), device)


@pytest.mark.parametrize(
    ("which", "shape"),
    [
        ("fprop", (1, 2 * 100, 32, 16 * 9)),
        ("dgrad", (1, 2 * 100, 16, 32 * 9)),
        ("wgrad", (1, 32, 16 * 9, 2 * 100)),
    ],
)
def test_convolution_as_a_product(which, shape):
    dims = (2, 16, 32, 1, 100, 100, 9, 1)
    assert conv_shape(which, dims, 2) == shape
    _, m, n, k = conv_shape(which, dims, 2)
    assert 2 * m * n * k == 2 * 2 * 100 * 32 * 16 * 9


def test_few_channels_are_padded_to_sixteen_bytes():
    assert conv_shape("fprop", (1, 3, 64, 1, 100, 100, 49, 1), 2)[3] == 8 * 49
    assert conv_shape("fprop", (1, 3, 64, 1, 100, 100, 49, 1), 4)[3] == 4 * 49


def test_a_chip_with_nothing_but_a_datasheet_line():
    """What no source gives is assumed, and named."""
    device = parse(
        'name = "new"\n[peak]\nbf16 = "2 PFLOP/s"\n[memory]\nsize = "192 GB"\nbandwidth = "8 TB/s"\n',
        "new.toml",
        devices.get,
    )
    assert chip(device).assumed == ("chip.clock", "chip.sms", "cache.l2")
    assert chip(devices.get("h200")).assumed == ()
    assert seconds(gemm(8192, 8192, 8192), device) < seconds(gemm(8192, 8192, 8192), devices.get("h200"))


@pytest.mark.parametrize("name", devices.names())
def test_every_device_has_curves_for_every_kind(name):
    device = devices.get(name)
    for dtype in DTYPES:
        shapes = [gemm(64, 64, 64, dtype), pointwise(1000, dtype)]
        shapes += [
            conv(2, 16, 16, 8, *how, dtype)
            for how in product((1, 9), ("fprop", "dgrad", "wgrad"), ("nchw", "nhwc"))
        ]
        shapes += [attention(1, 2, 64, 64, dtype, causal) for causal in (False, True)]
        assert all(seconds(op, device) > 0 for op in shapes)
