"""What users write, and what they are told when it is wrong."""

import json
from itertools import pairwise

import pytest

from paceline.errors import SpecError
from paceline.queueing.profile import HostLink, JobProfile, ProfiledRun, ProfiledStep
from paceline.sched import traces
from paceline.sched.live import JobSpec, read
from paceline.sched.nodes import ClusterShape
from paceline.sched.policies import get
from paceline.sched.simulate import simulate

GOOD = {"name": "a", "command": ["true"], "seconds": "2 h", "devices": 2, "least": 1, "most": 4}


def test_a_length_becomes_a_speed(tmp_path):
    job = JobSpec.of(GOOD, tmp_path).job(("a100",))
    assert job.work == 7200 and job.speed.rate((2,), "a100", 0, False) == 1
    assert 1.95 > job.speed.rate((4,), "a100", 0, False) / job.speed.rate((2,), "a100", 0, False) > 1.5
    steps = JobSpec.of({**GOOD, "work": 720}, tmp_path).job(("a100",))
    assert steps.work == 720 and steps.speed.rate((2,), "a100", 0, False) == pytest.approx(0.1)


def test_rates_are_for_every_kind(tmp_path):
    spec = JobSpec.of(
        {"name": "a", "command": "true", "work": 10, "rates": {"1": 2.0, "2": 3.0}, "most": 2}, tmp_path
    )
    job = spec.job(("a100", "cpu"))
    assert job.speed.rate((1, 1), "cpu", 0, False) == 3 and job.least == 1
    assert JobSpec.of(spec.fields, tmp_path / "elsewhere") == spec, "what is stored reads as the same"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "a b"}, "a name has up to 64 letters"),
        ({"name": "../a"}, "a name has up to 64 letters"),
        ({"comand": "x"}, "unknown key 'comand'; did you mean 'command'"),
        ({"command": []}, "command must be a list of words or one line"),
        ({"command": "sh -c 'x"}, "No closing quotation"),
        ({"seconds": "2 parsecs"}, "unknown unit 'parsecs'"),
        ({"seconds": 0}, "seconds must be above zero"),
        ({"devices": 2.5}, "devices must be a whole number"),
        ({"devices": 9}, "sizes must satisfy"),
        ({"seconds": 5, "rates": {"1": 1}}, "give one of rates .* got rates and seconds"),
        ({"rates": {"one": 1}, "seconds": None}, "rates are written"),
        ({"rates": {"1": 0}, "seconds": None}, "rates are written"),
        ({"rates": {"1": 3}, "seconds": None}, "with rates goes work"),
        ({"rates": {"2": 3}, "seconds": None, "work": 5}, "no speed is known on 1 devices"),
        ({"environment": "A=1"}, "environment is written"),
        ({"work": "3 epoks"}, "did you mean .3 epochs.?"),
        ({"work": "many"}, "work must be a number above zero"),
        ({"work": -3}, "work must be a number above zero"),
        ({"seconds": None}, "give one of rates .* got none"),
        ({"model": "gpt2-124m"}, "got seconds and model"),
        ({"plan": "fsdp"}, "plan goes with a model"),
        ({"noise_scale": 100}, "noise_scale goes with a speed that knows batches"),
        ({"batch": 2.5}, "batch must be a whole number of samples"),
        ({"ends": "phily"}, "unknown cluster with termination shares 'phily'; did you mean 'philly'"),
        ({"ends": {"early": 2}}, r"must be in \[0, 1\)"),
        ({"ends": {"at": [0.5, 0.1], "chance": [0.1, 0.1]}}, "rising shares"),
        ({"ends": 3}, "ends is .history., a cluster with published shares"),
        ({"speeds": {"a100": 3}}, "speeds are worked out"),
        ({"seconds": None, "rates": {"1": "5 steps/s", "2": 3}, "work": "5 steps"}, "all be in one unit"),
        ({"seconds": None, "rates": {"1": "5 steps"}, "work": "5 steps"}, "rates: 1 = '5 steps'"),
        ({"seconds": None, "rates": {"1": "5 samples/s"}, "work": "5 steps"}, "work in steps needs batch"),
        (
            {"seconds": None, "rates": {"1": "5 steps/s"}, "work": "5 epochs", "dataset": 9},
            "rates in steps needs batch",
        ),
        ({"seconds": None, "model": "gpt2-124m", "work": "5 steps"}, "a model needs batch"),
        ({"seconds": None, "model": "gpt2-124m", "batch": 8, "work": 5}, "work needs its unit here"),
        (
            {"seconds": None, "model": "gpt2-124m", "batch": 8, "work": "1M tokens"},
            "work in tokens needs a model whose plan says",
        ),
        (
            {"seconds": None, "rates": {"1": "5 steps/s"}, "work": "5 steps", "noise_scale": 9},
            "noise_scale goes with a speed that knows batches",
        ),
        (
            {"seconds": None, "model": "gpt2-124m", "batch": 8, "work": "5 epochs"},
            "work in epochs needs dataset",
        ),
        (
            {"seconds": None, "model": "gpt2-124m", "batch": 8, "plan": "gbs=16", "work": "5 steps"},
            "batch is 8, but the plan says gbs=16",
        ),
        (
            {"seconds": None, "model": "gpt2-124m", "batch": 8, "plan": "fsdq", "work": "5 steps"},
            "did you mean 'fsdp'",
        ),
        (
            {"seconds": None, "model": "gpt2-124m", "batch": 8, "most_batch": 16, "work": "5 steps"},
            "most_batch needs noise_scale",
        ),
        ({"seconds": None, "profile": "none.json", "work": "5 steps"}, "cannot read profile"),
        ({"seconds": None, "profile": "none.csv", "batch": 8, "work": "5 steps"}, "cannot read .*none.csv"),
    ],
)
def test_mistakes_are_one_line(tmp_path, change, message):
    given = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    with pytest.raises(SpecError, match=message) as error:
        JobSpec.of(given, tmp_path, "jobs.toml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            (
                "[[job]]\nname = 'a'\ncommand = 'true'\nseconds = 1\n[[job]]\nname = 'a'\ncommand ="
                " 'true'\nseconds = 1\n"
            ),
            "two jobs are named 'a'",
        ),
        ("name = ", "not valid TOML"),
        ("job = 3", "write one job at the top level"),
        ("x = 1\n[[job]]\nname = 'a'", "write one job at the top level"),
    ],
)
def test_files_that_are_wrong(tmp_path, text, message):
    path = tmp_path / "jobs.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        read(path)
    with pytest.raises(SpecError, match="cannot read job file"):
        read(tmp_path / "none.toml")


def test_one_job_at_the_top_level(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("name = 'a'\ncommand = 'python train.py'\nseconds = '3 min'\nfolder = 'here'\n")
    (spec,) = read(path)
    assert (
        spec.command == ("python", "train.py")
        and spec.folder == str(tmp_path / "here")
        and spec.submit_s == 0
    )


PREDICTED = {
    "name": "a",
    "command": "true",
    "model": "gpt2-124m",
    "plan": "fsdp seq=1024",
    "batch": 64,
    "work": "1000 steps",
    "devices": 4,
    "least": 1,
    "most": 16,
    "network": "100 Gb/s",
}


def test_a_model_is_predicted_at_each_size(tmp_path):
    from paceline import api

    spec = JobSpec.of(PREDICTED, tmp_path)
    placed = spec.resolved(ClusterShape.parse("4x4xa100"))
    job = placed.job(("a100-sxm-80gb",))
    assert (job.work, job.least, job.devices, job.most) == (1000, 1, 4, 16)
    expected = api.predict("gpt2-124m", cluster="1x4xa100", plan="fsdp seq=1024 gbs=64 mbs=16")
    assert job.speed.rate((4,), "a100-sxm-80gb", 0, False) == pytest.approx(1 / expected.step_s)
    rates = [job.speed.rate((n,), "a100-sxm-80gb", 0, False) for n in range(1, 17)]
    assert [n for n, rate in enumerate(rates, 1) if rate] == [1, 2, 4, 8, 16], (
        "where a batch of 64 is shared evenly"
    )
    assert rates[0] < rates[1] < rates[3]
    assert JobSpec.of(json.loads(json.dumps(placed.fields)), tmp_path) == placed, (
        "what is stored reads as the same, without predicting again"
    )
    assert placed.written == spec.written and placed.batch_environment(4, "a100-sxm-80gb", False) == {
        "PACELINE_BATCH": "64",
        "PACELINE_WORTH": "1",
    }


def test_units_of_work_say_the_same(tmp_path):
    lengths = []
    for work, more in (
        ("1000 steps", {}),
        ("64k samples", {}),
        ("2 epochs", {"dataset": "32k"}),
        ("65.536M tokens", {}),
    ):
        job = (
            JobSpec.of({**PREDICTED, "work": work, **more}, tmp_path)
            .resolved(ClusterShape.parse("4x4xa100"))
            .job(("a100-sxm-80gb",))
        )
        lengths.append(job.speed.seconds(job.work, 0, 4, 4, False))
    assert lengths == pytest.approx([lengths[0]] * 4)


@pytest.mark.parametrize(
    ("change", "cluster", "message"),
    [
        ({}, "4x4xcpu", "does not know devices of kind 'cpu'; say what they are, such as device ="),
        ({"device": "a1000"}, "4x4xcpu", "unknown device 'a1000'; did you mean"),
        ({"network": ""}, "4x4xa100", "8 devices are on 2 nodes: say how these are connected"),
        ({"batch": 6}, "4x4xa100", "no speed on 4 devices .* do not share a batch of 6 evenly"),
        ({"model": "llama3-8b", "plan": "ddp mbs=1", "least": 4, "most": 4}, "4x4xt4", "does not fit"),
        ({"least": 4, "devices": 16}, "1x2xa100", "needs 4 devices of one kind, but the cluster has 2"),
    ],
)
def test_what_a_cluster_cannot_do_is_one_line(tmp_path, change, cluster, message):
    count, each, kind = cluster.split("x")
    spec = JobSpec.of({**PREDICTED, **change}, tmp_path)
    with pytest.raises(SpecError, match=message) as error:
        spec.resolved(ClusterShape.of([(int(count), int(each), kind)]))
    assert str(error.value).startswith("job 'a': ") and "\n" not in str(error.value)


def test_batches_adapt_by_the_noise_scale(tmp_path):
    """On a slow network a larger batch is faster; how far it pays depends on what a sample then counts."""
    found = {}
    for noise in (100, 100_000):
        spec = JobSpec.of(
            {
                **PREDICTED,
                "network": "10 Gb/s",
                "noise_scale": noise,
                "most_batch": 1024,
                "least": 16,
                "devices": 16,
            },
            tmp_path,
        )
        placed = spec.resolved(ClusterShape.parse("4x4xa100"))
        job = placed.job(("a100-sxm-80gb",))
        fixed, adaptive = (job.speed.rate((4,) * 4, "a100-sxm-80gb", 0, how) for how in (False, True))
        environment = placed.batch_environment(16, "a100-sxm-80gb", True)
        found[noise] = float(environment["PACELINE_BATCH"]), adaptive / fixed
        assert float(environment["PACELINE_WORTH"]) == pytest.approx((noise + 64) / (noise + found[noise][0]))
        assert placed.batch_environment(16, "a100-sxm-80gb", False) == {
            "PACELINE_BATCH": "64",
            "PACELINE_WORTH": "1",
        }
    assert found[100_000][0] == 1024 and found[100][0] < 1024
    assert found[100_000][1] > found[100][1] >= 1


def steps(count, each_s):
    return tuple(
        ProfiledStep(
            at_s=i * each_s,
            compute_s=0.8 * each_s,
            round_s=0.2 * each_s,
            up_s=0.05 * each_s,
            update_s=0.05 * each_s,
            down_s=0.05 * each_s,
            waited_s=0.0,
        )
        for i in range(count)
    )


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_profile_with_servers(tmp_path, mode):
    profile = JobProfile(
        name="a",
        batch=32,
        up_bytes=1e6,
        down_bytes=1e6,
        mode=mode,
        servers=1,
        link=HostLink(rate_Bps=1e8),
        runs=(ProfiledRun(steps=(steps(30, 0.2),)),),
    )
    profile.save(tmp_path / "a.profile.json")
    given = {"name": "a", "command": "true", "profile": "a.profile.json", "work": "3200 samples", "most": 8}
    job = JobSpec.of(given, tmp_path).resolved(ClusterShape.of([(8, 1, "cpu")])).job(("cpu",))
    rates = [job.speed.rate((1,) * n, "cpu", 0, False) for n in range(1, 9)]
    assert rates[0] == pytest.approx(32 / 0.2, rel=0.15)
    assert all(b > a for a, b in pairwise(rates)) and rates[7] < 8.5 * rates[0]
    (tmp_path / "a.profile.json").unlink()
    with pytest.raises(SpecError, match=r"cannot read profile .*a\.profile\.json"):
        JobSpec.of(given, tmp_path)


def test_a_profile_of_measured_steps(tmp_path):
    """All-reduce: from one and two nodes to four; ten steps a second of compute, a network that costs a third
    of it.
    """
    rows = ["nodes,replicas,batch,step_s"]
    rows += [f"1,1,{batch},{step}" for batch, step in ((64, 0.10), (128, 0.19), (32, 0.055))]
    rows += [f"2,2,{batch},{step}" for batch, step in ((64, 0.14), (128, 0.23), (32, 0.095))]
    (tmp_path / "steps.csv").write_text("\n".join(rows) + "\n")
    given = {
        "name": "a",
        "command": "true",
        "profile": "steps.csv",
        "batch": 128,
        "work": "1000 steps",
        "most": 4,
    }
    job = JobSpec.of(given, tmp_path).resolved(ClusterShape.of([(4, 1, "cpu")])).job(("cpu",))
    assert job.speed.rate((1,), "cpu", 0, False) == pytest.approx(1 / 0.19)
    assert job.speed.rate((1, 1), "cpu", 0, False) == pytest.approx(1 / 0.14, rel=0.1)
    assert job.speed.rate((1,) * 4, "cpu", 0, False) > job.speed.rate((1, 1), "cpu", 0, False)


def test_early_ends_reach_the_policy(tmp_path):
    """Two jobs of one length, one of which is nearly always stopped soon: a policy that knows runs the likely
    success first.
    """
    base = {"command": "true", "seconds": 1000, "restart": 0}
    doubtful = JobSpec.of({**base, "name": "doubtful", "ends": {"at": [0.9], "chance": [0.95]}}, tmp_path)
    likely = JobSpec.of({**base, "name": "likely", "ends": {"early": 0.05}}, tmp_path)
    shape = ClusterShape.of([(1, 1, "cpu")])
    busy = JobSpec.of({**base, "name": "busy", "seconds": 10}, tmp_path)
    jobs = [spec.job(("cpu",), at) for spec, at in ((busy, 0.0), (doubtful, 1.0), (likely, 2.0))]
    first = {}
    for policy in ("marginal", "marginal-ends", "srtf", "srtf-ends", "success"):
        chosen = get(policy)
        chosen.interval_s = 0
        first[policy] = next(
            d.name
            for entry in simulate(jobs, shape, chosen, log=True).log
            for d in entry.decisions
            if d.name != "busy"
        )
    assert first == {
        "marginal": "doubtful",
        "marginal-ends": "likely",
        "srtf": "doubtful",
        "srtf-ends": "likely",
        "success": "likely",
    }
    assert JobSpec.of({**base, "name": "a", "ends": "philly"}, tmp_path).job(
        ("cpu",)
    ).ends.success == pytest.approx(0.604, abs=0.01)
    assert JobSpec.of({**base, "name": "a", "ends": {"seen": [1, 1, 0.3, 1]}}, tmp_path).job(
        ("cpu",)
    ).ends.success == pytest.approx(0.75)


def test_a_simulation_reads_the_same_file(tmp_path):
    path = tmp_path / "jobs.toml"
    path.write_text("""
        [[job]]
        name = "late"
        command = "true"
        work = "100 steps"
        rates = { 1 = "2 steps/s", 2 = "3 steps/s" }
        most = 2
        submit = "1 min"
        [[job]]
        name = "gpt2"
        command = "true"
        model = "gpt2-124m"
        batch = 64
        work = "640 samples"
        ends = { at = [0.5], chance = [1.0] }
    """)
    trace = traces.load(str(path), cluster="2x2xa100")
    assert [(job.name, job.submit_s, job.outcome, job.ends_at) for job in trace.jobs] == [
        ("gpt2", 0, "killed", 0.5),
        ("late", 60, "completed", 1),
    ]
    assert trace.jobs[1].speed.rate((2,), "a100-sxm-80gb", 0, False) == pytest.approx(3)
    assert traces.load(str(path)).cluster == traces.OWN_CLUSTER
