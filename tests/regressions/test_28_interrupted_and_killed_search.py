"""Ctrl-C ends a search with one line and code 130 whenever it comes; workers end with the process that
started them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

import paceline as pl
from paceline import cli
from paceline.api import study
from paceline.errors import PlanError, RunError
from paceline.plan import run
from paceline.plan import search as search_module
from paceline.plan.general import plan_module
from paceline.plan.request import Request
from paceline.plan.run import plan_transformer
from paceline.plan.search import search
from paceline.plan.space import Limits, Space
from paceline.plan.study import questions
from paceline.plan.workers import Interrupted, workers
from paceline.spec.transformer import Transformer

TINY = Transformer(name="tiny", layers=4, hidden=1024, heads=8, ffn=4096, vocab=32_000, seq=1024)
NODE = pl.clusters.get("1xdgx-a100")


def stop_at(stage, count):
    """A progress that is interrupted when so much of a stage is done."""

    def progress(what, done, total, best):
        if what == stage and done >= count:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("processes", [1, 2])
def test_interrupted_while_bounding_says_how_far_it_was(processes):
    space = Space(TINY, (NODE,), 16, 1024, Limits.of())
    with pytest.raises(
        Interrupted, match=r"^\d[\d,]* of \d[\d,]* plans have bounds, and none was simulated yet$"
    ):
        search(space, run.goal("time", (NODE,)), progress=stop_at("bounding", 1), processes=processes)


@pytest.mark.parametrize("processes", [1, 2])
def test_interrupted_while_simulating_gives_the_best_so_far(processes):
    found = plan_transformer(
        TINY, Request(where=(NODE,), gbs=16, progress=stop_at("simulating", 8), most=64, processes=processes)
    )
    assert found.interrupted and found.by_evaluation == 8 and "interrupted" in found.notes[0]


def interrupted(*_):
    raise KeyboardInterrupt


def test_plans_of_a_batch_that_was_interrupted_stay_undecided(monkeypatch):
    simulated = search_module._try
    left = iter(range(11))

    def three_of_a_batch(task):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return simulated(task)

    monkeypatch.setattr(search_module, "_try", three_of_a_batch)
    found = plan_transformer(TINY, Request(where=(NODE,), gbs=16, most=64, processes=1))
    assert found.interrupted and found.by_evaluation == 11
    assert found.by_memory + found.by_bound + found.undecided + found.by_evaluation == found.space


def test_interrupted_before_the_first_simulation_is_done(monkeypatch):
    monkeypatch.setattr("paceline.plan.search._try", interrupted)
    with pytest.raises(Interrupted, match="all .* plans have bounds, and none was simulated yet"):
        plan_transformer(TINY, Request(where=(NODE,), gbs=16, processes=1))


def test_interrupted_while_the_space_is_put_together(monkeypatch):
    monkeypatch.setattr(Space, "_of", interrupted)
    with pytest.raises(Interrupted, match="the space of plans was being put together"):
        plan_transformer(TINY, Request(where=(NODE,), gbs=16))


def test_interrupted_after_the_search_the_answer_stands(monkeypatch):
    monkeypatch.setattr(run, "ranges", interrupted)
    found = plan_transformer(TINY, Request(where=(NODE,), gbs=16, most=8))
    assert found.interrupted and found.top and found.ranges == ()


def test_a_captured_module_without_an_answer_yet(monkeypatch):
    monkeypatch.setattr("paceline.plan.general.predict", interrupted)
    with pytest.raises(Interrupted, match="none of .* plans was simulated yet"):
        plan_module(
            pl.capture("alexnet", batch=8), Request(where=(pl.clusters.get("2xp100-node-10gbe"),), gbs=64)
        )


def test_a_study_keeps_the_answers_that_it_has(monkeypatch):
    asked = questions(
        ["gpt3-1.3b"],
        ["1xdgx-a100"],
        [8, 16, 32],
        fix=["fsdp", "tp=1", "pp=1", "cp=1"],
        forbid=["offload"],
        most=8,
    )
    told = []

    def progress(done, total):
        told.append(done)
        monkeypatch.setattr(Space, "_of", interrupted)

    found = study(asked, progress=progress)
    assert found.interrupted and len(found.answers) == 1 and told == [1]
    with pytest.raises(Interrupted, match="the first of 3 questions has no answer yet; the space of plans"):
        study(asked)


ASKED = [
    "plan",
    "gpt3-1.3b",
    "--cluster",
    "1xdgx-a100",
    "--gbs",
    "32",
    "--fix",
    "fsdp",
    "--forbid",
    "offload",
]


@pytest.mark.parametrize(
    ("stage", "says", "more"),
    [
        ("bounding", "plans have bounds, and none was simulated yet", ()),
        ("simulating", "the best so far is fsdp", ()),
        ("simulating", "the best so far is fsdp", ("--json",)),
    ],
)
def test_the_command_line_prints_one_line(stage, says, more, capsys, monkeypatch):
    @contextmanager
    def progress(quiet):
        yield stop_at(stage, 1)

    monkeypatch.setattr("paceline.cli.plan._progress", progress)
    with pytest.raises(SystemExit) as stop:
        cli.main([*ASKED, *more])
    shown = capsys.readouterr()
    assert stop.value.code == 130 and says in shown.err
    assert shown.err.startswith("paceline: interrupted: ") and shown.err.count("\n") == 1
    if more:
        assert json.loads(shown.out)["interrupted"]
    else:
        assert ("best plan" in shown.out) == (stage == "simulating")


def test_interrupted_while_commands_are_imported(capsys, monkeypatch):
    class Slow(ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "paceline.cli.commands", Slow("commands"))
    with pytest.raises(SystemExit) as stop:
        cli.main(ASKED)
    assert stop.value.code == 130 and capsys.readouterr().err == "paceline: interrupted\n"


# -- processes -------------------------------------------------------------------------------------

#: a search whose bounding takes for ever, in two workers that say who they are; it hears Ctrl-C also where
#: the tests are a background job, which shells make deaf to it
SLOW = """
import os, signal, sys, time
from pathlib import Path
from paceline.plan import search

signal.signal(signal.SIGINT, signal.default_int_handler)

def slow(task):
    (Path(sys.argv[1]) / str(os.getpid())).touch()
    time.sleep(600)

search._bound_some = slow
search.os.sched_getaffinity = lambda _: {0, 1}
from paceline.cli import main
main(["plan", "gpt3-1.3b", "--cluster", "1xdgx-a100", "--gbs", "32"])
"""


@pytest.fixture
def searching(tmp_path):
    """A search in a session of its own, and its two workers."""
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
            yield process, [int(path.name) for path in tmp_path.iterdir()]
        finally:
            for pid in (process.pid, *(int(path.name) for path in tmp_path.iterdir())):
                if runs(pid):
                    os.kill(pid, signal.SIGKILL)


def wait_for(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def runs(pid):
    """Whether a process is there and not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="whether a process still runs is read from /proc (Linux)"
)


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_when_their_parent_is_killed(searching, number):
    process, pids = searching
    assert all(runs(pid) for pid in pids)
    process.send_signal(number)
    assert process.wait(timeout=30) == -number
    wait_for(lambda: not any(runs(pid) for pid in pids))


@needs_proc
def test_ctrl_c_of_a_terminal_is_one_line_and_leaves_no_worker(searching):
    process, pids = searching
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert (
        err.startswith("paceline: interrupted: 0 of ")
        and err.endswith("none was simulated yet\n")
        and err.count("\n") == 1
    )
    wait_for(lambda: not any(runs(pid) for pid in pids))


@needs_proc
def test_a_worker_that_is_killed_is_one_line(searching):
    process, pids = searching
    os.kill(pids[0], signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert (
        process.returncode == 2
        and err.startswith("paceline: a worker process of the search was killed")
        and err.count("\n") == 1
    )
    wait_for(lambda: not any(runs(pid) for pid in pids))


def refuse(task):
    if task == 3:
        raise PlanError(f"task {task} cannot be run")
    return task * task


def raise_what_cannot_be_sent(task):
    class Own(Exception):
        pass

    raise Own(f"task {task}")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_come_in_order_and_errors_as_they_are(count):
    with workers(count) as pool:
        assert (
            list(pool(refuse, [5, 4, 2, 1, 0, 7, 6])) == [25, 16, 4, 1, 0, 49, 36]
            and list(pool(refuse, [])) == []
        )
    with workers(count) as pool, pytest.raises(PlanError, match="^task 3 cannot be run$"):
        list(pool(refuse, range(8)))


def test_an_error_that_cannot_be_sent_is_told():
    with (
        workers(2) as pool,
        pytest.raises(RunError, match="a worker process of the search failed: Own: task 0"),
    ):
        list(pool(raise_what_cannot_be_sent, [0, 1]))
