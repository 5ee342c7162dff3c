"""Plans told apart: rank correlation and regret, by hand, against scipy, and on the published sweeps."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.validate import board, run
from paceline.bench.validate.sweeps import spearman, summary

DATA = os.environ.get("PACELINE_DATA")


def test_by_hand():
    found = summary(
        [
            ("a", 10.0, 1.0),
            ("a", 11.0, 2.0),
            ("a", 12.0, 3.0),
            ("b", 10.0, 5.0),
            ("b", 12.0, 4.0),
            ("c", 1.0, 1.0),
            ("", 1.0, 9.0),
        ]
    )
    assert found is not None and (found.count, found.rows) == (2, 5)
    assert (
        found.rank_correlation == 1
        and found.regret_pct == pytest.approx(10)
        and found.worst_regret_pct == pytest.approx(20)
    )
    assert summary([("a", 1.0, 1.0), ("b", 1.0, 1.0), ("", 1.0, 1.0), ("", 1.0, 2.0)]) is None
    two = summary([("a", 1.0, 1.0), ("a", 2.0, 2.0)])
    assert two is not None and np.isnan(two.rank_correlation) and two.regret_pct == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=30))
def test_as_scipy_has_it(pairs):
    stats = pytest.importorskip("scipy.stats", reason="compares with scipy")
    a, b = np.array(pairs, dtype=float).T
    if a.std() and b.std():
        assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    else:
        assert spearman(a, b) == 0


@pytest.mark.skipif(not DATA, reason="PACELINE_DATA names no folder with measurement sets")
@pytest.mark.parametrize(
    ("name", "regret", "order"),
    [
        ("vtrain_a100_multi", 2.0, 0.75),
        ("bloom_prequel_a100_topologies", 2.0, 0.6),
        ("vtrain_a100_single", 4.5, 0.85),
    ],
)
def test_the_plan_that_we_would_pick(name, regret, order):
    assert DATA is not None
    score = next(s for s in run([name], Path(DATA)) if s.metric == "step_s")
    assert score.sweeps is not None and score.sweeps.count >= 4
    assert score.sweeps.regret_pct <= regret and score.sweeps.rank_correlation >= order
    entry = board([score])["sets"][0]
    assert entry["sweeps"]["regret_pct"] == score.sweeps.regret_pct
    assert bool(entry["peers"]) == name.startswith("vtrain")
