"""Jobs and engines for tests of live scheduling."""

import contextlib
import sys
import tempfile
import time
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from paceline.sched import policies
from paceline.sched.live import Daemon, DaemonSettings, JobSpec
from paceline.sched.nodes import ClusterShape
from paceline.sched.simulate import simulate

HERE = Path(__file__).parent
COUNTER = HERE / "counter.py"
_found = spec_from_file_location("live_engines", HERE / "engines.py")
engines = module_from_spec(_found)
_found.loader.exec_module(engines)


def counter(name, steps, *, each_s=0.02, devices=1, **more):
    """A job that counts to `steps`; the model believes ten steps a second on one device."""
    least, most = more.get("least", devices), more.get("most", devices)
    rates = {str(n): 10.0 * n / (1 + 0.1 * (n - 1)) for n in range(least, most + 1)}
    given = {
        "name": name,
        "command": [sys.executable, "-S", str(COUNTER), str(steps), str(each_s)],
        "work": steps,
        "devices": devices,
        "rates": rates,
        "restart": 0,
        **more,
    }
    return JobSpec.of(given, HERE)


def mixed(first):
    """Four jobs on four devices, `first` of them elastic: it starts at four or two devices, shrinks for the
    others, grows again.
    """
    return [
        first,
        counter("b", 30, devices=2, submit=1.0),
        counter("c", 12, devices=1, submit=2.5),
        counter("d", 25, devices=3, submit=3.0, restart=0.5),
    ]


def simulated(specs, policy, nodes, interval_s=0.0):
    """(time, decision) of a simulation of the same jobs."""
    shape = ClusterShape(
        devices=tuple(n.devices for n in nodes), kinds=tuple(n.kind for n in nodes), racks=(0,) * len(nodes)
    )
    chosen = policies.get(policy)
    chosen.interval_s = interval_s
    found = simulate([spec.job(shape.kinds, spec.submit_s) for spec in specs], shape, chosen, log=True)
    return [(entry.event.time_s, decision.to_dict()) for entry in found.log for decision in entry.decisions]


def decided(daemon):
    """The same of a live run."""
    return [
        (d["time_s"], {k: v for k, v in d.items() if k != "time_s"}) for d in daemon.summary()["decisions"]
    ]


def run(daemon, specs=(), limit_s=240.0):
    """Turns a daemon until all jobs are over."""
    end = time.monotonic() + limit_s
    daemon.submit(specs)
    try:
        while not daemon.idle:
            daemon.turn()
            time.sleep(0.02)
            assert time.monotonic() < end, daemon.queue()
    finally:
        daemon.close()
    return {row["job"]: row["state"] for row in daemon.queue()}


def once(state):
    """That no job was ever run by two at once, and no attempt begun twice."""
    for starts in state.glob("jobs/*/checkpoint/starts"):
        assert not (starts.parent / "twice").exists(), starts
        lines = starts.read_text().split()
        assert len(lines) == len(set(lines)), (starts, lines)


def attempt(state, job, number=1):
    """The folder of an attempt; None while there is none."""
    return next(iter((state / "jobs" / job).glob(f"{number}-*")), None)


def child(pid):
    """The process that a watcher runs."""
    for _ in range(200):
        with contextlib.suppress(IndexError, OSError):
            return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        time.sleep(0.02)
    raise AssertionError(f"{pid} has no child")


class Tools:
    """What tests share."""

    counter, mixed, simulated, decided = map(staticmethod, (counter, mixed, simulated, decided))
    run, once, child, attempt = map(staticmethod, (run, once, child, attempt))
    python, here = sys.executable, HERE


@pytest.fixture
def tools():
    return Tools


@pytest.fixture
def daemon(tmp_path):
    """Makes daemons in one state folder."""
    lines = []

    def make(**more):
        usual = {
            "state": tmp_path / "state",
            "nodes": "4x1",
            "policy": "fifo",
            "interval_s": 0.0,
            "grace_s": 20.0,
        }
        return Daemon(DaemonSettings(**{**usual, **more}), say=lines.append)

    make.lines = lines
    make.state = tmp_path / "state"
    return make


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A Slurm of four nodes, started and stopped here."""
    if missing := engines.why_no_slurm():
        pytest.skip(missing)
    # by a short path: Slurm's sockets lie there
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:
        found = engines.Slurm(Path(folder))
        yield found
        found.close()


@pytest.fixture(scope="session")
def ray_cluster():
    """A Ray cluster of four nodes, started and stopped here."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed (pip install ray)")
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        found = engines.Ray(Path(folder))
        yield found
        found.close()
