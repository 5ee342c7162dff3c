"""An asynchronous run has parameters, servers and memory of its own, and leaves nothing behind."""

import os
import stat
from pathlib import Path

import pytest
import torch

from paceline.errors import RunError, SpecError
from paceline.train.asynchronous import strategies
from paceline.train.asynchronous.launch import Local
from paceline.train.launch import run
from paceline.train.tasks.compare import compare

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
COUNTING = str(Path(__file__).parents[1] / "train" / "asynchronous" / "counting.py")
MEMORY = Path("/dev/shm")
pytestmark = pytest.mark.timeout(280)


def ours():
    """Shared memory of Hogwild runs."""
    return set(MEMORY.glob("paceline-*"))


def test_each_run_starts_from_its_own_parameters(tmp_path):
    before = ours()
    names = ["ps-async", "ps-sync", "ps-sync", "hogwild", "easgd", "hogwild", "gossip"]
    runs = [(name, seed) for seed, name in enumerate(names, 1)]
    found = run(
        "workers_21:several",
        world=2,
        arguments={"runs": runs},
        timeout_s=150,
        environment={**HERE, "TMPDIR": str(tmp_path)},
    )
    for rank in found:
        assert [one["start"] for one in rank] == [[float(seed)] for _, seed in runs]
    files = [one["files"] for one in found[0]]
    assert [len(one) for one in files] == [name == "hogwild" for name, _ in runs]
    assert files[3].keys() != files[5].keys()
    assert {*files[3].values(), *files[5].values()} == {"0o600"}
    assert ours() == before
    assert not list(tmp_path.glob("paceline-servers-*"))


def test_a_killed_hogwild_run_leaves_nothing():
    before = ours()
    with pytest.raises(RunError, match="ended with -9"):
        run("workers_21:killed", world=2, timeout_s=150, environment=HERE)
    assert ours() == before


def test_memory_of_a_killed_run_is_swept_and_that_of_a_live_one_is_not():
    from paceline.train.asynchronous.shared_file import SharedFile, sweep

    live, dead = SharedFile.create(), SharedFile.create()
    assert stat.S_IMODE(live.path.stat().st_mode) == 0o600
    os.close(dead._descriptor)  # as the kernel does for a killed process
    sweep()
    assert live.path.exists() and not dead.path.exists()
    other = SharedFile.join(live.path)
    live.leave()
    assert live.path.exists()  # the other worker still has it
    other.leave()
    assert not live.path.exists()
    with pytest.raises(RunError, match="cannot be opened"):
        SharedFile.join(live.path)


def test_a_run_goes_on_from_the_folder_it_is_given_and_no_two_share_one(tmp_path, monkeypatch):
    """An earlier run's folder gives parameters, not its workers' numbers: no update counts as applied."""
    import sys

    command = [sys.executable, COUNTING, "ps-async", "5", "0", "{}"]
    for _ in range(2):
        with Local(workers=1, checkpoint=tmp_path) as local:
            local.start(command)
            local.wait(100)
    assert (-torch.load(tmp_path / "server0.pt", weights_only=True)["values"]).tolist()[0] == 10.0
    model = torch.nn.Linear(2, 1)
    with Local(workers=1) as local:
        monkeypatch.setenv("PACELINE_RENDEZVOUS", local.environment()["PACELINE_RENDEZVOUS"])
        made = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
        _, first = strategies()["ps-async"](model, made[0], workers=1, checkpoint=tmp_path / "one")
        with pytest.raises(SpecError, match="a folder for each run"):
            strategies()["ps-async"](model, made[1], workers=1, checkpoint=tmp_path / "one")
        first.close()
    with pytest.raises(SpecError, match="one strategy and one seed"):
        compare("digits-cnn", [f"ps-async:checkpoint={tmp_path}"], seeds=2, steps=2)
