"""Job lists: one's own, generated and published ones; early ends; what a simulation makes of them."""

import math
import os
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import DataError, SpecError, UnknownName
from paceline.sched import ClusterShape, Job, RateTable, ScaledSpeed, early_termination, policies, traces
from paceline.sched.ends import Ends, empirical, geometric
from paceline.sched.generate import philly_like
from paceline.sched.generate import statistics as facts
from paceline.sched.metrics import interval, jain, quantile
from paceline.sched.simulate import SimulationSettings, simulate
from paceline.sched.study import StudySetup, compare, paired, run_all

DATA = Path(os.environ.get("PACELINE_DATA", "nowhere"))
needs_data = pytest.mark.skipif(
    not (DATA / "traces").is_dir(), reason="PACELINE_DATA names no folder with traces"
)


def test_own_csv(tmp_path):
    file = tmp_path / "jobs.csv"
    file.write_text(
        "name,submit_s,devices,seconds,least,most,tenant,outcome,ends_at\nb,2"
        " h,4,600,1,8,us,killed,0.5\na,0,1,1 h,,,,,\n"
    )
    first, second = traces.load(str(file)).jobs
    assert (first.name, first.work, first.devices, first.most) == ("a", 3600, 1, 1)
    assert (second.submit_s, second.least, second.most, second.tenant, second.ends_at, second.succeeds) == (
        7200,
        1,
        8,
        "us",
        0.5,
        False,
    )
    outcome = simulate([first, second], ClusterShape.parse("1x4xt4"), policies.get("fifo"))
    assert {d.name: d.end_s for d in outcome.done} == {"a": 3630, "b": 7200 + 30 + 300}
    assert outcome.metrics()["wasted_device_hours"] == pytest.approx(4 * 330 / 3600)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,submit_s,devices\na,0,1\n", "no column 'seconds'"),
        ("name,submit_s,devices,seconds\na,0,1.5,9\n", "whole number"),
        ("name,submit_s,devices,seconds\na,zero,1,9\n", "must be a number"),
        ("name,submit_s,devices,seconds\n", "lists no job"),
    ],
)
def test_own_csv_messages(tmp_path, text, message):
    file = tmp_path / "jobs.csv"
    file.write_text(text)
    with pytest.raises(DataError, match=message):
        traces.load(str(file))


def test_unknown_names():
    with pytest.raises(UnknownName, match="did you mean 'philly"):
        traces.load("phily")
    with pytest.raises(UnknownName, match="did you mean 'helios'"):
        early_termination.get("helio")
    with pytest.raises(SpecError, match="at least one job"):
        traces.load("philly-like", count=0)


def test_generated_statistics():
    """Sizes, lengths and gaps of a long list are Philly's."""
    jobs = philly_like(30000, seed=1).jobs
    assert sum(job.devices == 1 for job in jobs) / len(jobs) == pytest.approx(0.9317, abs=0.01)
    ones = sorted(job.work for job in jobs if job.devices == 1)
    table = dict(zip(facts()["shares"], facts()["lengths"]["1"]["quantiles"], strict=True))
    for share in (0.1, 0.5, 0.9, 0.99):
        assert quantile(ones, share) == pytest.approx(table[share], rel=0.15)
    gaps = [b.submit_s - a.submit_s for a, b in pairwise(jobs)]
    assert statistics.mean(gaps) == pytest.approx(facts()["gap_mean"], rel=0.25)
    assert statistics.median(gaps) < 0.2 * statistics.mean(gaps)  # bursts
    smooth = philly_like(5000, seed=1, bursts=False).jobs
    assert smooth[-1].submit_s / 5000 == pytest.approx(facts()["gap_mean"], rel=0.3)
    assert philly_like(50, seed=4).jobs == philly_like(50, seed=4).jobs != philly_like(50, seed=5).jobs


def test_load_is_met():
    setup = StudySetup(trace="philly-like", policy="fifo", jobs=500, cluster="8x4xt4", load=0.7)
    trace, shape = setup.prepare()
    work = sum(job.work * job.devices for job in trace.jobs)
    assert work / (trace.jobs[-1].submit_s - trace.jobs[0].submit_s) / shape.total == pytest.approx(0.7)


@given(
    st.lists(
        st.tuples(st.floats(0.01, 0.99), st.floats(0.01, 1)),
        min_size=1,
        max_size=8,
        unique_by=lambda p: round(p[0], 6),
    ),
    st.floats(0, 0.999),
)
def test_ends_are_a_distribution(rows, at):
    """Expectations by the class are those by summing over the ends."""
    rows = sorted(rows)
    whole = sum(p for _, p in rows) * 1.25
    ends = Ends(tuple(s for s, _ in rows), tuple(p / whole for _, p in rows))
    assert ends.success == pytest.approx(0.2)
    points = [(s, p / whole) for s, p in rows] + [(1.0, 1 - sum(p for _, p in rows) / whole)]
    rest = [(s, p) for s, p in points if s > at]
    alive = sum(p for _, p in rest)
    assert ends.success_from(at) == pytest.approx(points[-1][1] / alive)
    assert ends.left_from(at) == pytest.approx(sum((s - at) * p for s, p in rest) / alive, abs=1e-9)
    assert ends.checkpoint_after(at) == rest[0][0]


def test_ends_from_history():
    found = empirical([0.1, 0.1, 0.5, 1.0])
    assert (
        found.success == pytest.approx(0.25)
        and found.success_from(0.2) == pytest.approx(0.5)
        and empirical([1.0]).success == 1.0
    )
    assert geometric(0.4).success == pytest.approx(0.6)
    draws = [found.draw(u / 100) for u in range(100)]
    assert draws.count(1.0) == 25 and draws.count(0.1) == 50


@pytest.mark.parametrize("name", early_termination.PUBLISHED)
def test_published_shares_are_met(name):
    """Shares of jobs and of device time, where lengths are what jobs ran."""
    shares = early_termination.get(name)
    trace = early_termination.apply(philly_like(8000, seed=2), shares, seed=3)
    completed = [job.succeeds for job in trace.jobs]
    assert sum(completed) / len(completed) == pytest.approx(shares.completed, abs=0.02)
    spent = [job.work * job.ends_at * job.devices for job in trace.jobs]
    done = sum(s for s, good in zip(spent, completed, strict=True) if good) / sum(spent)
    assert done == pytest.approx(shares.completed_time, abs=0.15)  # a few jobs hold most of the time
    assert all(job.ends is not None and (job.ends_at == 1) == job.succeeds for job in trace.jobs)


def test_a_job_ends_early():
    job = Job(name="a", work=100, speed=ScaledSpeed(), ends_at=0.3, outcome="failed", restart_s=10)
    outcome = simulate([job], ClusterShape.parse("1x1xt4"), policies.get("srtf"))
    assert outcome.done[0].end_s == pytest.approx(40) and math.isnan(
        outcome.metrics()["avg_successful_jct_s"]
    )


def test_knowing_ends_changes_the_order():
    """Two jobs of the same length: the one that will likely succeed goes first."""
    risky, safe = Ends((0.9,), (0.9,)), Ends((0.9,), (0.1,))
    jobs = [
        Job(name="risky", work=100, speed=ScaledSpeed(), ends=risky, submit_s=0),
        Job(name="safe", work=100, speed=ScaledSpeed(), ends=safe, submit_s=0),
    ]
    for policy, first in (
        ("srtf", "risky"),
        ("srtf-ends", "safe"),
        ("success", "safe"),
        ("marginal-ends", "safe"),
    ):
        assert simulate(jobs, ClusterShape.parse("1x1xt4"), policies.get(policy)).done[0].name == first, (
            policy
        )


def test_failures_cost_what_was_not_saved():
    job = Job(name="a", work=50_000, speed=ScaledSpeed(), checkpoint_every_s=1000, restart_s=30)
    settings = SimulationSettings(node_mtbf_s=7000, node_repair_s=500, seed=1)
    outcome = simulate([job], ClusterShape.parse("1x1xt4"), policies.get("fifo"), settings, log=True)
    hits = sum(entry.to_dict()["event"] == "preempted" for entry in outcome.log)
    assert hits == outcome.done[0].restarts > 2 and outcome.done[0].end_s > 50_030 + 500
    saved = simulate(
        [replace(job, checkpoint_every_s=0)], ClusterShape.parse("1x1xt4"), policies.get("fifo"), settings
    )
    assert saved.done[0].end_s < outcome.done[0].end_s


def test_interference_slows_jobs_that_share_a_node():
    jobs = [Job(name=name, work=1000, speed=ScaledSpeed(3), devices=3, restart_s=0) for name in "ab"]
    shape = ClusterShape.parse("3x2xt4")
    alone = simulate(jobs, shape, policies.get("fifo"))
    disturbed = simulate(jobs, shape, policies.get("fifo"), SimulationSettings(interference=0.5))
    assert [d.end_s for d in alone.done] == [1000, 1000] and [d.end_s for d in disturbed.done] == [2000, 2000]


def test_kinds_of_devices():
    """A job goes where it gains most; the other kind is left to the one that minds least."""
    fast, slow = "v100-sxm-16gb", "k80"
    picky = RateTable({fast: {1: 10.0}, slow: {1: 1.0}})
    easy = RateTable({fast: {1: 2.0}, slow: {1: 1.8}})
    jobs = [
        Job(name="easy", work=1000, speed=easy, restart_s=0),
        Job(name="picky", work=1000, speed=picky, restart_s=0, submit_s=1.0),
    ]
    outcome = simulate(
        jobs, ClusterShape.parse("1x1xv100+1x1xk80"), policies.get("gavel(interval_s=10)"), gantt=True
    )
    ran = {(s.name, s.allocation[0][0]) for s in outcome.segments if s.end_s - s.start_s > 50}
    assert ("picky", 0) in ran and ("easy", 1) in ran
    blind = simulate(jobs, ClusterShape.parse("1x1xv100+1x1xk80"), policies.get("maxmin(interval_s=10)"))
    assert outcome.metrics()["avg_jct_s"] < blind.metrics()["avg_jct_s"]


def test_study_is_the_same_over_processes():
    setup = StudySetup(
        trace="philly-like", policy="srtf", jobs=60, cluster="4x4xt4", early_termination="philly"
    )
    setups = [replace(setup, seed=i) for i in range(3)]
    here, there = run_all(setups), run_all(setups, processes=2)
    for a, b in zip(here, there, strict=True):
        assert {k: v for k, v in a.items() if k != "elapsed_s"} == {
            k: v for k, v in b.items() if k != "elapsed_s"
        }
    [summary] = compare(setup, ["srtf"], seeds=3)
    values = [run["avg_jct_s"] for run in here]
    assert summary.to_dict()["avg_jct_s"] == pytest.approx(statistics.mean(values))
    assert summary.to_dict()["ci95"]["avg_jct_s"] == pytest.approx(
        4.303 * statistics.stdev(values) / math.sqrt(3)
    )
    assert paired(setup, "fifo", "fifo", seeds=2)[2:] == (0.0, 0.0)


def test_figures():
    assert quantile([1, 2, 3, 4], 0.5) == 2.5 and jain([1, 1]) == 1 and jain([1, 0]) == 0.5
    assert math.isnan(interval([3.0])[1])


@needs_data
def test_published_traces():
    philly = traces.load("philly", data=DATA)
    assert len(philly.jobs) == 82247 and sum(
        job.work * job.devices for job in philly.jobs
    ) / 3600 == pytest.approx(978078, rel=1e-3)
    gavel = traces.load("gavel", count=80, data=DATA)
    outcome = simulate(gavel.jobs, ClusterShape.parse(gavel.cluster), policies.get("gavel"))
    assert len(outcome.done) == 80
    alibaba = traces.load("alibaba", count=300, data=DATA)
    assert len(simulate(alibaba.jobs, ClusterShape.parse(alibaba.cluster), policies.get("srtf")).done) == 300


@needs_data
def test_growth_is_near_linear():
    """Four times the jobs cost no more than six times the events, and events are two a job where nothing is
    preempted.
    """
    small, large = (
        simulate(
            traces.load("philly", count=n, data=DATA).jobs,
            ClusterShape.parse("64x8xp100"),
            policies.get("fifo"),
        )
        for n in (1000, 4000)
    )
    assert small.events == 2000 and large.events == 8000
