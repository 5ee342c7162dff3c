"""What goes wrong in a worker process, or with a size that is not whole, is one line; files are named by
texts too.
"""

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

import paceline as pl
from paceline import cli, errors
from paceline.catalog import frameworks
from paceline.errors import PacelineError, PlanError, SpecError, UnknownName
from paceline.sched.live.driver import EngineAway
from paceline.sim.timeline import Timeline
from paceline.spec.plan import Plan
from paceline.spec.transformer import Transformer
from paceline.whatif.subject import Subject

TINY = Transformer(name="tiny", layers=4, hidden=1024, heads=8, ffn=4096, vocab=32_000, seq=1024)
MADE = [
    errors.UnknownName("framework", "eager", ["jax", "torch"], "known: jax, torch"),
    errors.MissingExtra("ray", "ray", "--engine ray"),
    *(
        kind("one line")
        for kind in (
            errors.PacelineError,
            errors.UnitError,
            errors.SpecError,
            errors.UnknownSizes,
            errors.CaptureError,
            errors.PlanError,
            errors.DoesNotFit,
            errors.RunError,
            errors.DataError,
            EngineAway,
        )
    ),
]


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
def test_errors_cross_processes(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and again.__dict__ == error.__dict__


def test_every_error_of_the_tree_is_in_the_test_above():
    def below(kind):
        return {kind, *(one for child in kind.__subclasses__() for one in below(child))}

    ours = {kind for kind in below(PacelineError) if kind.__module__.startswith("paceline.errors")}
    assert ours <= {type(error) for error in MADE}


def test_an_error_in_a_worker_is_the_error():
    unknown = pytest.raises(UnknownName, match="unknown framework 'eager'; known: ")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool, unknown:
        pool.submit(frameworks.get, "eager").result()


def test_a_framework_that_does_not_exist(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", "gpt3-1.3b", "--cluster", "2xdgx-a100", "--gbs", "32", "--fix", "framework=eager"])
    shown = capsys.readouterr().err
    assert (
        stop.value.code == 2
        and shown.startswith("paceline: unknown framework 'eager'; known: ")
        and shown.count("\n") == 1
    )


def test_a_size_that_is_not_whole_is_one_line():
    for name, value in (
        ("gbs", "32"),
        ("gbs", 16.0),
        ("seq", 1e3),
        ("seq", 0),
        ("top", 2.5),
        ("most", "many"),
        ("processes", 1.5),
    ):
        with pytest.raises(SpecError, match=f"^{name} must be a whole number of 1 or more, got {value!r}$"):
            pl.plan(TINY, "1xdgx-a100", **{"gbs": 16, name: value})
    for name, value in (("batch", 2.5), ("batch", "8"), ("batch", True), ("image", 224.0), ("seq", 1e3)):
        with pytest.raises(SpecError, match=f"^{name} must be a whole number of 1 or more, got {value!r}$"):
            pl.predict("alexnet", "h200", **{name: value})
        with pytest.raises(SpecError, match=f"^{name} must be a whole number of 1 or more, got {value!r}$"):
            Subject.of("alexnet", "8xp100-node-10gbe", "ddp", **{name: value})


def test_amounts_of_a_job_are_above_zero():
    for name, value in (("tokens", -1), ("tokens", "0"), ("deadline_s", 0.0), ("price_per_s", float("nan"))):
        with pytest.raises(SpecError, match="above zero, got "):
            pl.plan(TINY, "1xdgx-a100", **{"gbs": 16, "tokens": 1e9, name: value})


def test_a_misspelt_option_of_a_capture_brings_the_nearest():
    for where in (("h200",), ("ddp", "1xdgx-a100")):
        with pytest.raises(UnknownName, match="unknown option 'bacth'; did you mean 'batch'"):
            pl.predict("alexnet", *where, bacth=3)


@pytest.mark.parametrize(
    "given",
    [
        {"tp": 2.0},
        {"tp": 0},
        {"gbs": "32"},
        {"mbs": -1},
        {"dp": 1.5},
        {"seq": 1e3},
        {"sharding": "zero4"},
        {"schedule": "zbv"},
        {"recompute": ""},
        {"offload": None},
        {"framework": "a\nb"},
    ],
)
def test_a_plan_checks_what_python_gives(given):
    with pytest.raises(PlanError, match=f"^plan: {next(iter(given))}"):
        pl.Plan(**given)


def test_whole_numbers_of_numpy_are_taken():
    plan = pl.Plan(tp=np.int64(2), gbs=np.int32(16))
    assert plan == pl.Plan(tp=2, gbs=16) and type(plan.tp) is int


def test_files_are_named_by_texts_too(tmp_path):
    workload = pl.capture("alexnet", batch=2)
    path = str(tmp_path / "alexnet.json")
    workload.save(path)
    assert pl.Workload.load(path).to_dict() == workload.to_dict()
    with pytest.raises(SpecError, match="cannot read workload"):
        pl.Workload.load(str(tmp_path / "none.json"))
    trace = str(tmp_path / "trace.json.gz")
    pl.predict(workload, "h200", trace=True).timeline.save(trace)
    assert Timeline.load(trace).spans


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: pl.predict(TINY, plan="", cluster=3), "cluster must be a string, got 3"),
        (lambda: pl.predict("resnet18", 3), "device must be a string, got 3"),
        (lambda: pl.predict("resnet18", "h200", precision=3), "unknown precision 3; allowed: fp32"),
        (lambda: pl.predict("resnet18", "h200", optimizer=3), "optimizer must be a string, got 3"),
        (lambda: pl.predict("resnet18", "h200", framework=3), "framework must be a string, got 3"),
        (lambda: pl.predict("resnet18", "h200", batch=2**70), "batch must be at most 1.1e"),
        (lambda: pl.plan(TINY, 3, gbs=32), "cluster must be a string, got 3"),
        (lambda: pl.plan(TINY, "dgx-h100", gbs=32, fix=[3]), "a word of a plan must be a string, got 3"),
        (lambda: pl.plan(TINY, "dgx-h100", gbs=32, fix=3), "in a text or in a list, got 3"),
        (lambda: pl.plan(TINY, "dgx-h100", gbs=32, objective=3), "unknown objective 3; expected one of"),
        (lambda: Plan.parse(3), "plan must be a string, got 3"),
        (lambda: Plan.parse(f"gbs={2**70}"), "plan: gbs must be at most 1.1e"),
    ],
)
def test_a_value_of_the_wrong_kind_is_one_line(ask, message):
    with pytest.raises(PacelineError) as caught:
        ask()
    assert message in str(caught.value) and "\n" not in str(caught.value)
