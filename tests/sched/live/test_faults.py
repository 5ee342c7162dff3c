"""The daemon killed at any point, disks that fill up, pages that rot: no job is lost, none runs twice."""

import os
import random
import signal
import subprocess
import time
import warnings

import pytest

from paceline.errors import RunError
from paceline.sched.live import Daemon, Setup
from paceline.sched.live.driver import Driver
from paceline.sched.live.local import Local
from paceline.sched.live.slurm import Slurm
from paceline.sched.live.store import Store

POLICY = "marginal(interval_s=0,worth=0,review_s=0)"
#: calls before and after which a daemon dies: around each write (journal, database), around each order to the engine
POINTS = [(Store, "commit"), (Store, "_write"), (Driver, "start"), (Local, "launch"), (Slurm, "launch"), (Driver, "stop"), (Driver, "observe")]


def die_at(point):
    """In a forked child: kills this process with SIGKILL at that point, counted over all calls above."""
    left = [point]

    def step():
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(call):
        def wrapped(self, *args, **more):
            step()
            try:
                return call(self, *args, **more)
            finally:
                step()

        return wrapped

    for owner, name in POINTS:
        setattr(owner, name, around(getattr(owner, name)))


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


def kills(tools, state, wanted, seed, engine="local", nodes="4x1"):
    """Runs one job list under a daemon that dies again and again; returns how often it did."""
    draw = random.Random(seed)
    setup = Setup(state=state, engine=engine, nodes=nodes, policy=POLICY, clock="model", interval_s=0.0, grace_s=30.0)
    orders = tools.mixed(tools.counter("a", 100, each_s=0.01, least=1, most=4, devices=2))
    count, ended = 0, False
    while not ended:
        point = draw.randrange(1, 40) if count < wanted else 10**9

        def work(setup, point=point):
            die_at(point)
            tools.run(Daemon(setup), orders)

        ended = in_child(setup, work)
        count += not ended
    daemon = Daemon(setup)
    assert {row["state"] for row in daemon.queue()} == {"completed"} and daemon.idle
    daemon.close()
    expected = tools.simulated(orders, POLICY, daemon.ledger.nodes)
    log = [entry for _, entry in sorted(daemon.store.rows["log"].items(), key=lambda item: int(item[0]))]
    assert [decision for entry in log for decision in entry["decisions"]] == [decision for _, decision in expected], "decided as if never killed"
    tools.once(state)
    return count


def test_killed_at_some_points(tools, tmp_path):
    assert kills(tools, tmp_path / "state", 8, seed=1) >= 4


def test_killed_on_slurm(tools, tmp_path, slurm):
    assert kills(tools, tmp_path / "state", 5, seed=2, engine="slurm", nodes="all") >= 3


@pytest.mark.skipif(not os.environ.get("PACELINE_SLOW"), reason="takes minutes: set PACELINE_SLOW=1")
def test_killed_at_fifty_points(tools, tmp_path):
    count = rounds = 0
    while count < 50:
        count += kills(tools, tmp_path / f"state{rounds}", min(12, 50 - count), seed=100 + rounds)
        rounds += 1
        assert rounds < 20
    assert count >= 50


def test_killed_from_outside_and_found_again(tools, tmp_path):
    """A daemon of the command line, killed while its jobs run; the next one adopts them: no second attempt."""
    state, file = tmp_path / "state", tmp_path / "jobs.toml"
    command = [tools.python, "-S", str(tools.here / "counter.py"), "150", "0.02"]
    file.write_text(f"[[job]]\nname = 'a'\ncommand = {command!r}\nwork = 150\nrates = {{ 1 = 50 }}\n")
    words = [tools.python, "-m", "paceline.cli", "schedule", str(file), "--state", str(state), "--policy", "fifo", "--nodes", "2x1"]
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
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        setup = Setup(state=place / "state", policy="fifo", nodes="1x1", report_s=0.05)
        live = Daemon(setup)
        live.submit([tools.counter("a", 100), tools.counter("b", 5)])
        while not live.queue()[0]["done"]:
            live.turn()
        (place / "junk").write_bytes(b"x" * 4096)
        with pytest.raises(OSError), (place / "junk").open("ab", buffering=0) as junk:
            while True:
                junk.write(b"x" * 512)
        with pytest.raises((RunError, OSError), match="(is full; nothing that was confirmed is lost|No space left)"):
            while True:
                live.submit([tools.counter(f"c{time.monotonic_ns()}", 5)])
        live.close()
        (place / "junk").unlink()
        states = tools.run(Daemon(setup))
        assert states["a"] == states["b"] == "completed" and set(states.values()) == {"completed"}
        tools.once(place / "state")
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
