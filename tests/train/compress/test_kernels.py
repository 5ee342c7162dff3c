"""Fused encoders and decoders equal the plain reference bit for bit; sums, whose order differs, closely."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import DataError
from paceline.spec.compression import QSGD
from paceline.spec.compression.sparse import index_bytes, kept
from paceline.train.compress import kernels, native, reference

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here")

SIZES = st.integers(1, 3000)
SEEDS = st.integers(0, 2**32 - 1)


def gradient(n, seed=0):
    """Of mixed magnitudes, with exact zeros."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=draw) * torch.rand(n, generator=draw) ** 4
    return x.masked_fill(torch.rand(n, generator=draw) < 0.1, 0.0)


def test_backends():
    x = torch.zeros(10)
    assert [kernels.backend(x), kernels.backend(x, False), kernels.backend(x.to("meta"))] == [
        "c",
        "eager",
        "eager",
    ]
    assert kernels.backend(torch.zeros(4, 4).T) == "eager"


def test_without_a_compiler_torch_does_it(tmp_path):
    code = """
import torch
from paceline.train.compress import kernels, lockstep, make, native
assert native.library() is None and kernels.backend(torch.zeros(4)) == "eager"
print(*lockstep([make("onebit")], "w", [torch.tensor([1.0, 3.0, -2.0])])[0].tolist())
"""
    environment = {**os.environ, "CC": str(tmp_path / "no-compiler"), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["2.0", "2.0", "-2.0"]


def test_uniform_is_uniform():
    drawn = reference.uniform(reference.counters(0, 1 << 20, reference.seed_tensor(3, torch.device("cpu"))))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = torch.histc(drawn, 256, 0, 1)
    chi = float(((counts - 4096).square() / 4096).sum())
    assert 160 < chi < 360  # 255 degrees of freedom
    other = reference.uniform(reference.counters(0, 1 << 20, reference.seed_tensor(4, torch.device("cpu"))))
    assert abs(float(torch.corrcoef(torch.stack([drawn, other]))[0, 1])) < 0.005
    assert abs(float(torch.corrcoef(torch.stack([drawn[1:], drawn[:-1]]))[0, 1])) < 0.005


@given(n=SIZES, seed=SEEDS)
def test_moments(n, seed):
    x = gradient(n, seed)
    assert kernels.moments(x)[1] == x.abs().max()
    torch.testing.assert_close(kernels.moments(x), kernels.moments(x, False), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("fused", [True, False])
def test_moments_of_what_is_not_finite(bad, fused):
    x = gradient(5000)
    x[1234] = bad
    assert kernels.moments(x, fused).isnan().all()


@given(n=SIZES, seed=SEEDS, scale=st.floats(0.001, 10))
def test_ternary(n, seed, scale):
    x, s = gradient(n, seed), torch.tensor(scale)
    packed = kernels.ternary_encode(x, s, seed)
    assert torch.equal(packed, kernels.ternary_encode(x, s, seed, False))
    payloads = [packed, kernels.ternary_encode(-x, s, seed + 1 & 0xFFFFFFFF)]
    factors = torch.tensor([0.3, 0.7])
    fused, plain = torch.empty(n), torch.empty(n)
    kernels.ternary_decode(payloads, factors, fused)
    kernels.ternary_decode(payloads, factors, plain, False)
    assert torch.equal(fused, plain)
    kernels.ternary_decode(payloads[:1], torch.ones(1), fused)
    assert set(fused.tolist()) <= {-1.0, 0.0, 1.0}
    assert bool((fused * x >= 0).all())
    assert bool((fused[x.abs() >= s] != 0).all())


@pytest.mark.parametrize("world", [1, 3, 130])
@pytest.mark.parametrize("factor", [0.3, float("inf")])
def test_a_shared_factor_multiplies_the_sum_of_trits(world, factor):
    x = gradient(3000)
    payloads = [kernels.ternary_encode(x, torch.tensor(1.0), seed) for seed in range(world)]
    fused, plain = torch.empty(3000), torch.empty(3000)
    kernels.ternary_decode(payloads, torch.tensor([factor]), fused)
    kernels.ternary_decode(payloads, torch.tensor([factor]), plain, False)
    torch.testing.assert_close(fused, plain, rtol=0, atol=0, equal_nan=True)
    assert bool(fused.isfinite().all()) == (factor == 0.3)


@given(n=SIZES, seed=SEEDS)
def test_signs(n, seed):
    x, error = gradient(n, seed), gradient(n, seed + 1)
    mine, other = error.clone(), error.clone()
    packed, sums = kernels.sign_encode(x, mine, 0.5)
    plain, expected = kernels.sign_encode(x, other, 0.5, False)
    assert torch.equal(packed, plain)
    assert torch.equal(mine, other)
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(kernels.sign_encode(x, None, 1.0)[0], reference.sign_pack(x))
    kernels.sign_feedback(mine, torch.tensor(0.3), torch.tensor(-0.2))
    kernels.sign_feedback(other, torch.tensor(0.3), torch.tensor(-0.2), False)
    assert torch.equal(mine, other)
    payloads = [packed, reference.sign_pack(x), reference.sign_pack(-x)]
    p, q = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([-0.3, -0.1, -0.7])
    for vote in (None, torch.tensor(2.0)):
        fused, plain = torch.empty(n), torch.empty(n)
        kernels.sign_decode(payloads, p, q, fused, vote)
        kernels.sign_decode(payloads, p, q, plain, vote, False)
        assert torch.equal(fused, plain)


@given(n=SIZES, seed=SEEDS, bits=st.sampled_from([2, 4, 8]), bucket=st.sampled_from([8, 64, 512]))
def test_qsgd(n, seed, bits, bucket):
    scheme, x = QSGD(bits=bits, bucket=bucket), gradient(n, seed)
    norms, codes = kernels.qsgd_encode(x, scheme, seed)
    plain_norms, plain = kernels.qsgd_encode(x, scheme, seed, False)
    assert torch.equal(norms, plain_norms)
    assert torch.equal(codes, plain)
    fused, eager = torch.empty(n), torch.empty(n)
    kernels.qsgd_decode([norms, norms], [codes, codes], scheme, fused)
    kernels.qsgd_decode([norms, norms], [codes, codes], scheme, eager, False)
    assert torch.equal(fused, eager)
    step = norms.repeat_interleave(bucket)[:n] / scheme.levels
    assert bool(((fused - x).abs() <= step * 1.0001 + 1e-9).all())


def test_qsgd_two_norm():
    scheme, x = QSGD(norm="l2", bucket=64), gradient(1000)
    torch.testing.assert_close(
        kernels.qsgd_encode(x, scheme, 1)[0], kernels.qsgd_encode(x, scheme, 1, False)[0], rtol=1e-6, atol=0
    )


@given(n=SIZES, seed=SEEDS, momentum=st.sampled_from([None, 0.9]), nesterov=st.booleans())
def test_accumulate(n, seed, momentum, nesterov):
    x, gain, threshold = gradient(n, seed), torch.tensor(0.25), torch.tensor(0.2)
    held = [(gradient(n, seed + 1), None if momentum is None else gradient(n, seed + 2)) for _ in range(2)]
    found = [
        kernels.accumulate(x, gain, u, momentum or 0.0, nesterov, v, threshold, n, fused)
        for fused, (v, u) in zip((True, False), held, strict=True)
    ]
    assert torch.equal(*found)
    assert torch.equal(held[0][0], held[1][0])
    assert momentum is None or torch.equal(held[0][1], held[1][1])
    if len(found[0]):
        assert kernels.above(held[0][0], threshold, len(found[0]) - 1) is None
    assert torch.equal(kernels.above(held[0][0], threshold, n), found[0])


@given(
    n=SIZES,
    seed=SEEDS,
    momentum=st.sampled_from([None, 0.9]),
    nesterov=st.booleans(),
    stride=st.integers(1, 50),
    share=st.floats(0, 1),
)
def test_thresholds_are_of_what_accumulate_makes(n, seed, momentum, nesterov, stride, share):
    x, gain, total, velocity = (
        gradient(n, seed),
        torch.tensor(0.25),
        gradient(n, seed + 1),
        None if momentum is None else gradient(n, seed + 2),
    )
    wanted = 1 + int(share * ((n - 1) // stride))
    found = [
        kernels.threshold(x, gain, velocity, momentum or 0.0, nesterov, total, stride, wanted, fused)
        for fused in (True, False)
    ]
    kernels.accumulate(x, gain, velocity, momentum or 0.0, nesterov, total)
    assert torch.equal(*found)
    assert found[0] == total.abs()[::stride].sort(descending=True).values[wanted - 1]


def places_of(payload, n):
    values, lows, highs = payload
    return reference.indices_decode(lows, highs, n, values.numel())


@given(
    n=st.integers(1, 100_000),
    share=st.floats(0.0001, 1),
    seed=SEEDS,
    ties=st.booleans(),
    step=st.sampled_from([0, 1, 3]),
    masked=st.booleans(),
)
def test_sparse(n, share, seed, ties, step, masked):
    places = torch.arange(0, n, step) if step else None
    before = (4 * gradient(n, seed)).round() if ties else gradient(n, seed)
    k = kept(n if places is None else places.numel(), share)
    held = [(before.clone(), torch.ones(n) if masked else None) for _ in range(2)]
    fused, plain = (
        kernels.sparse_encode(total, velocity, places, k, torch.float32, way)
        for way, (total, velocity) in zip((True, False), held, strict=True)
    )
    index = places_of(fused, n)
    assert bool((index[1:] > index[:-1]).all()) and (fused[1].numel(), fused[2].numel()) == index_bytes(n, k)
    assert torch.equal(fused[0], before[index]) and torch.equal(
        fused[0].abs().sort().values, plain[0].abs().sort().values
    )
    if not ties and fused[0].abs().min() > 0:
        assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))
    for (total, velocity), payload in zip(held, (fused, plain), strict=True):
        taken = places_of(payload, n)
        assert torch.equal(total.index_add(0, taken, payload[0]), before) and not total[taken].any()
        assert velocity is None or (velocity.sum() == n - k and not velocity[taken].any())
    outs = [torch.ones(n), torch.ones(n)]
    for way, out in zip((True, False), outs, strict=True):
        kernels.sparse_decode([fused, plain], 0.5, out, way)
    assert torch.equal(*outs)


@pytest.mark.parametrize("masked", [True, False])
def test_sparse_in_half_precision_keeps_what_was_rounded_away(masked):
    total, velocity = gradient(1000), torch.ones(1000) if masked else None
    before = total.clone()
    payload = kernels.sparse_encode(total, velocity, None, 50, torch.float16)
    index = places_of(payload, 1000)
    assert payload[0].dtype == torch.float16 and torch.equal(payload[0], before[index].to(torch.float16))
    assert torch.equal(total[index], before[index] - payload[0].to(torch.float32)) and total[index].any()
    assert velocity is None or velocity.sum() == 950
    out = torch.zeros(1000)
    kernels.sparse_decode([payload], 1.0, out)
    assert torch.equal(out[index], payload[0].to(torch.float32)) and int((out != 0).sum()) == 50


def test_what_is_not_finite_is_largest():
    values = torch.tensor([1.0, float("-inf"), 3.0, float("nan"), -5.0])
    for way in (True, False):
        for k, expected in ((1, [3]), (2, [1, 3]), (3, [1, 3, 4]), (5, [0, 1, 2, 3, 4])):
            total = values.clone()
            assert (
                places_of(
                    kernels.sparse_encode(total, None, torch.arange(5), k, torch.float32, way), 5
                ).tolist()
                == expected
            )
            # and stays where it was, so that the step is seen to be a bad one
            assert total[[i for i in expected if i in (1, 3)]].isnan().all()


def test_accumulate_finds_what_is_not_finite():
    total = torch.zeros(2000)
    x = torch.zeros(2000)
    x[7], x[1999] = float("nan"), float("-inf")
    assert kernels.accumulate(
        x, torch.tensor(1.0), None, 0.0, False, total, torch.tensor(1.0), 5
    ).tolist() == [7, 1999]


def test_damaged_indices_are_refused():
    values, lows, highs = kernels.sparse_encode(gradient(1000), None, None, 100, torch.float32)
    out = torch.zeros(1000)
    too_few, beyond = torch.zeros_like(highs), torch.zeros_like(highs)
    beyond[-13:] = 255
    for damaged in (too_few, beyond):
        with pytest.raises(DataError, match="damaged from rank 1"):
            kernels.sparse_decode([[values, lows, highs], [values, lows, damaged]], 1.0, out)
    with pytest.raises(DataError, match="same compressor"):
        kernels.sparse_decode([[values, lows, highs[:-1]]], 1.0, out)


@given(n=st.integers(1, 10**6), share=st.floats(0.001, 1), seed=SEEDS)
def test_strata_are_different_places(n, share, seed):
    k = kept(n, share)
    places, sizes = reference.strata(n, k, reference.seed_tensor(seed, torch.device("cpu")))
    assert int(sizes.sum()) == n
    assert int(sizes.max() - sizes.min()) <= 1
    assert int(places[0]) >= 0
    assert int(places[-1]) < n
    assert bool((places[1:] > places[:-1]).all())


def test_threads_change_nothing(monkeypatch):
    monkeypatch.setattr(native, "SHARE", 100)
    before = torch.get_num_threads()
    x, held, scheme = gradient(100_003), gradient(100_003, 3), QSGD()
    results = []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            residual, out = torch.zeros_like(x), torch.empty_like(x)
            packed, sums = kernels.sign_encode(x, residual, 1.0)
            trits = kernels.ternary_encode(x, torch.tensor(0.5), 9)
            kernels.ternary_decode([trits], torch.ones(1), out)
            velocity, total, cleared = torch.zeros_like(x), held.clone(), x.clone()
            found = kernels.accumulate(
                x, torch.tensor(0.5), velocity, 0.9, False, total, torch.tensor(0.5), x.numel()
            )
            kernels.clear(cleared)
            assert (
                found is not None
                and torch.equal(found, (total.abs() >= 0.5).nonzero().reshape(-1))
                and not cleared.any()
            )
            assert kernels.above(total, torch.tensor(0.5), found.numel() - 1) is None
            results.append(
                (
                    kernels.moments(x),
                    packed,
                    sums,
                    residual,
                    trits,
                    out,
                    *kernels.qsgd_encode(x, scheme, 9),
                    velocity,
                    total,
                    found,
                )
            )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0][0], results[1][0])
    for one, four in zip(*results, strict=True):
        torch.testing.assert_close(one, four, rtol=1e-6 if one.dtype == torch.float64 else 0, atol=0)


def test_idle_cores_are_used(monkeypatch):
    monkeypatch.setattr(native, "SHARE", 100)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for cores, expected in ((2, 1), (4, 2), (6, 3), (32, native.MOST)):
        monkeypatch.setattr(
            native.os, "sched_getaffinity", lambda _, cores=cores: range(cores), raising=False
        )
        parts = []
        native.share(10_000, 10_000, lambda lo, hi, parts=parts: parts.append((lo, hi)))
        assert len(parts) == expected and sum(hi - lo for lo, hi in parts) == 10_000
    assert native.cores() == 16


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_torch_compile_takes_them():
    """What is compiled for GPUs is one graph without a break, for several sizes; here run as it was
    traced.
    """
    seed = reference.seed_tensor(77, torch.device("cpu"))
    compiled = {
        f.__name__: torch.compile(f, fullgraph=True, backend="aot_eager")
        for f in (
            reference.sign_encode,
            reference.sign_decode,
            reference.qsgd_encode,
            reference.qsgd_decode,
            reference.accumulate,
        )
    }
    for n in (4096, 10_240):
        x, error, other = gradient(n), gradient(n, 1), gradient(n, 1)
        packed, sums = compiled["sign_encode"](x, error, 0.5)
        plain, expected = reference.sign_encode(x, other, 0.5)
        assert torch.equal(packed, plain)
        assert torch.equal(sums, expected)
        assert torch.equal(error, other)
        norms, codes = compiled["qsgd_encode"](x, seed, 4, 512, False)
        assert torch.equal(codes, reference.qsgd_encode(x, seed, 4, 512, False)[1])
        one, two = torch.empty(n), torch.empty(n)
        compiled["qsgd_decode"]([codes], [norms], 4, 512, one)
        reference.qsgd_decode([codes], [norms], 4, 512, two)
        assert torch.equal(one, two)
        compiled["sign_decode"]([packed], sums[:1].float(), sums[1:2].float(), None, one)
        reference.sign_decode([packed], sums[:1].float(), sums[1:2].float(), None, two)
        assert torch.equal(one, two)
        compiled["accumulate"](x, torch.tensor(0.5), None, 0.0, False, error)
        reference.accumulate(x, torch.tensor(0.5), None, 0.0, False, other)
        assert torch.equal(error, other)
