"""Paceline's own training under its scheduler: two jobs share two devices, one is made smaller and larger
again, and its loss goes on.
"""

import json
import os
import time

import pytest

from paceline.sched.live import JobSpec

pytestmark = pytest.mark.skipif(
    not os.environ.get("PACELINE_SLOW"),
    reason="imports torch a dozen times, which takes minutes: set PACELINE_SLOW=1",
)

POLICY = "marginal(interval_s=0,worth=0,review_s=0)"


def training(tools, folder, name, steps, **more):
    words = [
        tools.python,
        "-m",
        "paceline.cli",
        "train",
        "--task",
        "digits-cnn",
        "--strategy",
        "allreduce",
        "--steps",
        str(steps),
        "--record",
        name,
    ]
    return JobSpec.of(
        {
            "name": name,
            "command": words,
            "work": f"{steps} steps",
            "rates": {"1": 60, "2": 90},
            "restart": 1,
            "environment": {"OMP_NUM_THREADS": "1"},
            **more,
        },
        folder,
    )


def rows(folder, kind):
    path = folder / "record.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in found if row["kind"] == kind]


def until(live, done, limit_s=240.0):
    end = time.monotonic() + limit_s
    while not done():
        live.turn()
        time.sleep(0.05)
        assert time.monotonic() < end, live.queue()


@pytest.mark.timeout(900)
def test_two_training_jobs_share_a_machine(daemon, tools, tmp_path):
    pytest.importorskip("torch")
    live = daemon(nodes="2x1", policy=POLICY, grace_s=120.0)
    live.submit([training(tools, tmp_path, "long", 800, least=1, most=2)])
    until(live, lambda: len(rows(tmp_path / "long", "step")) >= 60)
    live.submit([training(tools, tmp_path, "short", 50)])
    assert tools.run(live, limit_s=600.0) == {"long": "completed", "short": "completed"}
    decisions = [(d["decision"], d["name"], len(d["allocation"])) for _, d in tools.decided(live)]
    assert decisions[:3] == [("start", "long", 2), ("resize", "long", 1), ("start", "short", 1)]
    assert decisions[3:] in ([("resize", "long", 2)], []), (
        "it grows again, unless it was over before the other"
    )
    runs, steps = rows(tmp_path / "long", "run"), rows(tmp_path / "long", "step")
    assert [run["world"] for run in runs] == [2, 1, 2][: len(runs)] and len(runs) >= 2
    assert [row["step"] for row in steps] == list(range(1, 801)), "each step was done once"
    loss = [row["loss"] for row in steps]
    for run in runs[1:]:
        at = run["start"]
        assert 60 <= at < 800, "it went on where it stopped"
        before, after = sum(loss[at - 20 : at]) / 20, sum(loss[at : at + 20]) / 20
        assert after < 0.5 * loss[0] and after < 3 * before + 0.05, "near the loss where it stopped"
    assert loss[-1] < 0.05 * loss[0]
