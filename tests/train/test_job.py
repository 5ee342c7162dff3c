"""A run that a scheduler stops, resizes, kills and starts again goes on where it was; the same steps, the
same losses.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import paceline.train as pt
from paceline.errors import SpecError
from paceline.train.launch import Place

STEPS = 60


class Scheduler:
    """Starts `paceline train` on nodes as `paceline schedule` does, and tells how far it may go."""

    def __init__(self, folder, strategy="allreduce"):
        self.folder, self.attempt, self.strategy = folder, 0, strategy
        (folder / "checkpoint").mkdir(parents=True)

    def start(self, allocation, limit):
        """One command on each node; `allocation` has the devices of each."""
        self.attempt += 1
        run = self.folder / str(self.attempt)
        run.mkdir()
        (self.folder / "limit").write_text(str(limit))
        common = {
            "PACELINE_NODES": len(allocation),
            "PACELINE_DEVICES": sum(allocation),
            "PACELINE_RENDEZVOUS": f"file://{run}/rendezvous",
            "PACELINE_CHECKPOINT": self.folder / "checkpoint",
            "PACELINE_PROGRESS": self.folder / "progress",
            "PACELINE_LIMIT": self.folder / "limit",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [
            sys.executable,
            "-m",
            "paceline.cli",
            "train",
            "--task",
            "digits-cnn",
            "--strategy",
            self.strategy,
            "--steps",
            str(STEPS),
            "--every",
            "10",
            "--record",
            str(self.folder / "record"),
            "--json",
        ]
        out = []
        for rank, devices in enumerate(allocation):
            own = {
                "PACELINE_NODE_RANK": rank,
                "PACELINE_NODE_DEVICES": devices,
                "PACELINE_FIRST_DEVICE": sum(allocation[:rank]),
            }
            environment = {**os.environ, **{key: str(value) for key, value in {**common, **own}.items()}}
            out.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        return out

    def done(self):
        """Work done and checkpointed, as it was told last."""
        path = self.folder / "progress"
        return (
            tuple(map(int, path.read_text().splitlines()[-1].split()))
            if path.exists() and path.read_text()
            else (0, 0)
        )

    def wait_for(self, steps):
        deadline = time.monotonic() + 250
        while self.done()[0] < steps:
            assert time.monotonic() < deadline, "it did not come so far"
            time.sleep(0.05)


def ranks_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ended(command):
    """Its exit code and what it printed."""
    said, _ = command.communicate(timeout=250)
    return command.returncode, said


def losses(folder):
    """By step, each as it was last done."""
    lines = [json.loads(line) for line in (folder / "record" / "record.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}, [
        line for line in lines if line["kind"] == "run"
    ]


def uninterrupted(folder):
    """Losses of the same run in this process alone."""
    from paceline.train.tasks.loop import train

    dist.init_process_group("gloo", init_method=f"file://{folder}/alone", rank=0, world_size=1)
    try:
        return train("digits-cnn", "allreduce", steps=STEPS)["losses"]
    finally:
        dist.destroy_process_group()


@pytest.mark.timeout(600)  # eight processes that import torch
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds ranks in /proc")
def test_train_can_be_killed_stopped_resized_and_started_again(tmp_path):
    pytest.importorskip("sklearn")
    job = Scheduler(tmp_path / "job")

    (command,) = job.start([1], limit=25)  # a rank is killed: not a failure, so that it will be started again
    job.wait_for(25)
    os.kill(ranks_of(command.pid)[0], signal.SIGKILL)
    assert ended(command)[0] == 128 + signal.SIGKILL

    # goes on from the checkpoint of step 20 on three ranks; TERM comes late to one node, and twice
    nodes = job.start([2, 1], limit=41)
    job.wait_for(41)
    for command in (*nodes, nodes[0]):
        command.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    (first, said), (second, _) = map(ended, nodes)
    assert (first, second) == (0, 0)
    stopped = json.loads(said)["stopped"]
    assert job.done() == (stopped, stopped) and 41 <= stopped <= 43

    (command,) = job.start([2], limit=10**9)
    code, said = ended(command)
    assert code == 0 and json.loads(said)["stopped"] is None and job.done() == (STEPS, STEPS)
    curve, starts = losses(tmp_path / "job")
    assert [(line["world"], line["start"]) for line in starts] == [(1, 0), (3, 20), (2, stopped)]

    assert list(curve) == list(range(1, STEPS + 1))
    assert list(curve.values()) == pytest.approx(uninterrupted(tmp_path), rel=2e-3)


def test_where_a_process_stands(monkeypatch):
    for name in ("PACELINE_NODES", "PACELINE_RENDEZVOUS", "PACELINE_FIRST_DEVICE", "PACELINE_NODE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert Place.given() is None
    monkeypatch.setenv("PACELINE_NODES", "3")
    monkeypatch.setenv("PACELINE_NODE_RANK", "2")
    monkeypatch.setenv("PACELINE_DEVICES", "6")
    monkeypatch.setenv("PACELINE_RENDEZVOUS", "file:///somewhere")
    assert Place.given() == Place(
        nodes=3, node_rank=2, world=6, here=2, first=4, rendezvous="file:///somewhere"
    )
    monkeypatch.setenv("PACELINE_NODE_DEVICES", "1")
    monkeypatch.setenv("PACELINE_FIRST_DEVICE", "5")
    assert (Place.given().here, Place.given().first) == (1, 5)


def test_a_loop_of_ones_own_is_stopped_by_term_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CHECKPOINT", str(tmp_path / "checkpoint"))
    monkeypatch.setenv("PACELINE_PROGRESS", str(tmp_path / "progress"))
    before = signal.getsignal(signal.SIGTERM)
    try:
        seen = [*_loop(stop_in=7), *_loop(stop_in=None)]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == list(range(1, 13))
    assert (tmp_path / "progress").read_text().splitlines()[6:8] == ["7 7", "8 7"]


def _loop(stop_in):
    """Twelve steps of nothing much, in one process."""
    net = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    job = pt.Job(net, optimizer, every=5)
    for step in job.steps(12):
        yield step
        if step == stop_in:
            os.kill(os.getpid(), signal.SIGTERM)
    assert job.stopped == (stop_in is not None)


def test_without_scheduler_or_folder_it_is_a_plain_loop(monkeypatch):
    monkeypatch.delenv("PACELINE_CHECKPOINT", raising=False)
    net = torch.nn.Linear(3, 3)
    before = signal.getsignal(signal.SIGTERM)
    assert list(pt.Job(net, torch.optim.SGD(net.parameters(), lr=0.1)).steps(3)) == [1, 2, 3]
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(SpecError, match="1 or more; got 0"):
        pt.Job(net, torch.optim.SGD(net.parameters(), lr=0.1), every=0)
