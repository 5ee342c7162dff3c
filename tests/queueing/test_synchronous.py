"""The synchronous model: made-up clusters that obey it, and the measured one."""

import os
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import DataError, SpecError
from paceline.queueing.synchronous import MeasuredStep, SynchronousModel

TRUE = SynchronousModel(
    local={1: ((8.0, 32.0), (0.1, 0.31)), 4: ((8.0, 32.0), (0.12, 0.35))},
    transfer_s=0.2,
    sharing=0.3,
    overlap=2.0,
)
PLACES = [(1, 1), (1, 4), (2, 2), (2, 4), (2, 8)]


def rows(model, places, noise=0.0):
    source = np.random.default_rng(0)
    return [
        MeasuredStep(
            nodes=n,
            replicas=r,
            widest=-(-r // n),
            batch=b,
            step_s=float(model.step_s(n, r, b)) * float(np.exp(noise * source.normal())),
        )
        for n, r in places
        for b in (8.0, 16.0, 32.0)
    ]


def test_recovers_a_cluster_from_two_nodes():
    fitted = SynchronousModel.fit(rows(TRUE, PLACES))
    for n, r in ((4, 4), (8, 32), (16, 64)):
        assert float(fitted.step_s(n, r, 16.0)) == pytest.approx(float(TRUE.step_s(n, r, 16.0)), rel=0.03)


def test_two_nodes_share_one_connection():
    assert float(TRUE.network_s(2, 2)) == pytest.approx(2 * 0.2)
    assert float(TRUE.network_s(4, 4)) == pytest.approx(1.5 * 0.2)
    assert float(TRUE.network_s(1, 4)) == 0.0


def test_noise_becomes_a_barrier():
    noisy = SynchronousModel.fit(rows(TRUE, [*PLACES, (2, 3), (2, 6), (2, 5)], noise=0.15))
    assert 0.05 < noisy.spread < 0.4
    assert float(noisy.network_s(16, 16)) > 1.2 * float(noisy.network_s(3, 3))


def test_one_node_alone_and_larger_batches():
    alone = SynchronousModel.fit(rows(TRUE, PLACES[:2]))
    assert alone.transfer_s == 0.0
    assert float(alone.step_s(1, 1, 64.0)) == pytest.approx(0.31 + 32 * (0.31 - 0.17) / 16)
    assert 0.1 < float(alone.step_s(1, 2, 8.0)) < 0.12  # between one and four replicas


def test_round_trip_and_errors():
    assert SynchronousModel.from_dict(TRUE.to_dict()) == TRUE
    with pytest.raises(SpecError, match="not a synchronous model"):
        SynchronousModel.from_dict({"local": 3})
    with pytest.raises(DataError, match="one replica on one node"):
        SynchronousModel.fit(rows(TRUE, [(2, 4)]))
    with pytest.raises(SpecError, match="nodes <= replicas"):
        MeasuredStep(nodes=3, replicas=2, widest=1, batch=1, step_s=1)


@pytest.mark.skipif("PACELINE_DATA" not in os.environ, reason="needs the Pollux measurements (PACELINE_DATA)")
def test_pollux_from_two_nodes_within_fifteen_percent():
    from paceline.bench.throughput.score import pollux

    if not Path(os.environ["PACELINE_DATA"], "traces", "pollux").is_dir():
        pytest.skip("no traces/pollux in PACELINE_DATA")
    found = pollux()
    assert len(found.rows) == 6
    assert all(row.mean < 0.15 and row.runs > 100 for row in found.rows), found.markdown()
