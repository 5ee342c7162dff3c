"""State survives checkpoints, other world sizes, loss scaling and skipped steps."""

import pytest
import torch

from paceline.errors import SpecError
from paceline.spec.compression import SCHEMES
from paceline.train.compress import lockstep, make

WORLD = 2
SHAPE = (60, 30)


def ranks(text, world=WORLD):
    return [make(text, rank=r, world=world, seed=5) for r in range(world)]


def gradients(t, world=WORLD):
    draw = torch.Generator().manual_seed(t)
    return [torch.randn(SHAPE, generator=draw) for _ in range(world)]


def step(compressors, grads, scale=None, applied=True):
    for compressor in compressors:
        compressor.begin_step(loss_scale=scale)
    outs = lockstep(compressors, "w", [grad * (scale or 1.0) for grad in grads])
    for compressor in compressors:
        compressor.end_step(applied=applied)
    return outs[0] / (scale or 1.0)


@pytest.mark.parametrize("text", SCHEMES)
def test_checkpoint(text):
    straight, other = ranks(text), ranks(text)
    for t in range(3):
        step(straight, gradients(t))
    for new, old in zip(other, straight, strict=True):
        new.load_state_dict(old.state_dict())
    for t in range(3, 6):
        assert torch.equal(step(straight, gradients(t)), step(other, gradients(t)))


def test_checkpoint_is_a_copy():
    compressors = ranks("onebit")
    step(compressors, gradients(0))
    saved = compressors[0].state_dict()
    kept = saved["parameters"]["w"]["residual"].clone()
    step(compressors, gradients(1))
    assert torch.equal(saved["parameters"]["w"]["residual"], kept)


@pytest.mark.parametrize("text", SCHEMES)
def test_a_change_of_loss_scale_changes_nothing(text):
    plain, scaled = ranks(text), ranks(text)
    for t, scale in enumerate((1024.0, 1024.0, 512.0, 2048.0)):
        torch.testing.assert_close(
            step(scaled, gradients(t), scale), step(plain, gradients(t)), rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("text", SCHEMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_overflow_on_one_rank_reaches_all_and_leaves_no_trace(text, bad):
    compressors = ranks(text)
    step(compressors, gradients(0), 64.0)
    before = [c.state_dict() for c in compressors]
    grads = gradients(1)
    grads[1][3, 4] = bad
    assert not step(compressors, grads, 64.0, applied=False).isfinite().all()
    for compressor, old in zip(compressors, before, strict=True):
        assert compressor.step == old["step"]
        for name, tensor in old["parameters"].get("w", {}).items():
            assert torch.equal(compressor.state["w"][name], tensor)
    assert step(compressors, gradients(2), 32.0).isfinite().all()


def test_a_first_step_that_is_skipped_leaves_no_state():
    compressors = ranks("onebit")
    step(compressors, gradients(0), 64.0, applied=False)
    assert compressors[0].state == {}


def test_without_loss_scale_nothing_can_be_undone():
    compressor = make("onebit")
    compressor.begin_step()
    with pytest.raises(SpecError, match="loss_scale"):
        compressor.end_step(applied=False)
    with pytest.raises(SpecError, match="got -1"):
        compressor.begin_step(loss_scale=-1)


@pytest.mark.parametrize("text", ["onebit", "topk", "dgc", "powersgd", "randomk"])
@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks(text, world):
    """What is held back, on average over ranks, stays; what is shared by all stays as it is."""
    compressors = ranks(text)
    for t in range(3):
        step(compressors, gradients(t))
    states = [c.state_dict() for c in compressors]
    fresh = ranks(text, world)
    for rank, compressor in enumerate(fresh):
        compressor.load_state_dict(type(compressor).reshard(states[::-1], rank=rank, world=world))
    held = sum(s["parameters"]["w"]["residual"] for s in states) / WORLD
    torch.testing.assert_close(
        sum(c.state["w"]["residual"] for c in fresh) / world, held, rtol=1e-6, atol=1e-7
    )
    if text == "powersgd":
        assert torch.equal(fresh[-1].state["w"]["factor"], states[0]["parameters"]["w"]["factor"])
    assert fresh[0].step == 3
    assert step(fresh, gradients(9, world)).isfinite().all()


def test_wrong_states_are_refused():
    states = [c.state_dict() for c in ranks("onebit")]
    with pytest.raises(SpecError, match="not of 3; pass all ranks' states through reshard"):
        make("onebit", world=3).load_state_dict(states[0])
    with pytest.raises(SpecError, match="state of 'onebit', not of 'topk'"):
        make("topk", world=2).load_state_dict(states[0])
    with pytest.raises(SpecError, match=r"got ranks \[0\]"):
        type(make("onebit")).reshard(states[:1], rank=0, world=4)
    compressor = make("onebit")
    step([compressor], gradients(0, 1))
    with pytest.raises(SpecError, match="has 1800 elements, its gradient has 10"):
        compressor.encode("w", torch.zeros(10))
    with pytest.raises(SpecError, match="got rank=2, world=2"):
        make("onebit", rank=2, world=2)
