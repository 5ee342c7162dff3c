"""Asking about a live module must not change it: no weight, hook, buffer, mode, optimizer or random state."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import paceline as pl
from paceline.errors import CaptureError
from paceline.train.launch import run

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
ASK: dict[str, Callable[[Any], Any]] = {
    "capture": lambda model: pl.capture(model, batch=4),
    "predict": lambda model: pl.predict(model, "h200", batch=4),
    "predict on a cluster": lambda model: pl.predict(model, plan="ddp", cluster="1xdgx-h100", batch=4),
    "plan": lambda model: pl.plan(model, "1xdgx-h100", gbs=32),
}


class Small(nn.Module):
    """Integer and float buffers, a tied weight, plain attributes that the forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.calls = 0
        self.history: list[torch.Tensor] = []
        self.scale = torch.ones(4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.calls += 1
        self.scale += 1
        x = self.norm(self.embed(ids))
        self.history.append(x)
        if self.calls == 1:
            self.handle = self.head.register_forward_hook(lambda *_: None)
        noise = random.random() + np.random.rand() + float(torch.rand(()))
        return self.head(self.drop(x)) * noise


def model() -> tuple[nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    ids = torch.randint(0, 32, (4,))
    return Small(), ids, lambda out: nn.functional.cross_entropy(out, ids)


def tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def facts(module: nn.Module) -> list[Any]:
    """What identifies a module's state, apart from values of tensors."""
    found: list[Any] = []
    for sub in module.modules():
        found.append((id(sub), type(sub), sub.training, id(vars(sub)), sorted(vars(sub))))
        found += [(id(hooks), dict(hooks)) for name, hooks in vars(sub).items() if name.endswith("hooks")]
    return found + [(id(t), t.device, t.dtype, t.requires_grad, id(t.grad)) for t in tensors(module)]


def random_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
@pytest.mark.parametrize("training", (True, False))
def test_everything_is_as_it_was(ask: Callable[[Any], Any], training: bool) -> None:
    module, ids, loss = model()
    optimizer = torch.optim.AdamW(module.parameters())
    loss(module(ids)).backward()
    optimizer.step()
    module.train(training)
    state = (module.state_dict(), optimizer.state_dict(), [t.grad for t in tensors(module)], module.scale)
    before = copy.deepcopy(state)
    plain, seen, states = facts(module), [id(t) for t in module.history], random_states()
    ask((module, ids, loss))
    assert facts(module) == plain
    assert random_states() == states
    assert (module.calls, [id(t) for t in module.history]) == (1, seen)
    after = (module.state_dict(), optimizer.state_dict(), [t.grad for t in tensors(module)], module.scale)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert held == [id(parameter) for parameter in module.parameters()]
    assert module.head.weight is module.embed.weight


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
def test_plan_then_train_in_one_script_is_training(ask: Callable[[Any], Any]) -> None:
    weights = []
    for asked in (False, True):
        module, ids, loss = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            if asked and step == 1:
                ask((module, ids, loss))
            optimizer.zero_grad()
            loss(module(ids)).backward()
            optimizer.step()
        weights.append(module.state_dict())
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


@pytest.mark.parametrize("where", ("forward", "loss", "backward"))
def test_also_when_the_capture_fails(where: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("backward fails")

    def loss(out: torch.Tensor) -> torch.Tensor:
        if where == "loss":
            raise ValueError("no loss")
        return Fails.apply(out).sum() if where == "backward" else out.sum()

    last = nn.Linear(4 if where == "forward" else 8, 8)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), last).eval()
    before, plain, states = copy.deepcopy(module.state_dict()), facts(module), random_states()
    with pytest.raises(CaptureError):
        pl.capture((module, torch.randn(4, 8), loss), batch=4)
    assert facts(module) == plain
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert random_states()[1:] == states[1:]


def test_hooks_stay_also_those_that_take_themselves_away() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fired: list[str] = []

    def once(*_: Any) -> None:
        fired.append("once")
        handle.remove()

    handle = module[0].register_forward_hook(once)
    module[1].register_full_backward_hook(lambda *_: fired.append("backward"))
    module[1].weight.register_post_accumulate_grad_hook(lambda _: fired.append("optimizer in backward"))
    plain = facts(module)
    pl.capture((module, torch.randn(4, 8)), batch=4)
    assert facts(module) == plain
    fired.clear()
    for _ in range(2):
        module(torch.randn(4, 8)).sum().backward()
    assert sorted(fired) == sorted(["once", *["backward", "optimizer in backward"] * 2])


def test_parametrizations_and_patched_forwards_stay() -> None:
    normed = parametrizations.weight_norm(nn.Linear(8, 8)), parametrizations.spectral_norm(nn.Linear(8, 8))
    module = nn.Sequential(*normed, *(nn.Sequential(nn.Linear(8, 8)) for _ in range(4)))
    patched = module[2].forward = lambda x, inner=module[2][0]: inner(x) * 2
    x = torch.randn(4, 8)
    before, plain = copy.deepcopy(module.state_dict()), facts(module)
    pl.capture((module, x), batch=4)
    assert facts(module) == plain and module[2].forward is patched
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    module(x).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_a_loss_may_refer_to_the_module_and_be_one() -> None:
    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.rand(8))
            self.last: Any = None

        def forward(self, out: torch.Tensor) -> torch.Tensor:
            self.last = nn.functional.cross_entropy(out, torch.zeros(4, dtype=torch.int64), self.weight)
            return self.last + 0.1 * module.weight.norm()

    module, loss = nn.Linear(8, 8), Penalty()
    weight, class_weight = module.weight, loss.weight
    pl.capture((module, torch.randn(4, 8), loss), batch=4)
    assert module.weight is weight and loss.weight is class_weight and loss.last is None
    assert weight.grad is None and not weight.is_meta


def test_integer_inputs_are_not_written_to() -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            ids[ids < 0] = 0
            return self.embed(ids).sum()

    ids = torch.tensor([1, -1, 2])
    pl.capture((Masks(), ids), batch=3)
    assert ids.tolist() == [1, -1, 2]


def test_a_catalog_model_draws_no_random_numbers_either() -> None:
    states = random_states()
    pl.predict("alexnet", "h200", batch=1)
    assert random_states() == states


def test_a_lazy_module_is_refused_in_one_line() -> None:
    module = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8))
    with pytest.raises(CaptureError, match="run one batch through the module first"):
        pl.capture((module, torch.randn(4, 8)), batch=4)
    assert isinstance(module[0], nn.LazyLinear)


@pytest.mark.parametrize(
    "mode", (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16))
)
def test_the_mode_of_the_caller_does_not_matter(mode: Callable[[], Any]) -> None:
    module, x = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)), torch.randn(4, 8)

    def ask() -> Any:
        return pl.capture((module, x, torch.sum), batch=4).to_dict()

    expected = ask()
    with mode():
        assert ask() == expected
    assert module(x).requires_grad and module(x).dtype == torch.float32


#: plans of which hooks, gradients or the layers themselves would send what a capture has no data for
TRAINED = ["overlap:fc=gradient", "overlap:fc=rows", "overlap:fc=factors", "priority", "lazy", "ddp", "dgc"]


def test_asking_in_the_middle_of_training_does_not_disturb_it() -> None:
    arguments = {"plans": TRAINED}
    for found in run("workers_01:all_of", world=2, arguments=arguments, environment=HERE, timeout_s=200):
        assert found == {plan: [True, True, 0.0] for plan in TRAINED}


def test_a_sharded_module_is_refused_and_stays_as_it_is() -> None:
    for said, apart in run("workers_01:sharded", world=2, environment=HERE, timeout_s=100):
        assert said.startswith("CaptureError: 'weight' is a DTensor") and "\n" not in said and apart == 0
