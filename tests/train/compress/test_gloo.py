"""Exchanges between processes bring the same bits to all ranks, and the same as without a network."""

import importlib.util
from pathlib import Path

from paceline.train.launch import run

HERE = Path(__file__).parent


def test_two_processes():
    """Two ranks: sums of two numbers do not depend on their order."""
    found = run("exchanges:over_the_network", world=2, environment={"PYTHONPATH": str(HERE)}, timeout_s=250)
    spec = importlib.util.spec_from_file_location("exchanges", HERE / "exchanges.py")
    exchanges = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(exchanges)
    assert found[0].splitlines() == found[1].splitlines() == exchanges.in_one_process(2).splitlines()
