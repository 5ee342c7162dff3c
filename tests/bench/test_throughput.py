"""Runs are taken for real, conducted over the store, and compared with what the models say."""

import csv
import shutil
import time
from collections import Counter

import pytest

from paceline.bench.throughput import conductor, measure, score
from paceline.bench.throughput.conductor import done, profiles
from paceline.bench.throughput.dataset import SET, curves
from paceline.bench.throughput.here import compare
from paceline.bench.throughput.runs import ThroughputRun, grid, standard
from paceline.errors import SpecError, UnknownName
from paceline.queueing.coarse import coarse

pytestmark = pytest.mark.timeout(280)


def test_runs_are_taken_once(tmp_path):
    out = tmp_path / "set.csv"
    runs = [
        ThroughputRun(model="mlp", mode="async", link_Mbps=300, servers=1, workers=n, slow=slow)
        for n, slow in ((1, 1.0), (2, 1.0), (2, 2.5))
    ]
    assert (
        measure.take(
            [*runs, ThroughputRun(model="mlp", mode="sync", link_Mbps=300, servers=2, workers=8)],
            out,
            hosts=4,
            seconds=100,
            loopback=True,
            machine="here",
        )[0].workers
        == 8
    )  # more hosts than there are
    assert set(done(out)) == {run.key for run in runs}
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert {row["machine"] for row in rows} == {"here"} and {row["shaping"] for row in rows} == {"pacing"}
    for row in rows:
        histogram = dict(word.split(":") for word in row["stalenesses"].split())
        assert sum(map(int, histogram.values())) == int(row["steps"]) > 4
    assert len(profiles(out).read_text().splitlines()) == 3
    even, uneven = sorted(curves(out), key=lambda curve: curve.slow)
    assert sorted(even.rates) == [1, 2] and [run.workers for run in uneven.profile.runs] == [1, 2]
    usual, slow = uneven.profile.kinds()
    assert slow.mean() > 1.5 * usual.mean()
    begun = time.monotonic()
    assert (
        measure.take(runs, out, hosts=4, seconds=100, loopback=True) == [] and time.monotonic() - begun < 100
    )
    assert len(out.read_text().splitlines()) == 4


def test_disturbed_runs_are_taken_again(tmp_path, monkeypatch):
    """With no tolerance at all: all but the middle one of three, and that one where it is no longer in the
    middle; the last lines count.
    """
    monkeypatch.setattr(conductor, "_ODD", 0.0)
    out = tmp_path / "set.csv"
    runs = [ThroughputRun(model="mlp", mode="async", link_Mbps=300, servers=1, workers=n) for n in (1, 2, 3)]
    assert measure.take(runs, out, hosts=5, seconds=100, loopback=True, tries=2) == []
    rows = list(csv.DictReader(out.read_text().splitlines()))
    taken = Counter(row["workers"] for row in rows)
    assert set(taken) == {"1", "2", "3"} and max(taken.values()) == 2 and len(rows) in (5, 6)
    (curve,) = curves(out)
    assert curve.rates == {int(row["workers"]): float(row["steps_per_s"]) for row in rows}


def test_predictions_stand_beside_runs():
    found = compare(5, models=["mlp"], link_Bps=12.5e6, modes=["async"], seconds=100)
    assert [row.workers for row in found.rows] == [1, 2, 3] and found.left == 0
    assert [row.profiled for row in found.rows] == [True, True, False]
    for row in found.rows:  # other work on this machine makes runs differ, not by this much
        assert 0.4 < row.fine / row.steps_per_s < 2.5
    assert found.to_dict()["rows"][2]["workers"] == 3


def test_scores_of_one_curve(tmp_path):
    head, *rows = SET.read_text().splitlines()
    kept = [row for row in rows if row.startswith("mlp,async,1200,1,") and row.endswith(",3")]
    (tmp_path / "set.csv").write_text("\n".join([head, *kept]))
    shutil.copy(SET.with_suffix(".profiles.jsonl.gz"), tmp_path / "set.profiles.jsonl.gz")
    even, uneven = (score.measured(tmp_path / "set.csv", kind=kind) for kind in ("even", "uneven"))
    assert [row.model for row in even.rows if row.group == score.ALL] == [
        "fine",
        score.TOLD,
        "coarse",
        "linear",
        "optimus",
    ]
    found = {row.model: row for row in even.rows if row.group == "async, 1 server"}
    assert (
        found["fine"].runs == 6
        and found["fine"].mean <= found["fine"].worst < 0.15
        and found["fine"].saturation == 1.0
    )
    assert found["linear"].worst > 1.0
    assert {row.runs for row in uneven.rows} == {3}
    assert next(even.cells())[0] == "runs" and len(even.to_dict()["rows"]) == 10


def test_repeats_are_averaged(tmp_path):
    head, *rows = SET.read_text().splitlines()
    machines = ("3", "4")
    for name in machines:
        own = [row for row in rows if row.startswith("mlp,async,1200,1,") and row.endswith(f",{name}")]
        (tmp_path / f"{name}.csv").write_text("\n".join([head, *own]))
    both = [line for name in machines for line in (tmp_path / f"{name}.csv").read_text().splitlines()[1:]]
    (tmp_path / "both.csv").write_text("\n".join([head, *both]))
    for name in (*machines, "both"):
        shutil.copy(SET.with_suffix(".profiles.jsonl.gz"), tmp_path / f"{name}.profiles.jsonl.gz")
    found = {
        row.model: row for row in score.measured(tmp_path / "both.csv").rows if row.group == score.REPEATED
    }
    assert set(found) == set(score.MODELS) and {row.runs for row in found.values()} == {6}
    ratios = []
    for name in machines:
        one = next(curve for curve in curves(tmp_path / f"{name}.csv") if curve.kind == "even")
        ratios.append(
            [
                float(value) / one.rates[n]
                for n, value in enumerate(coarse(one.profile, 8).throughput, 1)
                if n > 2
            ]
        )
    errors = [abs((a * b) ** 0.5 - 1) for a, b in zip(*ratios, strict=True)]
    assert found["coarse"].worst == pytest.approx(max(errors)) and found["coarse"].mean == pytest.approx(
        sum(errors) / 6
    )


def test_the_set():
    runs = standard()
    assert len(runs) == len({run.key for run in runs}) == 640 + 24 + 15 + 16
    assert len(grid()) == 640
    assert max(run.hosts for run in runs) == 10


def test_refuses():
    with pytest.raises(SpecError, match="5 to 64 hosts"):
        compare(3, models=["mlp"], link_Bps=1e7)
    with pytest.raises(UnknownName, match="mlp"):
        compare(5, models=["mpl"], link_Bps=1e7)
