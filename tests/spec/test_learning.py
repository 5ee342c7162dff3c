"""Records of learning: the law of large batches, times to a target from predictions, files with mistakes."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.cli import main
from paceline.cost.learning import fitted_law
from paceline.errors import DataError, SpecError, UnknownName
from paceline.spec import learning
from paceline.spec.learning import Learning, LearningCurve

CURVE = LearningCurve(
    name="sgd",
    synchronisation="allreduce",
    optimizer="sgd",
    least_steps=100.0,
    critical_batch=1000.0,
    batches=(64, 4096),
    seeds=5,
    spread=0.1,
    how="a test",
)
TERNARY = replace(CURVE, name="terngrad", synchronisation="terngrad", least_steps=130.0, noise_scale=900.0)
RECORD = Learning(
    task="made", metric="accuracy", target=0.9, fixed="2026-11-19", curves={"sgd": CURVE, "terngrad": TERNARY}
)


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "learning.toml"
    path.write_text(RECORD.to_toml())
    return path


def said(capsys, *words):
    """What a command prints; its exit code is 0, or else what it says on stderr is given."""
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    out, err = capsys.readouterr()
    assert stop.value.code in (0, 2) and bool(err) == (stop.value.code == 2)
    return err or out


@given(st.floats(1, 1e5), st.floats(1, 1e5), st.sampled_from([(64, 512), (64, 4096), (64, 512, 4096)]))
def test_the_law_is_found_again_from_its_own_points(least, critical, batches):
    points = [(batch, least * (1 + critical / batch)) for batch in batches]
    found = fitted_law(points)
    assert [a * (1 + b / 100) for a, b in [found]] == pytest.approx([least * (1 + critical / 100)], rel=1e-4)
    fitted = replace(CURVE, least_steps=found[0], critical_batch=found[1])
    assert fitted.steps(256) == pytest.approx(least * (1 + critical / 256), rel=1e-4)


def test_the_law_where_one_of_its_parts_is_missing():
    # steps do not fall with the batch at all
    assert fitted_law([(64, 50.0), (512, 50.0), (4096, 50.0)]) == pytest.approx((50.0, 0.0))
    # they fall as fast as the batch grows: no floor was seen, and samples stay the same
    least, critical = fitted_law([(64, 800.0), (512, 100.0)])
    assert least > 0 and least * (1 + critical / 256) == pytest.approx(200.0, rel=0.01)
    with pytest.raises(DataError, match="two batches or more"):
        fitted_law([(64, 50.0), (64, 60.0)])
    with pytest.raises(DataError, match="above zero"):
        fitted_law([(64, 50.0), (128, 0.0)])


def test_steps_samples_and_candidates():
    assert CURVE.steps(1000) == 200 and CURVE.samples(1000) == 200_000
    assert CURVE.steps(10**9) == pytest.approx(100, rel=1e-5)
    assert CURVE.candidates() == (64, 128, 256, 512, 1024, 2048, 4096)
    assert replace(CURVE, critical_batch=8.0).candidates() == (64, 128, 256)
    assert CURVE.measured(64) and not CURVE.measured(8192)


def test_a_record_is_read_as_it_was_written(record):
    found = learning.read(record)
    assert found.curves == RECORD.curves and found.source == str(record)
    assert (found.task, found.metric, found.target, found.fixed) == ("made", "accuracy", 0.9, "2026-11-19")
    assert learning.named(f"{record}:terngrad")[1] == "terngrad" and learning.named(str(record))[1] == ""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace("least_steps", "least_stepps"), "did you mean 'least_steps'"),
        (lambda text: text.replace("least_steps = 100", "least_steps = -1"), "must be a number above zero"),
        (lambda text: text.replace("[64, 4096]", "64"), r"batches are \[smallest, largest\], got 64"),
        (lambda text: text.replace("[task]", "[tasks]"), r"has \[task\] and \[curves.NAME\]"),
        (lambda text: text.replace('metric = "accuracy"\n', ""), "lacks metric"),
        (lambda text: text.replace("seeds = 5\n", ""), "lacks seeds"),
        (lambda text: text + "[", "not valid TOML"),
    ],
)
def test_a_record_with_a_mistake(record, change, says):
    record.write_text(change(record.read_text()))
    with pytest.raises(SpecError, match=says):
        learning.read(record)


def test_the_time_is_that_of_the_steps(record):
    found = learning.read(record)
    step = pl.predict("llama3-8b", "fsdp gbs=1024 seq=1024 mbs=1", "8xdgx-h100")
    time = found.time(step)
    assert time.curve == "sgd" and time.steps == pytest.approx(100 * (1 + 1000 / 1024))
    assert time.value_s == pytest.approx(time.steps * step.step_s)
    # the spread of runs comes on top of that of the step
    assert time.low_s < time.steps * step.step_s_low and time.high_s > time.steps * step.step_s_high
    assert time.measured and not found.time(replace(step, batch=8192)).measured
    relaxed = replace(step, plan="terngrad gbs=1024")
    assert found.time(relaxed).steps == pytest.approx(1.3 * time.steps)
    # ways of averaging that are exact learn alike
    assert found.time(replace(step, plan="overlap gbs=1024")).curve == "sgd"
    with pytest.raises(SpecError, match=r"no curve of dgc, only sgd \(allreduce\), terngrad \(terngrad\)"):
        found.time(replace(step, plan="dgc gbs=1024"))
    with pytest.raises(UnknownName, match="did you mean 'terngrad'"):
        found.time(step, "terngrat")


def test_the_command_line_answers_with_the_time_beside_the_step(record, capsys):
    words = ["predict", "vgg11", "-d", "t4", "-b", "64", "--learning"]
    found = json.loads(said(capsys, *words, str(record), "--json"))
    assert found["time_to_target"]["value_s"] == pytest.approx(CURVE.steps(64) * found["step_s"])
    text = " ".join(said(capsys, *words, f"{record}:terngrad").split())
    assert "to 0.9 accuracy of made" in text and "curve terngrad" in text
    assert "cannot read learning file" in said(capsys, *words, f"{record}x")


def test_plans_are_compared_by_the_time_to_the_target(record, capsys):
    words = ["compare", "vgg11", "--cluster", "4x1xt4@10Gb/s/gpu", "--plan", "mbs=16", "--json"]
    found = json.loads(said(capsys, *words, "--plans", "ddp,terngrad,dgc", "--learning", str(record)))
    ddp, terngrad, dgc = found["rows"]
    assert "time_to_target" not in dgc and dgc["step_s"] > 0
    for row, curve in ((ddp, CURVE), (terngrad, TERNARY)):
        assert row["time_to_target"]["value_s"] == pytest.approx(curve.steps(row["batch"]) * row["step_s"])
    soonest = min((ddp, terngrad), key=lambda row: row["time_to_target"]["value_s"])
    assert found["best"] == soonest["plan"]


def test_the_planner_chooses_the_batch_by_the_time_to_the_target(record, capsys):
    words = ["plan", "vgg11", "--cluster", "1xdgx-h100", "--learning", str(record)]
    answers = json.loads(said(capsys, *words, "--json"))
    assert [one["gbs"] for one in answers] == [64, 128, 256, 512, 1024, 2048, 4096]
    times = [one["time_to_target"]["value_s"] for one in answers]
    assert [one["soonest"] for one in answers] == [value == min(times) for value in times]
    steps = [CURVE.steps(one["gbs"]) * one["best"]["step_s"] for one in answers]
    assert times == pytest.approx(steps)
    assert "soonest at the target: batch" in said(capsys, *words, "--gbs", "256,1024")
    assert "plans that learn alike" in said(capsys, *words, "--allow", "compress")
