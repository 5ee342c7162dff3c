"""For every test: examples of property tests are the same in each run; a Ray cluster for those that ask."""

import contextlib
import importlib.util
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("paceline", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("paceline")

CLUSTER = """
import ray, sys
print(ray.init(address="local", num_cpus=2, include_dashboard=False).address_info["gcs_address"], flush=True)
sys.stdin.read()
"""
#: a busy machine takes long to start Ray's own processes
PATIENT = {
    "RAY_raylet_start_wait_time_s": "200",
    "RAY_agent_register_timeout_ms": "200000",
    "RAY_AUTH_MODE": "disabled",
}


@pytest.fixture(scope="session")
def on_ray():
    """Runs the command line with a Ray cluster of two CPUs at hand, which ends with the process that started
    it; gives what it printed.
    """
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'paceline[ray]'")
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **PATIENT},
    ) as process:
        address = process.stdout.readline().strip()
        if not address:
            pytest.skip("ray did not start on this machine in its time")

        def call(*words):
            there = subprocess.run(
                [sys.executable, "-m", "paceline.cli", *words],
                env={**os.environ, **PATIENT, "RAY_ADDRESS": address},
                capture_output=True,
                text=True,
                check=False,
            )
            assert there.returncode == 0, there.stderr
            return there.stdout

        yield call


@pytest.fixture(autouse=True)
def width_of_a_pipe(monkeypatch):
    """Answers are as wide as in a pipe without COLUMNS, whatever started the tests."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def free_port():
    """A port that nobody listens on, as is the one above it, and that is not given to those who ask for any:
    a script started later still finds it free.
    """
    for port in random.sample(range(10_000, 30_000), 100):
        with socket.socket() as one, socket.socket() as two, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            two.bind(("127.0.0.1", port + 1))
            return port
    raise OSError("none of 100 ports is free")


@pytest.fixture(scope="session")
def made_traces():
    """The module `made_traces.py`: traces in the form of Kineto, made event by event."""
    path = Path(__file__).with_name("made_traces.py")
    spec = importlib.util.spec_from_file_location("made_traces", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def recorded_trace(tmp_path_factory):
    """A trace that torch.profiler recorded here, in a process of its own: a second one may crash it."""
    pytest.importorskip("torch", reason="recording a trace needs torch")
    path = tmp_path_factory.mktemp("recorded") / "cpu.json.gz"
    script = Path(__file__).with_name("record_trace.py")
    subprocess.run([sys.executable, str(script), str(path)], check=True, capture_output=True)
    return path
