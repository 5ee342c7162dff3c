"""One job list, one sequence of decisions: in a simulation, on this machine, on a real Slurm and on a real
Ray of four nodes each.

The first job trains on handwritten digits; it is made smaller and larger again, and its loss goes on as if it
had never been touched.
"""

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import pytest

from paceline.sched.live import JobSpec
from paceline.sched.live.run import progress

POLICY = "marginal(interval_s=0,worth=0,review_s=0)"
STEPS = 60
SLOW = pytest.mark.skipif(not os.environ.get("PACELINE_SLOW"), reason="takes a minute: set PACELINE_SLOW=1")


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """The data as a file, so that a job need not import what reads it."""
    torch = pytest.importorskip("torch")
    found = pytest.importorskip("sklearn.datasets").load_digits()
    path = tmp_path_factory.mktemp("digits") / "digits.pt"
    torch.save(
        {"x": torch.tensor(found.data, dtype=torch.float32) / 16, "y": torch.tensor(found.target)}, path
    )
    return path


@pytest.fixture(scope="session")
def straight(digits, tmp_path_factory):
    """The loss of a run on one node that nobody stops."""
    folder = tmp_path_factory.mktemp("straight")
    environment = {
        "PACELINE_NODE_RANK": "0",
        "PACELINE_NODES": "1",
        "PACELINE_CHECKPOINT": str(folder),
        "PACELINE_PROGRESS": f"{folder}/progress",
    }
    threads, handler = sys.modules["torch"].get_num_threads(), signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:  # here, where torch is imported already
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["digits.py", str(digits), str(STEPS)])
        runpy.run_path(str(Path(__file__).with_name("digits.py")))
    sys.modules["torch"].set_num_threads(threads)
    signal.signal(signal.SIGTERM, handler)
    return losses(folder)


def losses(folder):
    return [json.loads(line) for line in (folder / "loss.jsonl").read_text().splitlines()]


def training(tools, digits):
    return JobSpec.of(
        {
            "name": "digits",
            "command": [tools.python, str(tools.here / "digits.py"), str(digits), str(STEPS)],
            "work": STEPS,
            "devices": 1,
            "most": 2,
            "restart": 0,
            "rates": {"1": 4.0, "2": 7.2},
            "environment": {"OMP_NUM_THREADS": "1"},
        },
        tools.here,
    )


def check(tools, daemon, digits, straight, **engine):
    specs = [
        training(tools, digits),
        tools.counter("b", 30, devices=3, submit=2.0),
        tools.counter("c", 40, devices=3, submit=2.5),
        tools.counter("d", 20, submit=6.0),
    ]
    live = daemon(policy=POLICY, clock="model", **engine)
    states = tools.run(live, specs)
    assert set(states.values()) == {"completed"}, daemon.lines
    expected = tools.simulated(specs, POLICY, live.ledger.nodes)
    assert [decision for _, decision in tools.decided(live)] == [decision for _, decision in expected]
    assert [at for at, _ in tools.decided(live)] == pytest.approx([at for at, _ in expected])
    assert sum(decision["decision"] == "resize" for _, decision in expected) == 2
    found = losses(daemon.state / "jobs/digits/checkpoint")
    assert [row["step"] for row in found] == list(range(1, STEPS + 1)), "each step was done once"
    worlds = [row["world"] for row in found]
    assert [world for i, world in enumerate(worlds) if i == 0 or world != worlds[i - 1]] == [2, 1, 2], (
        "on two nodes, on one, on two again"
    )
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in straight], rel=1e-3)
    assert found[-1]["loss"] < 0.2 * found[0]["loss"]
    tools.once(daemon.state)


def test_local(tools, daemon, digits, straight):
    check(tools, daemon, digits, straight, engine="local")


def test_slurm(tools, daemon, digits, straight, slurm):
    check(tools, daemon, digits, straight, engine="slurm", nodes="all")


def test_ray(tools, daemon, digits, straight, ray_cluster):
    check(tools, daemon, digits, straight, engine="ray", nodes=ray_cluster.address)


def on_the_wall(tools, daemon, scale, **engine):
    """On the wall's clock times are what they are, but where events are well apart the decisions are those of
    a simulation, one by one.
    """

    def job(name, seconds, at, devices, **more):
        given = {
            "name": name,
            "work": round(10 * seconds),
            "devices": devices,
            "submit": at * scale,
            "restart": scale,
            **more,
        }
        words = [
            tools.python,
            "-S",
            str(tools.here / "counter.py"),
            str(given["work"]),
            str(0.1 * scale),
            "0.1",
        ]
        rates = {
            str(n): 10 * n / (1 + 0.1 * (n - 1)) / scale
            for n in range(given.get("least", devices), given.get("most", devices) + 1)
        }
        return JobSpec.of({**given, "command": words, "rates": rates}, tools.here)

    specs = [job("a", 130, 0, 2, least=1, most=4), job("b", 8, 8, 2), job("c", 10, 30, 3)]
    live = daemon(policy=POLICY, clock="wall", **engine)
    states = tools.run(live, specs)
    assert set(states.values()) == {"completed"}, daemon.lines
    expected = [decision for _, decision in tools.simulated(specs, POLICY, live.ledger.nodes)]
    assert [decision for _, decision in tools.decided(live)] == expected, tools.decided(live)
    assert [(d["decision"], d["name"]) for d in expected] == [
        ("start", "a"),
        ("resize", "a"),
        ("start", "b"),
        ("resize", "a"),
        ("start", "c"),
        ("resize", "a"),
        ("resize", "a"),
    ]
    tools.once(daemon.state)


def test_local_on_the_wall(tools, daemon):
    on_the_wall(tools, daemon, 0.3)


@SLOW
def test_slurm_on_the_wall(tools, daemon, slurm):
    on_the_wall(tools, daemon, 0.7, engine="slurm", nodes="all")


@SLOW
def test_ray_on_the_wall(tools, daemon, ray_cluster):
    on_the_wall(tools, daemon, 1.0, engine="ray", nodes=ray_cluster.address)


def moved(tools, daemon, kill, restore=lambda node: None, **engine):
    """A node dies under two jobs: the one on it goes on elsewhere, once."""
    live = daemon(**engine)
    live.submit([tools.counter("a", 150, devices=3), tools.counter("b", 150)])
    end = time.monotonic() + 120
    while any(row["done"] < 15 for row in live.queue()):
        live.turn()
        time.sleep(0.05)
        assert time.monotonic() < end, live.queue()
    node = live.machine.state.jobs["b"].allocation[0][0]
    kill(node + 1)
    while not any("is gone" in line for line in daemon.lines):
        live.turn()
        time.sleep(0.05)
        assert time.monotonic() < end, live.queue()
    assert tools.run(live) == {"a": "completed", "b": "completed"}
    restore(node + 1)
    assert {row["job"]: row["attempts"] for row in live.queue()} == {"a": 1, "b": 2}
    tools.once(daemon.state)


def killed(tools, daemon, whom, **engine):
    """A worker of a gang dies, or the process that watches it: the job goes on from its checkpoint, all of
    it, once.
    """
    live = daemon(**engine)
    live.submit([tools.counter("a", 250, devices=2), tools.counter("b", 250)])
    end = time.monotonic() + 120
    while not (folder := tools.attempt(daemon.state, "a")) or (progress(daemon.state, "a") or (0,))[0] < 25:
        live.turn()
        time.sleep(0.05)
        assert time.monotonic() < end, live.queue()
    watcher = int((folder / "1/pid").read_text())
    os.kill(watcher if whom == "watcher" else tools.child(watcher), signal.SIGKILL)
    assert tools.run(live) == {"a": "completed", "b": "completed"}, daemon.lines
    assert {row["job"]: row["attempts"] for row in live.queue()} == {"a": 2, "b": 1}
    assert any(line.endswith("it goes on from its checkpoint") for line in daemon.lines)
    tools.once(daemon.state)


@pytest.mark.parametrize("whom", ["worker", pytest.param("watcher", marks=SLOW)])
def test_slurm_loses_a_worker(tools, daemon, slurm, whom):
    killed(tools, daemon, whom, engine="slurm", nodes="all")


@SLOW
def test_slurm_does_not_answer(tools, daemon, slurm):
    """While it is away nothing is given up and nothing is started; jobs go on, and one that ended meanwhile
    has ended.
    """
    live = daemon(engine="slurm", nodes="all")
    live.submit([tools.counter("a", 60), tools.counter("b", 600), tools.counter("c", 20, devices=4)])
    end = time.monotonic() + 240

    def until(done):
        while not done():
            live.turn()
            time.sleep(0.1)
            assert time.monotonic() < end, live.queue()

    until(lambda: all((progress(daemon.state, name) or (0,))[0] >= 10 for name in "ab"))
    slurm.stop_controller()
    until(lambda: any("nothing is started or given up until it answers" in line for line in daemon.lines))
    while (progress(daemon.state, "a") or (0,))[0] < 60:
        time.sleep(0.1)
        assert time.monotonic() < end
    slurm.begin_controller()
    assert tools.run(live) == {"a": "completed", "b": "completed", "c": "completed"}, daemon.lines
    assert {row["job"]: row["attempts"] for row in live.queue()} == {"a": 1, "b": 1, "c": 1}
    assert any("answers again" in line for line in daemon.lines)
    tools.once(daemon.state)


@SLOW
@pytest.mark.parametrize("whom", ["worker", "watcher"])
def test_ray_loses_a_worker(tools, daemon, ray_cluster, whom):
    killed(tools, daemon, whom, engine="ray", nodes=ray_cluster.address)


def test_slurm_loses_a_node(tools, daemon, slurm):
    moved(tools, daemon, slurm.kill_node, slurm.mend_node, engine="slurm", nodes="all")


@SLOW
def test_ray_loses_a_node(tools, daemon, ray_cluster):
    moved(tools, daemon, ray_cluster.kill_node, engine="ray", nodes=ray_cluster.address)
