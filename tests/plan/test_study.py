"""Many questions in one go, here or over Ray: the same answers, one per question, in their order."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from paceline import cli
from paceline.api import study
from paceline.errors import PlanError, SpecError, UnknownName
from paceline.plan.study import questions, read

NARROW = {"fix": ["tp=1", "pp=1", "cp=1"], "forbid": ["offload", "fsdp", "hsdp"], "most": 8}


def told(found):
    """Answers without what the clock says."""
    return [{name: value for name, value in answer.items() if name != "elapsed_s"} for answer in found]


def test_products_and_files(tmp_path):
    asked = questions(["a", "b"], ["c", "d"], [1, 2], most=3)
    assert [(q.model, q.cluster, q.gbs) for q in asked] == [(m, c, g) for m in "ab" for c in "cd" for g in (1, 2)]
    path = tmp_path / "study.toml"
    single = '[[question]]\nmodel = "b"\ngpus = "8..16"\ndevice = "h200"\nmost = 4\n'
    path.write_text(f'models = ["a"]\nclusters = ["c", "d"]\ngbs = 8\nmost = 3\n{single}')
    found = read(path)
    assert [q.to_dict() for q in found] == [
        {"model": "a", "cluster": "c", "gbs": 8, "most": 3}, {"model": "a", "cluster": "d", "gbs": 8, "most": 3},
        {"model": "b", "gpus": "8..16", "device": "h200", "most": 4}]
    for text, error, says in (
        ('model = "a"', UnknownName, "did you mean 'models'"), ("models = [", SpecError, "not valid TOML"), ("gbs = 8", SpecError, "no question"),
        ("[[question]]\ngbs = 8", SpecError, "needs a model"),
    ):
        path.write_text(text)
        with pytest.raises(error, match=says):
            read(path)


def test_a_question_without_a_plan_is_answered_too():
    found = study(questions(["gpt3-1.3b", "gpt3-175b"], ["1xdgx-a100"], [16], **NARROW))
    first, second = found.answers
    assert first.planned.best.plan.tp == 1 and first.planned.gbs == 16
    assert second.planned is None and "no plan for gpt3-175b fits" in second.error and second.to_dict()["error"] == second.error
    with pytest.raises(PlanError, match="none of the 2 questions has a plan; the first: unknown cluster"):
        study(questions(["gpt3-1.3b"], ["1xdgx-a1000"], [16, 32]))
    with pytest.raises(UnknownName, match="did you mean 'ray'"):
        study(questions(["gpt3-1.3b"], ["1xdgx-a100"]), engine="rai")


def command(*more, gbs="16"):
    return ["plan", "gpt3-1.3b", "--cluster", "1xdgx-a100,1xdgx-h100", "--gbs", gbs, "--fix", *NARROW["fix"], "--forbid", *NARROW["forbid"],
            "--most", "8", *more]


def test_one_line_per_question(capsys, tmp_path):
    page = tmp_path / "study.html"
    with pytest.raises(SystemExit) as stop:
        cli.main(command("--html", str(page)))
    shown = capsys.readouterr().out
    assert stop.value.code == 0 and shown.count("gpt3-1.3b") == 2 and "dgx-h100" in shown and "gpt3-1.3b" in page.read_text()


@pytest.mark.parametrize(("words", "message"), [
    (command("--emit", "slurm"), "--emit is for one question, and this is a study of 2"), (command("--engine", "rai"), "did you mean 'ray'"),
    (command(gbs="16,x"), "--gbs takes whole numbers above zero"),
])
def test_refusals(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2 and message in capsys.readouterr().err


CLUSTER = """
import ray, sys
print(ray.init(address="local", num_cpus=2, include_dashboard=False).address_info["gcs_address"], flush=True)
sys.stdin.read()
"""
#: a busy machine takes long to start Ray's own processes
PATIENT = {"RAY_raylet_start_wait_time_s": "200", "RAY_agent_register_timeout_ms": "200000", "RAY_AUTH_MODE": "disabled"}


@pytest.fixture(scope="module")
def cluster():
    """The address of a Ray cluster of two CPUs, which ends with the process that started it."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'paceline[ray]'")
    with subprocess.Popen([sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          env={**os.environ, **PATIENT}) as process:
        address = process.stdout.readline().strip()
        if not address:
            pytest.skip("ray did not start on this machine in its time")
        yield address


def asked(address):
    words = [sys.executable, "-m", "paceline.cli", *command("--engine", "ray", "--json")]
    return subprocess.run(words, env={**os.environ, **PATIENT, "RAY_ADDRESS": address}, capture_output=True, text=True, check=False)


def test_ray_answers_the_same(cluster, capsys):
    there = asked(cluster)
    assert there.returncode == 0, there.stderr
    with pytest.raises(SystemExit):
        cli.main(command("--json"))
    here = json.loads(capsys.readouterr().out)
    assert told(json.loads(there.stdout)) == told(here) and len(here) == 2 and here[0]["best"]["step_s"] > 0


def test_without_ray_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match="--engine ray needs ray, which is not installed; run: pip install 'paceline\\[ray\\]'"):
        study(questions(["gpt3-1.3b"], ["1xdgx-a100"]), engine="ray")
