"""A rank that is stopped, not dead, ends the run within the time-out, also where it keeps the store."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.errors import RunError
from paceline.train.launch import run

FOLDER = Path(__file__).parent
HERE = {"PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])}
pytestmark = pytest.mark.timeout(280)


def test_a_script_ends_with_a_line_that_says_who_is_silent(free_port):
    told = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, str(FOLDER / "script_26.py")]
    ranks = [
        subprocess.Popen(
            command,
            env={**told, "RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        said, _ = ranks[1].communicate(timeout=150)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    last = said.strip().splitlines()[-1]
    assert ranks[1].returncode == 1
    assert "rank 1 of 2: all-reduce of" in last and "has waited 5 s" in last
    assert "no sign of the rank that keeps the store of the process group" in last


@pytest.mark.parametrize(
    ("strategy", "saved", "said"),
    [
        ("local", True, "rank 1 of 2: another rank is gone, or hangs"),  # they meet after each step, to save
        ("ps-async", False, "the store of this run at .* has not answered for 9 s"),
    ],
)
def test_a_rank_that_does_not_wait_for_gradients_ends_too(tmp_path, strategy, saved, said):
    arguments = {"strategy": strategy, "folder": str(tmp_path) if saved else None}
    with pytest.raises(RunError, match=f"rank 1 ended with 1; its last line: .*{said}"):
        run("workers_26:frozen", world=2, arguments=arguments, environment=HERE, timeout_s=150)


def test_calls_that_are_not_answered_are_given_up():
    from paceline.train.patience import within

    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0.1 s"):
        within(0.1, lambda: time.sleep(5))
    assert time.monotonic() - start < 4
    assert within(5.0, lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 // 0)
