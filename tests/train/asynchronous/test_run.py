"""Real processes: workers that crash and join, a server that is killed, strategies that learn."""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from paceline.errors import RunError, SpecError
from paceline.train.asynchronous import NAMES, strategies, wire
from paceline.train.asynchronous.launch import Local

COUNTING, LEARNING = (str(Path(__file__).with_name(name)) for name in ("counting.py", "learning.py"))
pytestmark = pytest.mark.timeout(280)


def command(strategy, steps, sleep=0.0, options="{}"):
    return [sys.executable, COUNTING, strategy, str(steps), str(sleep), options]


def curve(folder):
    """(time, loss, worker) of every step of all workers, in order of time."""
    rows = [
        json.loads(line)
        for path in folder.glob("loss*.jsonl")
        for line in path.read_text().splitlines()
        if line.endswith("}")
    ]
    return sorted((row["at_s"], row["loss"], row["worker"]) for row in rows)


def saved(folder):
    return torch.load(folder / "server0.pt", weights_only=True)


def until(condition, seconds=200):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_all_strategies_have_names():
    assert set(strategies()) == set(NAMES)


def test_server_killed_worker_killed_worker_added(tmp_path):
    """A worker is killed, one is added, the server is killed: training goes on, and no update is applied
    twice.
    """
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
    # those who finished: each update exactly once, across the server's death
    assert sorted(counts[:3])[-2:] == [60.0, 300.0]
    assert sum(counts) == state["version"]
    assert run.reports[0]["version"] == state["version"]


def test_the_loss_recovers(tmp_path):
    """A worker is killed and one added, then the server is killed and loses what came after its checkpoint:
    the loss goes on falling.
    """
    learn = [sys.executable, LEARNING, "ps-async", "0.01", '{"checkpoint_every": 25}', str(tmp_path)]
    with Local(workers=3, checkpoint=tmp_path) as run:
        run.start(learn)
        until(lambda: len(curve(tmp_path)) > 60)
        run.workers[2].kill()
        run.add(learn)
        until(lambda: any(worker == 3 for *_, worker in curve(tmp_path)))
        lost = time.time()
        run.supervisor.processes[0].kill()
        until(lambda: sum(at_s > lost for at_s, *_ in curve(tmp_path)) > 600)
        (tmp_path / "stop").touch()
        run.wait(100, lost=1)
    found = curve(tmp_path)
    first, joined, last = (
        statistics.mean(loss for _, loss, worker in part)
        for part in (found[:10], [row for row in found if row[2] == 3][:5], found[-20:])
    )
    assert joined < 0.9 * first  # the new worker starts from what the others have learnt
    assert last < 0.1 * first
    assert len({worker for at_s, _, worker in found if at_s > lost + 1}) == 3
    # the server came back from its checkpoint: an update was applied once or, after the checkpoint, lost;
    # never twice
    state = saved(tmp_path)
    assert 600 < state["version"] <= len(found) + 3  # of the killed worker's last step there may be no line


def test_torchrun_keeps_the_server_in_rank_0(tmp_path, free_port):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--master-port",
            str(free_port),
            COUNTING,
            "ps-async",
            "30",
            "0.005",
            json.dumps({"checkpoint": str(tmp_path)}),
        ],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("DONE") == 2
    state = saved(tmp_path)
    assert state["version"] == 60 and (-state["values"]).tolist()[:2] == [30.0, 30.0]


def test_synchronous_counts(tmp_path):
    with Local(workers=2, servers=2, checkpoint=tmp_path) as run:
        run.start(command("ps-sync", 20))
        run.wait(150)
    assert [report["version"] for report in run.reports] == [20, 20]
    assert [report["staleness"] for report in run.reports] == [{"0": 40}, {"0": 40}]


@pytest.mark.parametrize("overlap", ["true", "false"])
def test_overlap_applies_what_a_step_would(tmp_path, overlap):
    with Local(workers=2, servers=2, checkpoint=tmp_path) as run:
        run.start(command("ps-async", 25, 0.002, f'{{"overlap": {overlap}}}'))
        run.wait(150)
    halves = [torch.load(tmp_path / f"server{i}.pt", weights_only=True) for i in range(2)]
    assert [half["version"] for half in halves] == [50, 50]
    assert (-torch.cat([half["values"] for half in halves])).tolist() == [25.0, 25.0, *[0.0] * 14]


def test_hogwild_shares_memory():
    with Local(workers=2) as run:
        run.start(command("hogwild", 30))
        run.wait(150)
    assert not list(Path("/dev/shm").glob(f"paceline-*{run.place.run}*"))


def test_gossip_meets_and_ends():
    with Local(workers=2) as run:
        run.start(command("gossip", 15))
        run.wait(150)


def test_a_server_that_starts_late_may_be_missed_once(monkeypatch):
    """On a busy machine a server takes long to start, and a first meeting with it may fail: the time in which
    a worker tries again begins when the server is there.
    """
    knock, missed = wire.knock, []

    def first_in_vain(*words):
        if not missed:
            missed.append(words)
            raise wire.Lost("nobody came")
        return knock(*words)

    monkeypatch.setattr(wire, "knock", first_in_vain)
    model = torch.nn.Linear(2, 1)
    with Local(workers=1) as run:
        monkeypatch.setenv("PACELINE_RENDEZVOUS", run.environment()["PACELINE_RENDEZVOUS"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # a server imports torch before it is there, which takes longer than this
        _, optimizer = strategies()["ps-async"](model, optimizer, workers=1, retry_s=0.5)
        optimizer.close()
    assert missed


def test_refuses(monkeypatch):
    for name in ("PACELINE_RENDEZVOUS", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(RunError, match="PACELINE_RENDEZVOUS"):
        strategies()["ps-async"](model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(SpecError, match="count from 1"):
        strategies()["easgd"](model, torch.optim.SGD(model.parameters(), lr=0.1), period=0)
    with pytest.raises(SpecError, match="does not go with"):
        strategies()["ps-async"](
            model, torch.optim.SGD(model.parameters(), lr=0.1), overlap=True, push_every=2
        )
    with pytest.raises(SpecError, match="at least one worker"):
        Local(workers=0)
