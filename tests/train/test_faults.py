"""Ranks that are killed, disks that are full: training ends as if nothing had happened, or goes on with what it has."""

import os
import random
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch

from paceline.errors import RunError
from paceline.train.checkpoint import Checkpoints
from paceline.train.launch import elastic

pytest.importorskip("sklearn")


def children(process):
    """Ranks that torchrun has started."""
    out = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == process:
                    out.append(int(entry.name))
            except OSError:
                continue
    return sorted(out)


def run(folder, strategy, kills, seed=0):
    """The final loss, with a rank killed `kills` times at random moments after training has begun."""
    chance = random.Random(seed)
    arguments = ["--task", "digits-cnn", "--strategy", strategy, "--steps", "60", "--checkpoint", str(folder), "--every", "5",
                 "--timeout-s", "20", "--record", str(folder / "record")]
    with tempfile.TemporaryFile() as output:
        process = elastic("paceline.train.tasks.loop", arguments, world=2, restarts=kills, output=output)
        try:
            seen = 0
            for _ in range(kills):
                wait_for(lambda seen=seen: begun(folder) > seen or process.poll() is not None, 120)
                seen = begun(folder)
                time.sleep(chance.random() * 0.3)
                victims = children(process.pid)
                if victims:
                    os.kill(chance.choice(victims), signal.SIGKILL)
            process.wait(timeout=200)
        finally:
            process.kill()
        output.seek(0)
        text = output.read().decode()
    found = re.findall(r"loss (\S+) from step (\d+)", text)
    assert process.returncode == 0 and found, text[-2000:]
    return float(found[-1][0]), int(found[-1][1])


def begun(folder):
    """Times that a run has come as far as its first step after a start."""
    path = folder / "record" / "record.jsonl"
    return path.read_text().count('"kind": "run"') if path.exists() else 0


def wait_for(done, seconds):
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.parametrize("strategy", ["allreduce", "onebit"])
def test_a_killed_rank_costs_nothing_but_time(tmp_path, strategy):
    whole, _ = run(tmp_path / "whole", strategy, 0)
    cut, _ = run(tmp_path / "cut", strategy, 2)
    assert cut == whole


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    saved = Checkpoints(tmp_path)
    saved.save(1, net, optimizer)
    saved.wait()
    real = torch.save

    def full(content, path):
        real(content, path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.train.checkpoint.torch.save", full)
    saved.save(2, net, optimizer)
    saved.wait()
    assert "step 2 was not written" in saved.problem and "No space left" in saved.problem
    assert saved.steps() == [1] and saved.check(1) is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


def test_broken_checkpoints_are_refused_in_one_line(tmp_path):
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    saved = Checkpoints(tmp_path, asynchronous=False)
    saved.save(3, net, optimizer)
    data = tmp_path / "step-000000003" / "model.pt"
    data.write_bytes(data.read_bytes()[:-10] + b"0123456789")
    assert "checksum differs" in saved.check(3)
    with pytest.raises(RunError, match="no checkpoint in .* is whole: .*checksum differs.*; remove the folder"):
        saved._newest()
