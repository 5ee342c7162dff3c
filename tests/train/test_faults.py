"""Ranks that are killed, disks that are full: training ends as if nothing had happened, or goes on with what
it has.
"""

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch

from paceline.errors import RunError
from paceline.train.checkpoint import Checkpoints
from paceline.train.launch import elastic
from paceline.train.launch import run as run_ranks
from paceline.train.record import Record, read

pytest.importorskip("sklearn")
HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}


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


def run(folder, strategy, kills=0, first=None, seed=0):
    """The final loss and parameters, with a rank killed at `kills` random steps; from the checkpoint `first`
    on, if one is given.
    """
    chance = random.Random(seed)
    moments = sorted(chance.sample(range(8, 40), kills))
    if first is not None:
        shutil.copytree(first, folder / first.name)
    arguments = [
        "--task",
        "digits-cnn",
        "--strategy",
        strategy,
        "--steps",
        "60",
        "--checkpoint",
        str(folder),
        "--every",
        "5",
        "--keep",
        "12",
        "--timeout-s",
        "20",
        "--record",
        str(folder / "record"),
    ]
    with tempfile.TemporaryFile() as output:
        process = elastic("paceline.train.tasks.loop", arguments, world=2, restarts=kills, output=output)
        try:
            for starts, moment in enumerate(moments, 1):
                wait_for(
                    lambda n=starts, at=moment: (
                        (begun(folder) == n and reached(folder) >= at) or process.poll() is not None
                    ),
                    120,
                )
                os.kill(chance.choice(children(process.pid)), signal.SIGKILL)
            process.wait(timeout=200)
        finally:
            process.kill()
        output.seek(0)
        text = output.read().decode()
    found = re.findall(r"loss (\S+) from step (\d+)", text)
    assert process.returncode == 0 and found, text[-2000:]
    model = torch.load(folder / "step-000000060" / "model.pt", weights_only=True)["model"]
    return float(found[-1][0]), {name: tensor.tolist() for name, tensor in model.items()}


def begun(folder):
    """Times that a run has come as far as its first step after a start."""
    path = folder / "record" / "record.jsonl"
    return path.read_text().count('"kind": "run"') if path.exists() else 0


def reached(folder):
    """The last step in the record of a run; 0 where the last line is not of a step."""
    lines = (folder / "record" / "record.jsonl").read_text().splitlines()
    with contextlib.suppress(json.JSONDecodeError):  # half a line
        return json.loads(lines[-1]).get("step", 0)
    return 0


def wait_for(done, seconds):
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.parametrize("strategy", ["onebit", "overlap"])
def test_a_killed_rank_costs_nothing_but_time(tmp_path, strategy):
    whole = run(tmp_path / "whole", strategy)
    # what `overlap` chooses in its first step depends on the link as measured then: both have that step in
    # common
    cut = run(tmp_path / "cut", strategy, kills=2, first=tmp_path / "whole" / "step-000000005")
    assert cut == whole
    assert begun(tmp_path / "cut") == 3


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


def test_no_room_is_noticed_where_it_is_real(tmp_path):
    """A limit on the size of files fails the writes of torch itself, as a full disk does."""
    net = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    saved = Checkpoints(tmp_path)
    saved.save(1, net, optimizer)
    saved.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        for step in (2, 3):
            saved.save(step, net, optimizer)
            saved.wait()
            assert f"step {step} was not written: " in saved.problem and "\n" not in saved.problem
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"] and saved.check(1) is None
    saved.save(4, net, optimizer)
    saved.wait()
    assert saved.problem is None and saved.steps() == [1, 4]


def test_a_rank_that_has_no_room_does_not_keep_the_others_waiting(tmp_path):
    first, second = run_ranks(
        "workers:saves_badly", world=2, arguments={"folder": str(tmp_path)}, environment=HERE, timeout_s=150
    )
    assert (
        first["seconds"] < 60
        and "step 2 was not written: rank1.pt could not be written by its rank" in first["problem"]
    )
    assert "No space left" in second["problem"]
    assert first["steps"] == [1, 3]  # and what was begun in vain is gone


def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with Record(tmp_path) as log:
            for step in range(1, 51):
                log.write("step", step=step, loss=1.0, step_s=0.1)
            log.timeline((), [("forward", 0.0, 0.1)] * 50, "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "the record in" in log.problem
    assert capsys.readouterr().err.strip().splitlines() == [f"paceline: {log.problem}"]
    assert [line["step"] for line in read(tmp_path)] == list(range(1, len(read(tmp_path)) + 1))
    with pytest.raises(RunError, match="no record can be written"):
        Record(tmp_path / "record.jsonl" / "below")
    with pytest.raises(RunError, match="no checkpoints can be written"):
        Checkpoints(tmp_path / "record.jsonl" / "below")


@pytest.mark.parametrize("strategy", ["ddp", "allreduce"])
def test_a_rank_that_hangs_ends_the_run(tmp_path, strategy):
    arguments = [
        "--task",
        "digits-cnn",
        "--strategy",
        strategy,
        "--steps",
        "100000",
        "--checkpoint",
        str(tmp_path / "saved"),
        "--every",
        "1000",
        "--timeout-s",
        "8",
        "--record",
        str(tmp_path / "record"),
    ]
    record = tmp_path / "record" / "record.jsonl"
    with tempfile.TemporaryFile() as output:
        process = elastic("paceline.train.tasks.loop", arguments, world=2, restarts=0, output=output)
        ranks = []
        try:
            wait_for(
                lambda: (
                    (record.exists() and record.read_text().count('"kind": "step"') > 10)
                    or process.poll() is not None
                ),
                120,
            )
            ranks = children(process.pid)
            os.kill(ranks[1], signal.SIGSTOP)
            began = time.monotonic()
            wait_for(lambda: gone(ranks[0]), 100)
            assert time.monotonic() - began < 100  # the limit of a strategy is 300 s where none is given
        finally:
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
            process.wait(timeout=60)
        output.seek(0)
        text = output.read().decode()
    assert process.returncode == 1
    assert "8 s" in text or "8000ms" in text, text[-2000:]  # the engine's limit, or gloo's


def gone(process):
    """Whether a process has ended, or is only waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_broken_checkpoints_are_refused_in_one_line(tmp_path):
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    saved = Checkpoints(tmp_path, asynchronous=False)
    saved.save(3, net, optimizer)
    data = tmp_path / "step-000000003" / "model.pt"
    data.write_bytes(data.read_bytes()[:-10] + b"0123456789")
    assert "checksum differs" in saved.check(3)
    with pytest.raises(
        RunError, match="no checkpoint in .* is whole: .*checksum differs.*; remove the folder"
    ):
        saved._newest()
