"""torch's schedulers work on what an asynchronous strategy returns, and what they set reaches the servers."""

import threading
import warnings

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from paceline.errors import RunError
from paceline.train.asynchronous import NAMES, server, strategies
from paceline.train.asynchronous.wire import Rendezvous, serve_store

STEPS = 8
#: each makes a scheduler of an optimizer with two parameter groups
MAKE = {
    "step": lambda o: schedulers.StepLR(o, step_size=2, gamma=0.5),
    # the first group begins at a rate of zero
    "by group": lambda o: schedulers.LambdaLR(o, [lambda step: step / 4, lambda step: 1 / (step + 1)]),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, T_max=STEPS),
    "one cycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 1),  # also the momentum
    "in sequence": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.8)], [3]
    ),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, factor=0.5),
}


@pytest.fixture
def serving(monkeypatch):
    """A session in this process; starts a thread that serves its run."""
    store = serve_store("127.0.0.1", timeout_s=30.0)
    place = Rendezvous(host="127.0.0.1", port=store.port, run="session", timeout_s=30.0)
    monkeypatch.setenv("PACELINE_WORKERS", "1")
    monkeypatch.setenv("PACELINE_RENDEZVOUS", f"127.0.0.1:{store.port}:session")
    threads = []

    def serve():
        threads.append(threading.Thread(target=server.run, args=(place, 0), daemon=True))
        threads[-1].start()

    yield serve
    server.stop(place.store())
    for thread in threads:
        thread.join(30)


def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}]
    return model, torch.optim.SGD(groups, lr=0.02, momentum=0.9, weight_decay=0.01)


def trained(model, optimizer, scheduler):
    """Parameters after a few steps, and the learning rates of each."""
    rates = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.full((5, 6), 0.1 * (step + 1))
        loss = (model(x) - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
        scheduler.step(1.0) if isinstance(scheduler, schedulers.ReduceLROnPlateau) else scheduler.step()
    return [p.detach().clone() for p in model.parameters()], rates


def alone(make):
    model, optimizer = made()
    return trained(model, optimizer, make(optimizer))


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("first", [True, False])
def test_a_server_steps_as_the_scheduler_says(serving, name, first):
    """One worker and one server are plain training, with a scheduler made before the run or in it."""
    serving()
    model, optimizer = made()
    scheduler = MAKE[name](optimizer) if first else None
    model, optimizer = strategies()["ps-async"](model, optimizer, workers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, rates = trained(model, optimizer, scheduler or MAKE[name](optimizer))
    optimizer.close()
    expected, wanted = alone(MAKE[name])
    assert rates == wanted and len({tuple(one) for one in rates}) > 1
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", NAMES)
def test_schedulers_work_under_every_strategy(serving, strategy):
    if strategy not in ("hogwild", "gossip"):  # these have no server
        serving()
    model, optimizer = made()
    options = {"backups": 0} if strategy == "ps-backup" else {}
    model, optimizer = strategies()[strategy](model, optimizer, **options)
    assert isinstance(optimizer, torch.optim.Optimizer)
    _, rates = trained(model, optimizer, schedulers.StepLR(optimizer, step_size=2, gamma=0.5))
    optimizer.close()
    assert [rate for rate, _ in rates] == pytest.approx([0.02 * 0.5 ** (step // 2) for step in range(STEPS)])


def test_the_rest_of_an_optimizer_works_too(serving):
    serving()
    model, optimizer = made()
    _, optimizer = strategies()["ps-async"](model, optimizer, workers=1)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    trained(model, optimizer, schedulers.ConstantLR(optimizer))
    assert len(steps) == STEPS
    assert "SGD" in repr(optimizer.inner) and optimizer.state_dict()["param_groups"][1]["lr"] == 0.05
    with pytest.raises(RunError, match="before parallelize"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    optimizer.close()
