"""The fine and the coarse model on jobs whose answer is known, and on the measured set."""

import itertools
import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest

from paceline.bench.throughput.dataset import SET, curves
from paceline.bench.throughput.score import distance, staleness
from paceline.errors import DataError, SpecError
from paceline.queueing import baselines
from paceline.queueing.coarse import coarse
from paceline.queueing.estimate import fine, knee, throughput
from paceline.queueing.profile import WIRE, HostLink, JobProfile, ProfiledRun, from_rows
from paceline.queueing.simulate import simulate


def job(mode="async", compute=0.1, size=1e6, rate=1e7, update=0.001, servers=1, spread=0.0, **more):
    """A job of one worker with known steps: `size` bytes each way at `rate`."""
    source, up, rows, now = np.random.default_rng(1), WIRE * size / rate, [], 0.0
    for _ in range(30):
        took = compute * float(np.exp(spread * source.normal()))
        now += took + 2 * up + update + 0.002
        rows.append(
            {
                "at_s": now,
                "compute_s": took,
                "round_s": 2 * up + update + 0.002,
                "up_s": up,
                "update_s": update,
                "down_s": up,
                "waited_s": 0.0,
                "staleness": 0,
            }
        )
    return JobProfile(
        name="made up",
        batch=32,
        up_bytes=size,
        down_bytes=size,
        mode=mode,
        servers=servers,
        link=HostLink(rate_Bps=rate),
        runs=(from_rows([rows]),),
        **more,
    )


def test_one_worker_repeats_its_profile():
    made = job(spread=0.1)
    assert simulate(made, 1).throughput == pytest.approx(made.runs[0].throughput, rel=0.05)
    assert coarse(made, 4).throughput[0] == pytest.approx(made.runs[0].throughput, rel=0.05)


@pytest.mark.parametrize("servers", [1, 2])
def test_link_is_the_limit(servers):
    made = job(servers=servers, spread=0.1)
    most = servers * 1e7 / (WIRE * 1e6)
    assert simulate(made, 12, steps=30).throughput == pytest.approx(most, rel=0.1)
    assert coarse(made, 30).throughput[-1] == pytest.approx(most, rel=0.05)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_coarse_answers_for_a_thousand_workers_in_milliseconds(mode):
    made, best = job(mode, spread=0.1), math.inf
    for _ in range(30):
        start = time.perf_counter()
        coarse(made, 1000)
        best = min(best, time.perf_counter() - start)
    assert best < 5e-3


def test_compute_bound_scales():
    made = job(size=1e3, spread=0.05)
    assert simulate(made, 8).throughput == pytest.approx(8 * simulate(made, 1).throughput, rel=0.05)


def test_staleness_of_saturated_workers():
    # all but the one being applied are ahead of an update: n - 1, once the link is full
    found = simulate(job(spread=0.1), 6)
    mean = sum(k * v for k, v in found.staleness.items()) / sum(found.staleness.values())
    assert mean == pytest.approx(5.0, abs=0.3)
    assert found.busy["uplink"] > 0.9


def test_synchronous_waits_for_the_slowest():
    free, steady = job(mode="sync", size=10.0, spread=0.4), job(mode="sync", size=10.0)
    assert simulate(steady, 8).throughput == pytest.approx(8 * simulate(steady, 1).throughput, rel=0.05)
    assert simulate(free, 8).throughput < 0.8 * 8 * simulate(free, 1).throughput
    backup = job(mode="backup", size=10.0, spread=0.4, backups=2)
    assert simulate(backup, 8).throughput > simulate(free, 8).throughput
    for made in (free, steady):
        assert coarse(made, 8).throughput[7] == pytest.approx(simulate(made, 8).throughput, rel=0.1)


def test_bounded_staleness_lies_between():
    free, held = job(spread=0.6, size=10.0), job(mode="bounded", staleness=0, spread=0.6, size=10.0)
    assert simulate(held, 6, steps=60).throughput < 0.95 * simulate(free, 6, steps=60).throughput
    loose = job(mode="bounded", staleness=50, spread=0.6, size=10.0)
    assert simulate(loose, 6).throughput == pytest.approx(simulate(free, 6).throughput, rel=0.1)


def test_trace_has_every_part(tmp_path):
    timeline = simulate(job(), 3, steps=5, trace=True).timeline
    assert {span.name for span in timeline.spans} == {"compute", "send", "update", "receive"}
    assert timeline.ranks == 4  # three workers, one server
    timeline.save(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank in range(3):  # a worker computes or transfers, never two steps at once
        own = sorted((span.start_s, span.end_s) for span in timeline.spans if span.rank == rank)
        assert all(later[0] >= earlier[1] - 1e-9 for earlier, later in itertools.pairwise(own))


def test_same_seed_same_run():
    made = job(spread=0.3)
    assert simulate(made, 5, seed=4).throughput == simulate(made, 5, seed=4).throughput


def test_profile_round_trip(tmp_path):
    made = job()
    made.save(tmp_path / "a.json")
    assert JobProfile.load(tmp_path / "a.json").to_dict() == made.to_dict()
    for text, message in (
        ("{", "not a job profile: line 1"),
        ("{}", "paceline profile"),
        ("[]", "paceline profile"),
    ):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(SpecError, match=message):
            JobProfile.load(tmp_path / "b.json")
    with pytest.raises(SpecError, match="cannot read"):
        JobProfile.load(tmp_path / "none.json")
    with pytest.raises(SpecError, match="mode=asynch: expected one of .*; did you mean .async."):
        job(mode="asynch")
    with pytest.raises(DataError, match="at least 3 steps"):
        JobProfile(
            name="x",
            batch=1,
            up_bytes=1,
            down_bytes=1,
            mode="async",
            servers=1,
            link=HostLink(rate_Bps=1e6),
            runs=(),
        )


def test_other_links_and_servers():
    made = job(rate=1e7)
    slow, fast = throughput(made, [1, 4], link_Bps=2e6), throughput(made, [1, 4], link_Bps=1e9)
    assert slow.points[-1].samples_per_s < 0.3 * fast.points[-1].samples_per_s
    assert slow.bottleneck in ("uplink", "downlink")
    assert fast.points[-1].samples_per_s == pytest.approx(4 * 32 / 0.105, rel=0.05)
    more = throughput(made, [1, 4, 8], servers=4)
    assert more.servers == 4
    assert more.points[-1].samples_per_s > 1.5 * throughput(made, [8]).points[0].samples_per_s
    point = more.points[-1]
    assert point.low < point.samples_per_s < point.high
    assert more.to_dict()["points"][0]["workers"] == 1


def test_guesses():
    made = job()
    assert baselines.linear(made, 4) == pytest.approx(np.arange(1, 5) * made.runs[0].throughput)
    assert baselines.optimus(made, 4)[0] == pytest.approx(made.runs[0].throughput)
    assert knee([1, 2, 3, 4], [1.0, 1.9, 2.0, 2.0]) == 2


def uneven(mode="async", factor=3.0, slow_workers=1, **more):
    """As `job`, with a run of two of which the second computes longer by a factor."""
    one, same = (
        job(mode=mode, spread=0.1, compute=compute, **more).runs[0].steps[0]
        for compute in (0.1, 0.1 * factor)
    )
    usual = job(mode=mode, spread=0.1, **more)
    return replace(usual, runs=(*usual.runs, ProfiledRun(steps=(one, same))), slow_workers=slow_workers)


def test_a_slow_worker_holds_up_only_itself_where_nobody_waits():
    made = uneven(size=1e3)
    alone = made.runs[0].throughput
    expected = alone * 3 + 1 / (1 / alone + 0.2)  # three usual ones, and one whose step is 0.2 s longer
    assert simulate(made, 4, steps=60).throughput == pytest.approx(expected, rel=0.05)
    assert coarse(made, 4).throughput[3] == pytest.approx(expected, rel=0.05)
    assert coarse(made, 4).throughput[0] == pytest.approx(alone, rel=0.05)


def test_a_slow_worker_holds_up_a_round():
    made = uneven("sync", size=1e3)
    expected = 4 / (1 / made.runs[0].throughput + 0.2)
    assert simulate(made, 4, steps=60).throughput == pytest.approx(expected, rel=0.1)
    assert coarse(made, 4).throughput[3] == pytest.approx(expected, rel=0.1)


def test_a_slow_worker_does_not_matter_to_a_full_link():
    made, even = uneven(), uneven(slow_workers=0)
    assert simulate(made, 12, steps=30).throughput == pytest.approx(
        simulate(even, 12, steps=30).throughput, rel=0.1
    )
    assert coarse(made, 30).throughput[-1] == pytest.approx(coarse(even, 30).throughput[-1], rel=0.05)


def test_slow_workers_survive_the_file_and_other_links(tmp_path):
    made = uneven()
    made.save(tmp_path / "a.json")
    again = JobProfile.load(tmp_path / "a.json")
    assert again.slow_workers == 1 and again.kinds()[1].mean() == pytest.approx(0.3, rel=0.1)
    fast = throughput(again, [4], link_Bps=1e9).points[0].samples_per_s
    assert fast == pytest.approx(32 * (3 / 0.105 + 1 / 0.305), rel=0.07)
    with pytest.raises(DataError, match="no slow workers"):
        replace(job(), slow_workers=1)


def test_a_burst_gathers_while_the_other_end_is_the_limit():
    """Half of each transfer fits into the buckets of both ends, and they are full again by the next step."""
    shaped = replace(job(size=1e6, rate=1e7), link=HostLink(rate_Bps=1e7, burst_bytes=WIRE * 5e5))
    parts = simulate(shaped, 1).parts
    assert parts["up"] == pytest.approx(0.5 * WIRE * 1e6 / 1e7, rel=0.05) == parts["down"]


def test_parts_go_up_while_others_are_computed():
    """Two servers: the part of the second is ready 60 ms before the end of the compute, and hidden behind the
    rest of it.
    """
    plain = job(servers=2, update=0.0)
    steps = tuple(replace(step, leads=(0.0, 0.06)) for step in plain.runs[0].steps[0])
    early = replace(plain, runs=(ProfiledRun(steps=(steps,)),))
    half = WIRE * 1e6 / 1e7 / 2
    alone, overlapped = (1 / simulate(made, 1).throughput for made in (plain, early))
    # only the first part's own way is left after the compute, and it shares with nobody; without overlap both
    # share the worker's link
    assert overlapped == pytest.approx(0.1 + 2 * half + 0.002, rel=0.03)
    assert 0.1 + 3 * half < alone <= 0.1 + 4 * half + 0.003
    again = JobProfile.from_dict(early.to_dict())
    assert again.runs[0].steps[0][0].leads == (0.0, 0.06)
    assert steps[0].lead(1, 2) == 0.06 and steps[0].lead(0, 1) == pytest.approx(0.03)


def test_measured_set_is_complete():
    """Every combination was measured, on one machine or another, with a profile of its own machine."""
    found = [curve for curve in curves() if curve.kind == "even" and curve.link_Mbps >= 150]
    runs = {
        (curve.model, curve.mode, curve.link_Mbps, curve.servers, n) for curve in found for n in curve.rates
    }
    assert len(runs) == 640 and {n for *_, n in runs} == set(range(1, 9))
    assert len({curve.model for curve in found}) == 5 and len({curve.link_Mbps for curve in found}) == 4


def test_measured_set_is_predicted():
    """Part of the set, so that the test is quick."""
    errors = {"fine": [], "coarse": [], "linear": []}
    for curve in [curve for curve in curves() if len(curve.rates) == 8 and curve.kind == "even"][::14]:
        quick, line = coarse(curve.profile, 8).throughput, baselines.linear(curve.profile, 8)
        for n in (4, 8):
            found = {
                "fine": fine(curve.profile, n, seeds=1)[0],
                "coarse": float(quick[n - 1]),
                "linear": float(line[n - 1]),
            }
            for name, value in found.items():
                errors[name].append(abs(value / curve.rates[n] - 1))
    means = {name: sum(found) / len(found) for name, found in errors.items()}
    assert means["fine"] < 0.10 and means["coarse"] < 0.15, means
    assert means["linear"] > 3 * means["fine"], means


def test_measured_slow_workers_are_predicted():
    errors = {
        (curve.machine, curve.label, curve.model, n): abs(
            fine(curve.profile, n, seeds=1)[0] / curve.rates[n] - 1
        )
        for curve in curves()
        if curve.kind == "uneven"
        for n in (4, 8)
    }
    assert len(errors) == 24 and sum(errors.values()) / 24 < 0.15, errors
    assert max(errors.values()) < 0.35, errors


def test_measured_staleness_is_predicted():
    found = staleness().rows
    full = [row for row in found if row.link_Mbps == 100]
    assert len(full) == 10 and len(found) == 31
    for row in full:
        assert row.predicted_rate == pytest.approx(row.rate, rel=0.1)
        assert row.predicted_staleness == pytest.approx(row.staleness, abs=0.1) and row.distance < 0.1
    for row in found:
        assert row.predicted_staleness == pytest.approx(row.staleness, abs=0.3)
    assert sum(row.distance for row in found) / len(found) < 0.2
    assert distance({1: 1}, {1: 5}) == 0 and distance({1: 1}, {2: 5}) == 1


def test_a_profile_of_another_machine_is_refused(tmp_path):
    rows = SET.read_text().splitlines()
    (tmp_path / "set.csv").write_text(
        "\n".join([rows[0], *(row.rpartition(",")[0] + ",elsewhere" for row in rows[1:9])])
    )
    (tmp_path / "set.profiles.jsonl").write_text("")
    with pytest.raises(DataError, match="no profile of machine elsewhere"):
        list(curves(tmp_path / "set.csv"))
