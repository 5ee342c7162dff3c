"""What strategies say they send is what the interface of a host counts."""

import os
import sys
from pathlib import Path

import pytest

from paceline.train.launch import run

pytest.importorskip("pyroute2")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs the right to make network namespaces"
)


HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}


def test_wire_bytes_are_those_of_the_interface():
    from paceline.bench.emulate import EmulatedCluster

    names = [
        "fp32",
        "fp16",
        "bf16",
        "terngrad:keep_last=false",
        "qsgd",
        "onebit",
        "signsgd",
        "dgc:ratio=0.01",
        "topk:ratio=0.01",
        "powersgd",
        "randomk:ratio=0.01",
    ]
    with EmulatedCluster(hosts=2) as cluster:
        found, _ = run(
            "workers:wired",
            world=2,
            on=cluster,
            arguments={"strategies": names},
            timeout_s=200,
            environment={
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
            },
        )
    for name, (sent, counted) in zip(names, found, strict=True):
        # with two ranks a gather and a ring's reduction send the payload once; headers, gloo's own, and the
        # barrier of the test come on top
        assert counted <= sent <= counted * 1.08 + 6000, name


def test_both_directions_of_a_link_are_used_at_once():
    from paceline.bench.emulate import EmulatedCluster

    with EmulatedCluster(hosts=2, link_Bps=2.5e6) as cluster:
        seconds, _ = run(
            "workers:duplex",
            world=2,
            on=cluster,
            timeout_s=200,
            environment={
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
            },
        )
    alone = (1 << 20) / 2.5e6
    assert seconds < 1.35 * alone  # one after the other takes from 1.5 times as long
