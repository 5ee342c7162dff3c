"""Collectives on an emulated cluster, measured for real and shown."""

import os
import sys

import pytest
from rich.console import Console

from paceline.bench.emulate.cluster import CONGESTION
from paceline.bench.emulated_collectives import OPS, measure


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs the right to make network namespaces"
)
def test_every_operation_is_timed_over_tcp_reno(capsys):
    pytest.importorskip("pyroute2")
    found = measure(hosts=[2], links_Bps=[12.5e6], largest_bytes=300_000)
    assert [(line.op, line.size_bytes) for line in found.lines] == [
        (op, size) for op in OPS for size in (65536, 262144)
    ]
    large = {line.op: line for line in found.lines if line.size_bytes == 262144}
    # bytes beyond what a token bucket has saved up cannot come sooner than the link lets them; a busy machine
    # may take longer
    assert all(line.seconds > 0.5 * line.predicted_s for line in large.values())
    assert found.tcp == "reno" or not os.access(CONGESTION, os.W_OK)
    assert found.to_dict()["tcp"] == found.tcp
    Console(width=200).print(found)
    assert f"TCP {found.tcp}" in capsys.readouterr().out
