"""The commands, against a daemon of their own."""

import http.client
import json
import subprocess
import time

import pytest

from paceline.cli import main
from paceline.sched.live import read


@pytest.fixture
def served(tools, tmp_path):
    """A daemon without jobs, and its state folder."""
    state = tmp_path / "state"
    words = [
        tools.python,
        "-m",
        "paceline.cli",
        "schedule",
        "--state",
        str(state),
        "--policy",
        "fifo",
        "--nodes",
        "1x1",
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not (state / "daemon.json").exists():
        time.sleep(0.05)
        assert time.monotonic() < end and process.poll() is None
    yield state
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 0 and not (state / "daemon.json").exists()


def said(capsys, *words):
    with pytest.raises(SystemExit) as error:
        main(list(words))
    assert not error.value.code
    return capsys.readouterr().out


def ask(capsys, *words):
    return json.loads(said(capsys, *words, "--json"))


def fails(capsys, *words):
    with pytest.raises(SystemExit) as error:
        main(list(words))
    assert error.value.code == 2
    line = capsys.readouterr().err.strip()
    assert "\n" not in line and line.startswith("paceline: ")
    return line


def job(tools, tmp_path, name, steps):
    path = tmp_path / f"{name}.toml"
    command = [tools.python, "-S", str(tools.here / "counter.py"), str(steps), "0.02"]
    path.write_text(f"name = {name!r}\ncommand = {command!r}\nwork = {steps}\nrates = {{ 1 = 50 }}\n")
    return str(path)


def test_a_queue_from_submission_to_end(served, tools, tmp_path, capsys):
    at = ("--state", str(served))
    long, short = job(tools, tmp_path, "long", 2000), job(tools, tmp_path, "short", 10)
    assert ask(capsys, "submit", long, *at) == {"submitted": ["long"], "known": []}
    assert ask(capsys, "submit", long, *at) == {"submitted": [], "known": ["long"]}
    ask(capsys, "submit", short, *at)
    end = time.monotonic() + 60
    while (rows := ask(capsys, "queue", *at)["jobs"])[0]["done"] < 1:
        time.sleep(0.05)
        assert time.monotonic() < end
    assert [(row["job"], row["state"]) for row in rows] == [("long", "running"), ("short", "waiting")]
    found = ask(capsys, "eta", "short", *at)
    assert 0 < found["low_s"] <= found["end_s"] <= found["high_s"] < 400 and found["start_s"] > 5
    assert "four cases of five" in said(capsys, "eta", "long", *at)
    assert "local0" in said(capsys, "queue", *at)
    assert "did you mean 'short'" in fails(capsys, "cancel", "shrt", *at)
    assert ask(capsys, "cancel", "long", *at) == {"job": "long", "outcome": "killed"}
    while {row["state"] for row in ask(capsys, "queue", *at)["jobs"]} != {"killed", "completed"}:
        time.sleep(0.05)
        assert time.monotonic() < end
    assert "is over already (completed)" in fails(capsys, "eta", "short", *at)
    assert "another scheduler runs in" in fails(capsys, "schedule", *at)


def test_only_with_the_token(served):
    found = json.loads((served / "daemon.json").read_text())
    assert (served / "daemon.json").stat().st_mode & 0o077 == 0
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        connection = http.client.HTTPConnection("127.0.0.1", found["port"], timeout=30)
        connection.request("POST", "/", json.dumps({"do": "queue"}), headers)
        assert connection.getresponse().status == 403
        connection.close()
    connection = http.client.HTTPConnection("127.0.0.1", found["port"], timeout=30)
    connection.request("POST", "/", "not json", {"Authorization": f"Bearer {found['token']}"})
    assert connection.getresponse().status == 400
    connection.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["queue"], "no scheduler runs in"),
        (["schedule", "none.toml"], "cannot read job file 'none.toml'"),
        (["schedule", "--engine", "slrum"], "unknown engine 'slrum'; did you mean 'slurm'"),
        (["schedule", "--policy", "fif"], "unknown policy 'fif'; did you mean 'fifo'"),
        (["schedule", "--nodes", "many"], "nodes of this machine are written NODESxDEVICES"),
        (["schedule", "--clock", "sun"], "unknown clock 'sun'"),
        (
            ["schedule", "--quota", "vision"],
            "a quota is written TENANT=DEVICES, such as --quota vision=4, got 'vision'",
        ),
        (["schedule", "--quota", "vision=0"], "a quota is at least one device"),
        (
            ["schedule", "--quota", "vision=1", "--policy", "optimus"],
            "policy 'optimus' does not keep quotas; choose another",
        ),
        (
            ["schedule", "--engine", "ray", "--nodes", "127.0.0.1:1"],
            "(no Ray cluster answers at|which is not installed)",
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, words, message):
    import re

    assert re.search(message, fails(capsys, *words, "--state", str(tmp_path / "state")))


def test_a_list_of_jobs_to_its_end(tools, tmp_path, capsys):
    path = job(tools, tmp_path, "a", 10)
    found = ask(capsys, "schedule", path, "--state", str(tmp_path / "state"), "--nodes", "1x1")
    assert found["engine"] == "local" and [row["state"] for row in found["jobs"]] == ["completed"]
    assert [decision["decision"] for decision in found["decisions"]] == ["start"]
    assert "these jobs are over already" in said(
        capsys, "schedule", path, "--state", str(tmp_path / "state"), "--nodes", "1x1"
    )


def test_the_example_can_be_read(tmp_path, capsys):
    text = said(capsys, "schedule", "--example")
    (tmp_path / "jobs.toml").write_text(text)
    specs = read(tmp_path / "jobs.toml")
    assert [spec.name for spec in specs] == ["long", "short"] and specs[0].unit == "steps"
    assert all(spec.command[:2] == ("paceline", "train") for spec in specs)


def test_a_predicted_job(served, tmp_path, capsys):
    """Its speeds are worked out where it is handed in, for the devices that the scheduler has."""
    path, at = tmp_path / "job.toml", ("--state", str(served))
    text = (
        "name = 'a'\ncommand = 'sh -c \"echo $PACELINE_BATCH >> batch; sleep 1\"'\nmodel = 'gpt2-124m'\nbatch"
        " = 16\nwork = '160 steps'\n"
    )
    path.write_text(text)
    assert "the predictor does not know devices of kind 'cpu'; say what they are" in fails(
        capsys, "submit", str(path), *at
    )
    path.write_text(f"{text}device = 'a100'\n")
    assert ask(capsys, "submit", str(path), *at)["submitted"] == ["a"]
    assert ask(capsys, "submit", str(path), *at)["known"] == ["a"]
    end = time.monotonic() + 60
    while (row := ask(capsys, "queue", *at)["jobs"][0])["state"] != "completed":
        time.sleep(0.05)
        assert time.monotonic() < end
    assert (row["work"], row["unit"]) == (160, "steps") and (tmp_path / "batch").read_text() == "16\n"
    assert "160 steps" in said(capsys, "queue", *at)
