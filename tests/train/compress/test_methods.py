"""Each method does what its paper says."""

import math

import pytest
import torch

from paceline.spec.compression import SCHEMES
from paceline.train.compress import lockstep, make

WORLD = 3


def ranks(text, world=WORLD, **options):
    return [make(text, rank=r, world=world, **options) for r in range(world)]


def gradients(shape, world=WORLD, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for _ in range(world)]


def step(compressors, grads, key="w"):
    for compressor in compressors:
        compressor.begin_step()
    outs = lockstep(compressors, key, grads)
    for compressor in compressors:
        compressor.end_step()
    return outs


@pytest.mark.parametrize("text", SCHEMES)
@pytest.mark.parametrize("shape", [(1,), (7, 5), (300, 77), (8, 4, 3, 3)])
def test_ranks_agree_and_gradients_stay(text, shape):
    compressors, grads = ranks(text), gradients(shape)
    before = [grad.clone() for grad in grads]
    for _ in range(3):
        outs = step(compressors, grads)
        assert all(torch.equal(out, outs[0]) for out in outs)
        assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))


@pytest.mark.parametrize("text", SCHEMES)
def test_fused_and_plain_take_the_same_steps(text):
    fused, plain = ranks(text), ranks(text, fused=False)
    for t in range(3):
        grads = gradients((100, 37), seed=t)
        torch.testing.assert_close(step(fused, grads)[0], step(plain, grads)[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("text", SCHEMES)
def test_strided_and_half_precision_gradients(text):
    grads = [grad.to(memory_format=torch.channels_last) for grad in gradients((8, 16, 3, 3))]
    plain = step(ranks(text), [grad.contiguous() for grad in grads])[0]
    assert torch.equal(step(ranks(text), grads)[0], plain)
    half = step(ranks(text), [grad.to(torch.bfloat16) for grad in grads])[0]
    assert half.dtype == torch.bfloat16
    assert half.isfinite().all()


@pytest.mark.parametrize(("text", "tolerance"), [("fp32", 1e-6), ("fp16", 1e-3), ("bf16", 1e-2)])
def test_casts(text, tolerance):
    grads = gradients((50, 50))
    torch.testing.assert_close(
        step(ranks(text), grads)[0], sum(grads) / WORLD, rtol=tolerance, atol=tolerance
    )


def test_half_precision_sums_do_not_overflow():
    assert step(ranks("fp16", world=8), [torch.full((4,), 60_000.0)] * 8)[0].tolist() == [60_000.0] * 4


@pytest.mark.parametrize(
    "text",
    [
        "terngrad:clip=0",
        "terngrad:clip=0,share=false",
        "qsgd",
        "qsgd:bits=2",
        "qsgd:norm=l2",
        "randomk:ratio=0.1,feedback=false",
    ],
)
def test_unbiased(text):
    """The mean of many draws is the gradient, within five standard errors of every element."""
    compressors, grads = ranks(text, world=2), gradients(200, world=2)
    draws = torch.stack([step(compressors, grads)[0] for _ in range(1500)]).double()
    error = (draws.mean(0) - (sum(grads) / 2).double()).abs()
    assert bool((error < 5 * draws.std(0) / math.sqrt(1500) + 1e-5).all())


def test_ranks_draw_differently():
    same = gradients(2000, world=1) * 2
    a, b = ranks("terngrad", world=2)
    assert not torch.equal(a.encode("w", same[0], torch.ones(1))[0], b.encode("w", same[1], torch.ones(1))[0])
    c = make("terngrad", world=2)
    assert not torch.equal(a.encode("v", same[0], torch.ones(1))[0], c.encode("w", same[0], torch.ones(1))[0])


def test_terngrad_shares_the_largest_scaler_and_clips():
    grads = [torch.randn(10_000), 3 * torch.randn(10_000)]
    compressors = ranks("terngrad", world=2)
    scalers = [c.prepare("w", g) for c, g in zip(compressors, grads, strict=True)]
    for scaler, grad in zip(scalers, grads, strict=True):
        assert scaler.item() == pytest.approx(2.5 * grad.std().item(), rel=0.01)
    values = set(step(compressors, grads)[0].tolist())
    largest = torch.tensor(max(s.item() for s in scalers))
    assert values == {(largest * t / 2).item() for t in (-2, -1, 0, 1, 2)}
    assert make("terngrad:clip=0").prepare("w", grads[0]).item() == grads[0].abs().max().item()


def test_terngrad_leaves_equal_elements_whole():
    assert step(ranks("terngrad"), [torch.full((100,), 0.25)] * 3)[0].tolist() == [0.25] * 100


@pytest.mark.parametrize(
    "text", ["onebit", "topk", "topk:values=fp16", "randomk", "dgc:momentum=0,ratio=0.02", "powersgd"]
)
def test_error_feedback_loses_nothing(text):
    """What arrived plus what is still held back is what went in."""
    compressors = ranks(text)
    given, arrived = torch.zeros(200, 50), torch.zeros(200, 50)
    for t in range(10):
        grads = gradients((200, 50), seed=t)
        given += sum(grads) / WORLD
        arrived += step(compressors, grads)[0]
    held = sum(c.state["w"]["residual"].view(200, 50) for c in compressors) / WORLD
    torch.testing.assert_close(arrived + held, given, rtol=1e-4, atol=1e-5)
    assert held.norm() > 0.1 * given.norm()


def test_majority_vote():
    grads = [
        torch.tensor([1.0, -2.0, 3.0, -1.0]),
        torch.tensor([5.0, 1.0, -1.0, -1.0]),
        torch.tensor([0.1, -1.0, -7.0, -1.0]),
    ]
    assert step(ranks("signsgd:scaled=false"), grads)[0].tolist() == [1.0, -1.0, -1.0, -1.0]
    assert step(ranks("signsgd:scaled=false", world=2), grads[:2])[0].tolist() == [1.0, 0.0, 0.0, -1.0]
    scaled = step(ranks("signsgd"), grads)[0]
    assert scaled.tolist() == pytest.approx([m := sum(g.abs().mean().item() for g in grads) / 3, -m, -m, -m])


def test_onebit_decodes_to_the_means_of_either_side():
    grad = torch.tensor([1.0, 3.0, -1.0, -2.0, -6.0])
    assert step(ranks("onebit", world=1), [grad])[0].tolist() == [2.0, 2.0, -3.0, -3.0, -3.0]


@pytest.mark.parametrize("n", [100, 20_000, 300_000])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.2])
@pytest.mark.parametrize("fused", [True, False])
def test_top_k_is_exact(n, ratio, fused):
    """Also where the threshold comes from a sample."""
    (compressor,), (grad,) = ranks(f"topk:ratio={ratio}", world=1, fused=fused), gradients(n, world=1)
    out = step([compressor], [grad])[0]
    k = max(1, round(ratio * n))
    expected = torch.zeros(n)
    top = grad.abs().topk(k).indices
    expected[top] = grad[top]
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "make_gradient",
    [
        lambda n: torch.zeros(n),
        lambda n: torch.ones(n),
        lambda n: (torch.arange(n) % 1000 == 0).float(),
        lambda n: torch.cat([torch.randn(100), torch.zeros(n - 100)]),
    ],
)
def test_top_k_of_unusual_gradients(make_gradient):
    """Ties and zeros defeat a threshold: still k of the largest."""
    grad = make_gradient(100_000)
    (compressor,) = ranks("topk:ratio=0.01", world=1)
    out = step([compressor], [grad])[0]
    assert out.abs().sum() == pytest.approx(grad.abs().topk(1000).values.sum().item())


@pytest.mark.parametrize("fused", [True, False])
def test_what_is_sent_is_always_the_largest_of_what_was_held_back(fused):
    """Over steps whose gradients stay, grow, shrink and vanish."""
    n, held = 40_000, torch.zeros(40_000)
    (compressor,) = ranks("topk:ratio=0.002", world=1, fused=fused)
    for t, size in enumerate([1.0, 1.0, 1.0, 50.0, 1e-3, 0.0, 0.0, 1.0, 1e-9]):
        grad = size * (gradients(n, world=1, seed=t)[0] if t != 7 else torch.ones(n))
        held += grad
        top = held.abs().sort(descending=True, stable=True).indices[:80]
        expected = torch.zeros(n)
        expected[top] = held[top]
        held[top] = 0.0
        assert torch.equal(step([compressor], [grad])[0], expected), t


def test_dgc_by_the_book():
    """Against the paper's update, written plainly, over several steps."""
    (compressor,) = ranks("dgc:ratio=0.05,momentum=0.8,clip_norm=5", world=1)
    u, v = torch.zeros(400), torch.zeros(400)
    for t in range(6):
        grad = gradients(400, world=1, seed=t)[0]
        u = 0.8 * u + grad * min(1.0, 5 / grad.norm().item())
        v = v + u
        top = v.abs().topk(20).indices
        expected = torch.zeros(400)
        expected[top] = v[top]
        u[top], v[top] = 0.0, 0.0
        torch.testing.assert_close(step([compressor], [grad])[0], expected, rtol=1e-5, atol=1e-6)


def test_dgc_options():
    grad = gradients(400, world=1)[0]
    unmasked, masked, nesterov = (
        make(f"dgc:ratio=0.05{extra}") for extra in (",masking=false", "", ",nesterov=true")
    )
    for compressor in (unmasked, masked, nesterov):
        step([compressor], [grad])
    assert int((unmasked.state["w"]["velocity"] == 0).sum()) == 0
    assert int((masked.state["w"]["velocity"] == 0).sum()) == 20
    torch.testing.assert_close(
        nesterov.state["w"]["velocity"][masked.state["w"]["velocity"] != 0],
        0.9 * grad[masked.state["w"]["velocity"] != 0],
    )


def test_dgc_clips_by_the_number_of_ranks():
    grad = torch.full((100,), 1.0)  # norm 10
    for world in (1, 4):
        compressor = make("dgc:ratio=1,momentum=0,clip_norm=2", world=world)
        assert compressor.encode("w", grad)[0][0].item() == pytest.approx(0.2 / math.sqrt(world))


def test_dgc_warms_up():
    compressor = make("dgc:ratio=0.001,warmup_steps=40")
    sent = []
    for _ in range(50):
        compressor.begin_step()
        sent.append(compressor.encode("w", torch.randn(10_000))[0].numel())
        compressor.end_step()
    assert sent[0] == 2500
    assert sent[40:] == [10] * 10
    assert sent == sorted(sent, reverse=True)
    assert len(set(sent)) == 5


def test_powersgd_finds_a_low_rank_gradient():
    draw = torch.Generator().manual_seed(1)
    left, right = torch.randn(60, 2, generator=draw), torch.randn(2, 40, generator=draw)
    compressors = ranks("powersgd:rank=2")
    grads = [left @ right * (r + 1) for r in range(WORLD)]
    step(compressors, grads)
    torch.testing.assert_close(step(compressors, grads)[0], 2 * left @ right, rtol=1e-3, atol=1e-3)


def test_powersgd_leaves_vectors_and_small_matrices_whole():
    for shape in ((500,), (5, 5), (1, 900)):
        grads = gradients(shape)
        torch.testing.assert_close(step(ranks("powersgd"), grads)[0], sum(grads) / WORLD)


def test_randomk_reaches_every_element():
    (compressor,) = ranks("randomk:ratio=0.1", world=1)
    seen = torch.zeros(500)
    for _ in range(100):
        seen += step([compressor], [torch.ones(500)])[0] != 0
    assert bool((seen > 0).all())
    assert seen.sum() == 100 * 50
