"""The daemon killed at any point, disks that fill up, pages that rot: no job is lost, none runs twice."""

import json
import os
import random
import runpy
import signal
import subprocess
import time
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest

from paceline.errors import RunError
from paceline.sched.live import Daemon, DaemonSettings

POLICY = "marginal(interval_s=0,worth=0,review_s=0)"
SLOW = pytest.mark.skipif(not os.environ.get("PACELINE_SLOW"), reason="takes minutes: set PACELINE_SLOW=1")
die_at = runpy.run_path(str(Path(__file__).with_name("dying.py")))["die_at"]


def in_child(setup, work):
    """Runs a daemon in a child; True when it came to its end, False when it was killed."""
    with warnings.catch_warnings():  # other tests left threads; the child uses nothing of theirs
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work(setup)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def in_process(setup, specs, point, tools, folder):
    """The same in a process of its own."""
    (folder / "setup.json").write_text(json.dumps({**asdict(setup), "state": str(setup.state)}))
    (folder / "orders.json").write_text(json.dumps([dict(spec.fields) for spec in specs]))
    words = [
        tools.python,
        str(tools.here / "dying.py"),
        str(point),
        str(folder / "setup.json"),
        str(folder / "orders.json"),
    ]
    found = subprocess.run(words, capture_output=True, text=True, timeout=400)
    assert found.returncode in (0, -signal.SIGKILL), found.stderr[-2000:]
    return found.returncode == 0


def kills(tools, state, wanted, seed, engine="local", nodes="4x1"):
    """Runs one job list under a daemon that dies again and again; returns how often it did."""
    draw = random.Random(seed)
    setup = DaemonSettings(
        state=state, engine=engine, nodes=nodes, policy=POLICY, clock="model", interval_s=0.0, grace_s=30.0
    )
    specs = tools.mixed(tools.counter("a", 100, each_s=0.01, least=1, most=4, devices=2))
    count, ended = 0, False
    while not ended:
        point = draw.randrange(1, 40) if count < wanted else 10**9

        def work(setup, point=point):
            die_at(point)
            tools.run(Daemon(setup), specs)

        ended = (
            in_process(setup, specs, point, tools, state.parent) if engine == "ray" else in_child(setup, work)
        )
        count += not ended
    daemon = Daemon(setup)
    assert {row["state"] for row in daemon.queue()} == {"completed"} and daemon.idle
    daemon.close()
    expected = tools.simulated(specs, POLICY, daemon.ledger.nodes)
    log = [entry for _, entry in sorted(daemon.store.rows["log"].items(), key=lambda item: int(item[0]))]
    assert [decision for entry in log for decision in entry["decisions"]] == [
        decision for _, decision in expected
    ], "decided as if never killed"
    tools.once(state)
    return count


def test_killed_at_some_points(tools, tmp_path):
    assert kills(tools, tmp_path / "state", 8, seed=1) >= 4


def test_killed_on_slurm(tools, tmp_path, slurm):
    assert kills(tools, tmp_path / "state", 5, seed=2, engine="slurm", nodes="all") >= 3


@SLOW
@pytest.mark.timeout(1200)
def test_killed_on_ray(tools, tmp_path, ray_cluster):
    assert kills(tools, tmp_path / "state", 12, seed=4, engine="ray", nodes=ray_cluster.address) >= 8


@SLOW
def test_killed_at_fifty_points(tools, tmp_path):
    count = rounds = 0
    while count < 50:
        count += kills(tools, tmp_path / f"state{rounds}", min(12, 50 - count), seed=100 + rounds)
        rounds += 1
        assert rounds < 20
    assert count >= 50


def test_killed_from_outside_and_found_again(tools, tmp_path):
    """A daemon of the command line, killed while its jobs run; the next one adopts them: no second
    attempt.
    """
    state, file = tmp_path / "state", tmp_path / "jobs.toml"
    command = [tools.python, "-S", str(tools.here / "counter.py"), "150", "0.02"]
    file.write_text(f"[[job]]\nname = 'a'\ncommand = {command!r}\nwork = 150\nrates = {{ 1 = 50 }}\n")
    words = [
        tools.python,
        "-m",
        "paceline.cli",
        "schedule",
        str(file),
        "--state",
        str(state),
        "--policy",
        "fifo",
        "--nodes",
        "2x1",
    ]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not (state / "jobs/a/progress").exists():
        time.sleep(0.02)
        assert time.monotonic() < end
    process.kill()
    process.wait()
    done = subprocess.run([*words, "--json"], capture_output=True, text=True, check=True)
    assert '"attempts": 1' in done.stdout and '"state": "completed"' in done.stdout
    tools.once(state)


@SLOW
def test_killed_at_random_moments_on_the_wall(tools, tmp_path):
    """A daemon of the command line on the wall's clock, killed every second or so while jobs come, move and
    end.
    """
    state, file, draw = tmp_path / "state", tmp_path / "jobs.toml", random.Random(5)
    lines = []
    for i in range(8):
        command = [tools.python, "-S", str(tools.here / "counter.py"), "80", "0.05"]
        most = 4 if i % 3 == 0 else 1
        lines.append(
            f"[[job]]\nname = 'job{i}'\ncommand = {command!r}\nwork = '80 steps'\nrates = {{ 1 = 20, 4 = 21"
            f" }}\nmost = {most}\nrestart = 0\nsubmit = {i}\n"
        )
    file.write_text("".join(lines))
    words = [
        tools.python,
        "-m",
        "paceline.cli",
        "schedule",
        str(file),
        "--state",
        str(state),
        "--policy",
        POLICY,
        "--nodes",
        "4x1",
        "--json",
    ]
    kills, out = 0, ""
    for _ in range(60):
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        end = time.monotonic() + (draw.uniform(0.1, 1.2) if kills < 20 else 200)
        while process.poll() is None and (time.monotonic() < end or not (state / "daemon.json").exists()):
            time.sleep(0.02)
        if process.poll() is None:
            process.kill()
            kills += 1
        out, error = process.communicate()
        (state / "daemon.json").unlink(missing_ok=True)
        assert process.returncode in (0, -signal.SIGKILL), error
        if process.returncode == 0:
            break
    found = json.loads(out)
    assert {job["state"] for job in found["jobs"]} == {"completed"} and len(found["jobs"]) == 8 and kills >= 8
    tools.once(state)


def test_a_page_rots_while_a_job_runs(tools, daemon):
    live = daemon()
    live.submit([tools.counter("a", 80), tools.counter("b", 10, submit=1.0)])
    while not live.queue()[0]["done"]:
        live.turn()
    live.close()
    path = daemon.state / "state.db"
    data = bytearray(path.read_bytes())
    data[4096:8192] = random.Random(0).randbytes(4096)
    path.write_bytes(data)
    assert tools.run(daemon()) == {"a": "completed", "b": "completed"}
    assert sum("damaged" in line and "no job is lost" in line for line in daemon.lines) == 1
    tools.once(daemon.state)


def test_the_disk_fills_up_under_a_job(tools, tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True
        ).returncode
    ):
        pytest.skip("mounting a small file system needs root")
    try:
        setup = DaemonSettings(state=place / "state", policy="fifo", nodes="1x1", report_s=0.05)
        live = Daemon(setup)
        live.submit([tools.counter("a", 100), tools.counter("b", 5)])
        while not live.queue()[0]["done"]:
            live.turn()
        (place / "junk").write_bytes(b"x" * 4096)
        with pytest.raises(OSError), (place / "junk").open("ab", buffering=0) as junk:
            while True:
                junk.write(b"x" * 512)
        with pytest.raises(
            (RunError, OSError), match="(is full; nothing that was confirmed is lost|No space left)"
        ):
            while True:
                live.submit([tools.counter(f"c{time.monotonic_ns()}", 5)])
        live.close()
        (place / "junk").unlink()
        states = tools.run(Daemon(setup))
        assert states["a"] == states["b"] == "completed" and set(states.values()) == {"completed"}
        tools.once(place / "state")
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
