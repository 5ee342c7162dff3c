"""Many questions in one go, here or over Ray: the same answers, one per question, in their order."""

import json
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
    assert [(q.model, q.cluster, q.gbs) for q in asked] == [
        (m, c, g) for m in "ab" for c in "cd" for g in (1, 2)
    ]
    path = tmp_path / "study.toml"
    single = '[[question]]\nmodel = "b"\ngpus = "8..16"\ndevice = "h200"\nmost = 4\n'
    path.write_text(f'models = ["a"]\nclusters = ["c", "d"]\ngbs = 8\nmost = 3\n{single}')
    found = read(path)
    assert [q.to_dict() for q in found] == [
        {"model": "a", "cluster": "c", "gbs": 8, "most": 3},
        {"model": "a", "cluster": "d", "gbs": 8, "most": 3},
        {"model": "b", "gpus": "8..16", "device": "h200", "most": 4},
    ]
    for text, error, says in (
        ('model = "a"', UnknownName, "did you mean 'models'"),
        ("models = [", SpecError, "not valid TOML"),
        ("gbs = 8", SpecError, "no question"),
        ("[[question]]\ngbs = 8", SpecError, "needs a model"),
    ):
        path.write_text(text)
        with pytest.raises(error, match=says):
            read(path)


def test_a_question_without_a_plan_is_answered_too():
    found = study(questions(["gpt3-1.3b", "gpt3-175b"], ["1xdgx-a100"], [16], **NARROW))
    first, second = found.answers
    assert first.planned.best.plan.tp == 1 and first.planned.gbs == 16
    assert (
        second.planned is None
        and "no plan for gpt3-175b fits" in second.error
        and second.to_dict()["error"] == second.error
    )
    with pytest.raises(PlanError, match="none of the 2 questions has a plan; the first: unknown cluster"):
        study(questions(["gpt3-1.3b"], ["1xdgx-a1000"], [16, 32]))
    with pytest.raises(UnknownName, match="did you mean 'ray'"):
        study(questions(["gpt3-1.3b"], ["1xdgx-a100"]), engine="rai")


def command(*more, gbs="16"):
    return [
        "plan",
        "gpt3-1.3b",
        "--cluster",
        "1xdgx-a100,1xdgx-h100",
        "--gbs",
        gbs,
        "--fix",
        *NARROW["fix"],
        "--forbid",
        *NARROW["forbid"],
        "--most",
        "8",
        *more,
    ]


def test_one_line_per_question(capsys, tmp_path):
    page = tmp_path / "study.html"
    with pytest.raises(SystemExit) as stop:
        cli.main(command("--html", str(page)))
    shown = capsys.readouterr().out
    rows = [line for line in shown.splitlines() if line.startswith("gpt3-1.3b")]
    assert stop.value.code == 0 and len(rows) == 2 and "dgx-h100" in shown and "gpt3-1.3b" in page.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (command("--emit", "slurm"), "--emit is for one question, and this is a study of 2"),
        (command("--engine", "rai"), "did you mean 'ray'"),
        (command(gbs="16,x"), "--gbs takes whole numbers above zero"),
    ],
)
def test_refusals(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_ray_answers_the_same(on_ray, capsys):
    there = on_ray(*command("--engine", "ray", "--json"))
    with pytest.raises(SystemExit):
        cli.main(command("--json"))
    here = json.loads(capsys.readouterr().out)
    assert told(json.loads(there)) == told(here) and len(here) == 2 and here[0]["best"]["step_s"] > 0


def test_without_ray_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ImportError,
        match="--engine ray needs ray, which is not installed; run: pip install 'paceline\\[ray\\]'",
    ):
        study(questions(["gpt3-1.3b"], ["1xdgx-a100"]), engine="ray")
