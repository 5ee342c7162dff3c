"""A script that ends without `pt.close` ends at once and with code 0 under every strategy.

With or without `dist.destroy_process_group`, also where something is still on its way.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.train.launch import NOTE

SCRIPT = Path(__file__).with_name("script_08.py")
PLANS = [
    "allreduce",
    "overlap",
    "priority",
    "lazy",
    "local",
    "post-local",
    "diloco",
    "auto",
    "terngrad",
    "dgc",
    "powersgd",
    "qsgd",
    "signsgd",
    "onebit",
    "topk",
    "randomk",
    "fp16",
    "bf16",
]
#: of which parameters, gradients or nothing may be on their way
FEW = ["overlap", "priority", "dgc", "auto", "local"]
#: seconds between a script's last line and the end of its process; the hang was of 60, on any machine
AT_ONCE = 30.0


def ended(how, plans, port):
    """The lines of both ranks, which ended with code 0, without a wait and with nothing on stderr."""
    shared = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, str(SCRIPT), how, *plans]
    ranks = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        said, seconds = [], []
        for process in ranks:
            out, err = process.communicate(timeout=200)
            notes = [line for line in err.splitlines() if not line.startswith(NOTE)]
            assert process.returncode == 0 and not notes, (how, process.returncode, err)
            *lines, last = out.splitlines()
            said.append(lines)
            seconds.append(time.time() - float(last.removeprefix("done ")))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert max(seconds) < AT_ONCE, (how, seconds)
    return said


@pytest.mark.parametrize(("how", "plans"), [("destroys", PLANS), ("pending", FEW), ("nothing", FEW)])
def test_it_ends_at_once(how, plans, free_port):
    ended(how, plans, free_port)


def test_after_the_groups_were_destroyed_parameters_still_come_and_close_gives_the_whole_state(free_port):
    plans = ["overlap", "priority", "allreduce"]
    first, second = ended("goes on", plans, free_port)
    assert first == second
    sums = [float(line.split()[-1]) for line in first if line.startswith("sum")]
    assert sums == pytest.approx([sums[0]] * len(plans), rel=1e-4)
    assert [line for line in first if line.startswith("state")] == [f"state {plan} 4" for plan in plans]
