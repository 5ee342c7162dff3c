"""`paceline simulate`: figures, pages and messages."""

import json

import pytest

from paceline import cli
from paceline.sched import event, replay
from paceline.sched.nodes import ClusterShape
from paceline.sched.policies import get
from paceline.sched.study import StudySetup


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        code = 0
        try:
            cli.main(["simulate", *arguments])
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_json(run):
    code, out, _ = run(
        "--trace",
        "philly-like",
        "--jobs",
        "80",
        "--cluster",
        "4x4xv100",
        "--policy",
        "srtf,las(interval_s=0),marginal",
        "--json",
    )
    rows = json.loads(out)["policies"]
    assert code == 0 and [row["policy"] for row in rows] == ["srtf", "las(interval_s=0)", "marginal"]
    for row in rows:
        assert row["jobs"] == 80 and 0 < row["median_jct_s"] <= row["p99_jct_s"] <= row["makespan_s"]
        assert row["avg_jct_s"] > 0 and row["elapsed_s"] > 0


def test_table_page_and_log(run, tmp_path):
    arguments = (
        "--jobs",
        "40",
        "--cluster",
        "2x4xv100",
        "--policy",
        "fifo,goodput",
        "--early-termination",
        "helios",
    )
    code, out, _ = run(*arguments, "--html", "r.html", "--log", "log.jsonl")
    assert code == 0 and "fifo" in out and "mean of successful" in out
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") == 3 and "Gantt" in page and "job-0" in page and "<script" not in page
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    mine = [{k: v for k, v in line.items() if k != "policy"} for line in lines if line["policy"] == "fifo"]
    assert {line["event"] for line in mine} <= set(event.KINDS)
    trace, _ = StudySetup(
        trace="philly-like", policy="fifo", jobs=40, cluster="2x4xv100", early_termination="helios"
    ).prepare()
    again = replay(mine, {job.name: job for job in trace.jobs}, ClusterShape.parse("2x4xv100"), get("fifo"))
    assert [[d.to_dict() for d in batch] for batch in again] == [line["decisions"] for line in mine]


def test_seeds_give_intervals(run):
    code, out, _ = run("--jobs", "30", "--cluster", "2x4xv100", "--policy", "srtf", "--seeds", "3", "--json")
    [row] = json.loads(out)["policies"]
    assert code == 0 and row["seeds"] == 3 and row["ci95"]["avg_jct_s"] > 0


def test_many_at_a_time_give_the_same(run, on_ray):
    words = ("--jobs", "30", "--cluster", "2x4xv100", "--policy", "srtf,las", "--seeds", "2", "--json")
    found = [
        [{k: v for k, v in row.items() if k != "elapsed_s"} for row in json.loads(out)["policies"]]
        for out in (
            run(*words)[1],
            run(*words, "--processes", "2")[1],
            on_ray("simulate", *words, "--engine", "ray"),
        )
    ]
    assert found[0] == found[1] == found[2] and len(found[0]) == 2


def test_a_cluster_file_and_a_policy_file(run, tmp_path):
    (tmp_path / "my.toml").write_text(
        'name = "mine"\ndevice = "v100"\nnodes = 2\n[node]\ndevices = 4\n[tier.pcie]\nkind = "pcie"\ndomain ='
        ' 4\nbandwidth = "12 GB/s"\n[tier.network]\nkind = "ethernet"\nbandwidth = "10 Gb/s"\n'
    )
    (tmp_path / "jobs.csv").write_text("name,submit_s,devices,seconds\na,0,4,100\nb,10,8,50\n")
    (tmp_path / "my_policy.py").write_text(
        "from paceline.sched.policies.ranked import Fifo\n\nclass Policy(Fifo):\n    pass\n"
    )
    code, out, _ = run(
        "--trace", "jobs.csv", "--cluster", "my.toml", "--policy", "my_policy.py:Policy", "--json"
    )
    [row] = json.loads(out)["policies"]
    assert code == 0 and row["devices"] == 8 and row["avg_jct_s"] == pytest.approx((130 + 200) / 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "srft"), "did you mean 'srtf'"),
        (("--trace", "phily-like"), "did you mean 'philly-like'"),
        (("--cluster", "4x4xv1000"), "unknown"),
        (("--early-termination", "helio"), "did you mean 'helios'"),
        (("--jobs", "2.5"), "whole number"),
        (("--engine", "rai", "--processes", "2"), "did you mean 'ray'"),
        (("--load", "-1"), "above zero"),
        (("--placement", "sprad"), "did you mean 'spread'"),
        (("--interference", "1.5"), "interference"),
        (("--seeds", "0"), "at least one seed"),
    ],
)
def test_messages(run, arguments, message):
    code, out, err = run("--jobs", "5", *arguments) if "--jobs" not in arguments else run(*arguments)
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1 and not out
