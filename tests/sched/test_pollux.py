"""The Pollux study again: published completion times of Tiresias and Optimus, and policies of our own against
Pollux's.
"""

import json
import os
from pathlib import Path

import pytest

from paceline.errors import DataError, SpecError
from paceline.sched import policies, throughput, traces
from paceline.sched.nodes import ClusterShape
from paceline.sched.pollux import APPLICATIONS
from paceline.sched.simulate import SimulationSettings, simulate

DATA = Path(os.environ.get("PACELINE_DATA", "nowhere"))
FOLDER = DATA / "traces" / "pollux"
needs_data = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="PACELINE_DATA names no folder with traces/pollux"
)


def run(policy, folder, workload):
    trace = traces.load(f"pollux:{FOLDER / folder / workload}.csv", data=DATA)
    return simulate(
        trace.jobs,
        ClusterShape.parse(trace.cluster),
        policies.get(policy),
        SimulationSettings(clock_s=trace.clock_s),
    )


def published(policy, load):
    return json.loads((FOLDER / "published" / f"results-jobload-{policy}-{load}.json").read_text())["jcts"]


@needs_data
@pytest.mark.parametrize(("folder", "load"), [("workloads", "1.0"), ("workloads-0.5", "0.5")])
@pytest.mark.parametrize("policy", ["tiresias", "optimus"])
def test_published_averages(policy, folder, load):
    """Each average within 0.1 %; Tiresias job by job."""
    for workload, jcts in published(policy, load).items():
        outcome = run(policy, folder, workload)
        average = sum(jcts.values()) / len(jcts)
        assert outcome.metrics()["avg_jct_s"] == pytest.approx(average, rel=1e-3), (policy, load, workload)
        if policy == "tiresias":
            assert {d.name: round(d.response_s) for d in outcome.done} == jcts


@needs_data
def test_order_and_our_own():
    """Over the workloads of load 1: ours < Pollux's published mean; goodput-like < Tiresias < Optimus (whose
    means are met above).
    """
    mine, others = ("goodput", "pollux"), ("pollux", "tiresias", "optimus")
    ours = {
        policy: sum(run(policy, "workloads", w).metrics()["avg_jct_s"] for w in published("pollux", "1.0"))
        / 8
        for policy in mine
    }
    theirs = {
        policy: sum(sum(jcts.values()) / len(jcts) for jcts in published(policy, "1.0").values()) / 8
        for policy in others
    }
    assert ours["goodput"] < theirs["pollux"]
    assert ours["goodput"] < ours["pollux"] < theirs["tiresias"] < theirs["optimus"]


@needs_data
@pytest.mark.parametrize("application", APPLICATIONS)
def test_throughput_from_two_nodes(application):
    """Fitted to one and two nodes, four and more within 15 % on average."""
    found = throughput.score(throughput.measured(FOLDER / application))
    assert found.mean < 0.15 and found.asked > 400 and found.fitted < 250


@needs_data
def test_profiled_speed():
    rows = throughput.measured(FOLDER / "bert")
    model = throughput.SynchronousModel.fit(row for row in rows if row.nodes <= 2)
    speed = throughput.ProfiledSpeed(model, batch=96, most_local=12, least_local=4)
    assert speed.rate((4,), "", 0, False) > speed.rate((1,), "", 0, False) > 0
    assert speed.rate((4,) * 8, "", 0, False) == 0.0  # three samples a device
    assert speed.rate((4, 4), "", 0, False) == pytest.approx(96 / float(model.step_s(2, 8, 12.0, 4)))


@needs_data
def test_ten_times_the_load():
    """Ten workloads at once do not trip the simulator."""
    from dataclasses import replace

    jobs = [
        replace(job, name=f"{i}-{job.name}")
        for i in range(1, 9)
        for job in traces.load(f"pollux:{FOLDER}/workloads/workload-{i}.csv", data=DATA).jobs
    ]
    jobs += [replace(job, name=f"x{job.name}") for job in jobs[:320]]
    outcome = simulate(
        jobs, ClusterShape.parse("16x4xt4"), policies.get("tiresias"), SimulationSettings(clock_s=1.0)
    )
    assert len(outcome.done) == 1600


def test_messages(tmp_path, monkeypatch):
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    (tmp_path / "w").mkdir()
    file = tmp_path / "w" / "one.csv"
    file.write_text("name,time,application,num_replicas,batch_size\na,1,cifar10,2,256\n")
    with pytest.raises(DataError, match="no measured applications"):
        traces.load(f"pollux:{file}")
    with pytest.raises(SpecError, match="write pollux:FILE.csv"):
        traces.load("pollux")
    with pytest.raises(DataError, match="no data folder is given"):
        traces.load("philly")
