"""Real processes: workers that crash and join, a server that is killed, strategies that learn."""

import sys
import time
from pathlib import Path

import pytest
import torch

from paceline.errors import RunError, SpecError
from paceline.train.asynchronous import NAMES, strategies
from paceline.train.asynchronous.launch import Local

COUNTING = str(Path(__file__).with_name("counting.py"))
pytestmark = pytest.mark.timeout(280)


def command(strategy, steps, sleep=0.0, options="{}"):
    return [sys.executable, COUNTING, strategy, str(steps), str(sleep), options]


def saved(folder):
    return torch.load(folder / "server0.pt", weights_only=True)


def until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_all_strategies_have_names():
    assert set(strategies()) == set(NAMES)


def test_server_killed_worker_killed_worker_added(tmp_path):
    """A worker is killed, one is added, the server is killed: training goes on, and no update is applied twice."""
    with Local(workers=2, checkpoint=tmp_path) as run:
        run.start(command("ps-async", 300, 0.01, '{"checkpoint_every": 1}'))
        until(lambda: (tmp_path / "server0.pt").exists() and saved(tmp_path)["version"] > 10)
        run.workers[1].kill()
        run.add(command("ps-async", 60, 0.01, '{"checkpoint_every": 1}'))
        until(lambda: 2 in saved(tmp_path)["last"])
        before = saved(tmp_path)["version"]
        run.supervisor.processes[0].kill()
        run.wait(200, lost=1)
    state = saved(tmp_path)
    assert state["version"] > before
    counts = (-state["values"]).tolist()
    assert sorted(counts[:3])[-2:] == [60.0, 300.0]  # those who finished: each update exactly once, across the server's death
    assert sum(counts) == state["version"]
    assert run.reports[0]["version"] == state["version"]


def test_synchronous_counts(tmp_path):
    with Local(workers=2, servers=2, checkpoint=tmp_path) as run:
        run.start(command("ps-sync", 20))
        run.wait(150)
    assert [report["version"] for report in run.reports] == [20, 20]
    assert [report["staleness"] for report in run.reports] == [{"0": 40}, {"0": 40}]


def test_hogwild_shares_memory():
    with Local(workers=2) as run:
        run.start(command("hogwild", 30))
        run.wait(150)
    assert not list(Path("/dev/shm").glob(f"paceline-*{run.place.run}*"))


def test_gossip_meets_and_ends():
    with Local(workers=2) as run:
        run.start(command("gossip", 15))
        run.wait(150)


def test_refuses(monkeypatch):
    for name in ("PACELINE_RENDEZVOUS", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(RunError, match="PACELINE_RENDEZVOUS"):
        strategies()["ps-async"](model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(SpecError, match="count from 1"):
        strategies()["easgd"](model, torch.optim.SGD(model.parameters(), lr=0.1), period=0)
    with pytest.raises(SpecError, match="at least one worker"):
        Local(workers=0)
