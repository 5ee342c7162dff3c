"""Time to accuracy: rules, tests of significance, predictions, logs, and a small table that is really run."""

import importlib.util
import json
import math
import random
import statistics
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from paceline.bench import tta
from paceline.bench.audit import audit
from paceline.bench.tta import expected, fair_report, mllog, rules, view
from paceline.bench.tta.measure import RAW, Field, chosen_rate, lines
from paceline.bench.tta.outcome import TargetRow, TargetRun, TargetTable
from paceline.bench.tta.significance import holm, median_coverage, rank_sum_p
from paceline.errors import DataError, SpecError, UnknownName
from paceline.spec import learning

BOOK = rules.read()
RACE = BOOK.race("digits-shifted")
BATCHES = (64, 512, 4096)


# -- significance ----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**6), min_size=4, max_size=11, unique=True), st.integers(2, 9))
def test_the_permutation_test_is_that_of_scipy(values, cut):
    ours, theirs = values[:cut], values[cut:] or [-1]
    exact = mannwhitneyu(ours, theirs, method="exact").pvalue
    assert rank_sum_p(ours, theirs) == pytest.approx(exact)


def test_runs_that_missed_the_target_are_last_and_tied():
    met, missed = [1.0, 2.0, 3.0, 4.0, 5.0], [None] * 5
    assert rank_sum_p(met, missed) == pytest.approx(2 / math.comb(10, 5))
    assert rank_sum_p(missed, missed) == 1.0
    # one that missed is no better than the slowest that met it, and no worse for having been stopped early
    assert rank_sum_p([1.0, 2.0, None], [3.0, 4.0, 5.0]) == rank_sum_p([1.0, 2.0, 99.0], [3.0, 4.0, 5.0])


def test_several_tests_are_corrected_together():
    assert holm({"a": 0.01, "b": 0.02, "c": 0.9}) == {"a": 0.03, "b": 0.04, "c": 0.9}
    assert holm({"b": 0.5, "a": 0.4}) == {"b": 0.8, "a": 0.8}
    assert median_coverage(5) == 0.9375


# -- rules -----------------------------------------------------------------------------------------


def test_the_rules_that_ship_fix_targets_before_the_runs():
    for race in BOOK.tasks.values():
        assert date.fromisoformat(race.fixed) <= date.today() and race.why
        assert race.steps("every", 64) * 64 == race.every and race.steps("every", 2 * race.every) == 1
    assert len(BOOK.factors) > 2 and BOOK.tuning_seed not in range(20)
    assert BOOK.contestant("sgd").strategy == "ddp" and BOOK.contestant("lars").optimizer == "lars"
    assert BOOK.contestant("diloco period=4".split()[0]).strategy == "diloco"
    rate = RACE.base_rate(BOOK.contestant("sgd"), 512)
    assert rate == pytest.approx(2 * RACE.base_rate(BOOK.contestant("sgd"), 64))


def test_a_target_given_with_the_command_is_fixed_today():
    assert BOOK.race("digits-shifted", 0.9) is RACE
    other = BOOK.race("digits-shifted", 0.5)
    assert (other.target, other.fixed, other.most) == (0.5, date.today().isoformat(), RACE.most)
    assert BOOK.race("text-mlp", 0.4).rate == 0.2  # the task's own
    with pytest.raises(SpecError, match="digits-cnn has no target in the rules"):
        BOOK.race("digits-cnn")
    with pytest.raises(SpecError, match="above 0 and up to 1, got 97"):
        BOOK.race("digits-cnn", 97)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[tuning]\n", "no 'tasks'"),
        ("[tasks.a]\ntargett = 1\n[contestants]\n[tuning]\nfactors=[1.0]\nseed=1", "unexpected keyword"),
        ("x = [", "not valid TOML"),
    ],
)
def test_rules_with_a_mistake(tmp_path, text, says):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=says):
        rules.read(path)


def test_what_cannot_be_raced_is_refused_before_anything_runs():
    with pytest.raises(UnknownName, match="did you mean 'terngrad'"):
        BOOK.contestant("terngrat")
    words = {"races": (RACE,), "contestants": (BOOK.contestant("sgd"),), "rules": BOOK}
    with pytest.raises(SpecError, match="63 is no multiple"):
        Field(**words, batches=(63,), seeds=1, world=2)
    with pytest.raises(SpecError, match="got 0 and 2"):
        Field(**words, batches=(64,), seeds=0, world=2)
    with pytest.raises(SpecError, match="at least one task"):
        Field(**words, batches=(), seeds=1, world=2)


def test_every_contestant_is_tuned_alike_and_runs_are_interleaved():
    names = ("sgd", "lars", "ps-async")
    field = Field(
        races=(RACE,),
        contestants=tuple(map(BOOK.contestant, names)),
        batches=BATCHES,
        seeds=3,
        world=2,
        rules=BOOK,
    )
    tuning = field.tuning()
    assert {len(one["rates"]) for one in tuning} == {len(BOOK.factors)}
    assert {one["data"] for one in tuning} == {"validation"} and {one["seed"] for one in tuning} == {100}
    rates = {(RACE.task, name, batch): 0.1 for name in names for batch in BATCHES}
    runs = [one for one in field.reported(rates) if one["kind"] == "run"]
    assert [one["seed"] for one in runs] == sorted(one["seed"] for one in runs) and len(runs) == 27
    firsts = [one["contestant"] for one in runs if one["batch"] == 64][::3]
    assert firsts == list(names)  # no contestant is always the first


def test_the_rate_of_the_fewest_steps_is_taken():
    trial = {"steps": 10, "reached_s": 1.0, "metric": 0.9}
    trials = [{**trial, "lr": 1.0}, {**trial, "lr": 2.0, "steps": 8}, {**trial, "lr": 3.0, "steps": 8}]
    assert chosen_rate({"trials": trials}) == 2.0
    missed = [{**trial, "lr": lr, "reached_s": None, "metric": lr} for lr in (0.1, 0.4, 0.2)]
    assert chosen_rate({"trials": missed}) == 0.4
    assert chosen_rate({"trials": [*missed, {**trial, "lr": 5.0, "steps": 99}]}) == 5.0


# -- tables that were made -------------------------------------------------------------------------


def made_run(seed, steps, batch, step_s, reached=True):
    every = RACE.steps("every", batch)
    looks = max(1, round(steps / every))
    evaluations = [
        {
            "step": every * look,
            "seconds": every * look * step_s + look * 0.01,
            "metric": 0.95 if reached and look == looks else 0.5,
            "evaluation_s": 0.01,
        }
        for look in range(1, looks + 1)
    ]
    last = evaluations[-1]
    return TargetRun(
        seed=seed,
        lr=0.1,
        steps=last["step"],
        reached_s=last["seconds"] if reached else None,
        wall_s=last["seconds"],
        evaluations=tuple(evaluations),
        started_at="2030-01-02T03:04:05.678+00:00",
        set_up_s=0.5,
        train_samples=1000,
        eval_samples=100,
        load=1.0,
        reference_s=0.003,
    )


def made_table(missing=()):
    """Two contestants whose steps obey the law, with a little noise; the second is slower."""
    chance = random.Random(1)
    rows = []
    for name, least, step_s in (("sgd", 40.0, 0.002), ("terngrad", 60.0, 0.004)):
        for batch in BATCHES:
            steps = least * (1 + 600 / batch)
            runs = [
                made_run(
                    seed,
                    steps * chance.uniform(0.97, 1.03),
                    batch,
                    step_s * chance.uniform(0.97, 1.03),
                    (name, batch) not in missing,
                )
                for seed in range(5)
            ]
            rows.append(
                TargetRow(
                    task=RACE.task,
                    contestant=name,
                    strategy="ddp" if name == "sgd" else name,
                    optimizer="sgd",
                    batch=batch,
                    lr=0.1,
                    trials=4,
                    runs=tuple(runs),
                )
            )
    return TargetTable(
        rows=tuple(rows), rules={RACE.task: RACE}, baseline="sgd", world=2, seeds=5, machine="a test"
    ).tested()


def made_facts(batch, step_s):
    """A rank alone whose step takes so long, beside a link that takes no time."""
    layer = {"name": "weight", "shape": [4, 4], "need_s": 0.0, "ready_s": 0.5 * step_s, "rows": 0}
    phases = {"forward_s": 0.25 * step_s, "backward_s": 0.5 * step_s, "update_s": 0.25 * step_s}
    profile = {"layers": [layer], **phases, "momentum": True, "step_s": step_s}
    machine = {"latency_s": 1e-9, "link_Bps": 1e15, "flops": 1e12, "reduce_Bps": 1e15}
    return {
        "kind": "facts",
        "task": RACE.task,
        "batch": batch,
        "profiles": {"sgd": profile},
        "machine": machine,
        "rates": {"copy_s": 1e-15},
        "cores": 2,
        "threads": 1,
        "evaluation_s": 0.01,
    }


def test_medians_ranges_and_tests():
    table = made_table(missing={("terngrad", 4096)})
    assert table.coverage == 0.9375
    for row in table.rows:
        times = [run.reached_s for run in row.runs]
        if (row.contestant, row.batch) == ("terngrad", 4096):
            assert row.reached == 0 and row.median_s == math.inf and math.isnan(row.steps)
        else:
            assert row.median_s == statistics.median(times) and row.range_s == (min(times), max(times))
        assert (row.p is None) == (row.contestant == "sgd")
        assert row.p is None or row.p == pytest.approx(2 / math.comb(10, 5))
        assert table.best(row) == (row.contestant == "sgd")
    shown = view.markdown(table)
    assert shown.count("missed") >= 6 and "0 of 5" in shown
    html = view.page(table, "a command")
    assert html.count('class="dot first"') == 30 and "seed 4" in html
    json.dumps(table.to_dict())


def test_predictions_are_of_runs_that_they_have_not_seen():
    table = made_table()
    facts = [made_facts(batch, 0.002) for batch in BATCHES]
    found = expected.predicted(table, facts)
    for row in found.rows:
        law = {"sgd": 40.0, "terngrad": 60.0}[row.contestant] * (1 + 600 / row.batch)
        # evaluations come in whole numbers of `every` steps
        assert row.predicted_steps == pytest.approx(law, rel=0.1)
        unseen = row.runs if row.batch == 512 else row.runs[2:]
        assert row.compared_s == statistics.median(run.reached_s for run in unseen)
    sgd = [row for row in found.rows if row.contestant == "sgd"]
    assert all(abs(row.error) < 0.12 for row in sgd)
    assert all(row.predicted_step_s == pytest.approx(0.002, rel=0.04) for row in sgd)
    # seen runs say what the facts do not: here, that every step takes a millisecond more
    short = expected.predicted(table, [made_facts(batch, 0.001) for batch in BATCHES])
    steps = [row.predicted_step_s for row in short.rows if row.contestant == "sgd"]
    assert steps == pytest.approx([0.002] * 3, rel=0.04)
    assert short.errors["seconds of a step without correction"] > 0.4
    # runs that were seen do not count in what is compared, and others not in the law
    seen = replace(table, rows=tuple(_slower(row, seeds={0, 1}) for row in table.rows))
    assert expected.predicted(seen, facts).rows[0].compared_s == found.rows[0].compared_s
    unseen = replace(table, rows=tuple(_slower(row, seeds={2, 3, 4}) for row in table.rows))
    assert expected.predicted(unseen, facts).rows[0].predicted_s == found.rows[0].predicted_s
    assert found.mean_error == statistics.fmean(abs(row.error) for row in found.rows)
    assert "seeds 0 1 of batches 64 and 4096" in found.held_out
    assert found.errors["steps to the target"] < 0.1


@pytest.mark.parametrize(
    ("points", "factor", "constant"),
    [
        ([(1.0, 2.5), (3.0, 5.5)], 1.5, 1.0),
        ([(1.0, 1.5), (3.0, 3.0)], 1.0, 0.25),  # longer ones are slowed down less
        ([(1.0, 1.1), (3.0, 6.0)], 1.55, 0.0),
        ([(2.0, 2.5)], 1.0, 0.5),
        ([(1.0, 0.5), (3.0, 2.0)], 1.0, 0.0),  # never faster than the facts
    ],
)
def test_a_correction_is_a_factor_and_a_constant(points, factor, constant):
    found = expected._Correction.through(points)
    assert (found.factor, found.constant_s) == pytest.approx((factor, constant))
    assert found(2.0) == pytest.approx(2 * factor + constant)


def _slower(row, seeds):
    runs = [
        replace(run, reached_s=9 * run.reached_s, wall_s=9 * run.wall_s, steps=9 * run.steps)
        if run.seed in seeds
        else run
        for run in row.runs
    ]
    return replace(row, runs=tuple(runs))


def test_a_contestant_that_misses_the_target_is_not_predicted():
    table = made_table(missing={("terngrad", 64), ("terngrad", 4096)})
    found = expected.predicted(table, [made_facts(batch, 0.002) for batch in BATCHES])
    assert {row.contestant for row in found.rows if row.predicted_s is None} == {"terngrad"}
    record = expected.learning(table, RACE.task, [])
    assert set(record.curves) == {"sgd"}


def test_the_record_has_the_law_the_spread_and_the_noise_scale():
    noise = {"kind": "noise", "task": RACE.task, "contestant": "sgd", "noise_samples": [300.0, 500.0, 400.0]}
    record = expected.learning(made_table(), RACE.task, [noise])
    curve = record.curves["sgd"]
    assert curve.least_steps == pytest.approx(40, rel=0.1) and curve.critical_batch == pytest.approx(
        600, rel=0.15
    )
    assert 0 < curve.spread < 0.1 and (curve.batches, curve.seeds) == ((64, 4096), 5)
    assert curve.noise_scale == 400 and record.curves["terngrad"].noise_scale is None
    assert curve.synchronisation == "allreduce" and record.fixed == RACE.fixed


def test_the_report_of_a_table_passes_the_audit(tmp_path):
    fair_report.write(made_table(), tmp_path / "report.json")
    found = audit(tmp_path / "report.json")
    assert not found.findings and (found.contestants, found.runs) == (2, 30)
    # and is one in which cheats are found
    data = json.loads((tmp_path / "report.json").read_text())
    data["claims"][0]["value"] = min(run.reached_s for run in made_table().rows[0].runs)
    (tmp_path / "best.json").write_text(json.dumps(data))
    assert {one.kind for one in audit(tmp_path / "best.json").findings} == {"best-of-n"}


# -- logs ------------------------------------------------------------------------------------------


def parsed(text):
    assert all(line.startswith(mllog.TOKEN) for line in text.splitlines())
    return [json.loads(line[len(mllog.TOKEN) :]) for line in text.splitlines()]


def test_logs_have_the_lines_of_mlperf(tmp_path):
    table = made_table(missing={("terngrad", 4096)})
    paths = mllog.write(table, tmp_path)
    assert len(paths) == len(set(paths)) == 30
    found = parsed((tmp_path / "digits-shifted-sgd-64" / "result_0.txt").read_text())
    run = table.rows[0].runs[0]
    assert all(
        set(one) == {"namespace", "time_ms", "event_type", "key", "value", "metadata"} for one in found
    )
    assert [one["time_ms"] for one in found] == sorted(one["time_ms"] for one in found)
    by_key = {one["key"]: one for one in found}
    reached_ms = by_key["run_stop"]["time_ms"] - by_key["run_start"]["time_ms"]
    assert reached_ms == pytest.approx(1e3 * run.reached_s, abs=2)
    assert by_key["run_stop"]["metadata"]["status"] == "success"
    values = [one["value"] for one in found if one["key"] == "eval_accuracy"]
    assert values == [one["metric"] for one in run.evaluations]
    kinds = {one["key"]: one["event_type"] for one in found}
    assert kinds["eval_start"] == "INTERVAL_START" and kinds["eval_stop"] == "INTERVAL_END"
    missed = parsed((tmp_path / "digits-shifted-terngrad-4096" / "result_3.txt").read_text())
    assert missed[-1]["metadata"]["status"] == "aborted"


@pytest.mark.skipif(
    importlib.util.find_spec("mlperf_logging") is None, reason="mlperf-logging of MLCommons is not installed"
)
def test_logs_are_accepted_by_the_checker_of_mlcommons(tmp_path):
    """All rules that are common to the benchmarks. Those of the open division know the names of MLPerf's own
    benchmarks only: that the task is none of these is all that they find.
    """
    from mlperf_logging.compliance_checker import mlp_compliance, mlp_parser

    rules_of = Path(mlp_compliance.__file__).parent / "training_5.1.0"
    for path in mllog.write(made_table(), tmp_path)[::7]:
        found, errors = mlp_parser.parse_file(str(path), ruleset="5.1.0")
        assert not errors and found
        checker = mlp_compliance.make_checker("training", "5.1.0", quiet=False, werror=True)
        checker.configured_checks(found, str(rules_of / "common.yaml"))
        assert not checker.has_messages()
        checker.configured_checks(found, str(rules_of / "open_common.yaml"))
        assert not checker.not_overwritable and set(checker.overwritable) == {"submission_benchmark"}
        mlp_compliance.enqueued_configs.clear()


# -- a table that is run ---------------------------------------------------------------------------

QUICK = """
[contestants]
sgd = { strategy = "ddp", optimizer = "sgd" }
ps-async = { strategy = "ps-async", optimizer = "sgd", rate = 0.5 }
[tuning]
factors = [1.0, 0.1]
seed = 100
[tasks.digits-shifted]
target = 0.25
fixed = "2026-11-19"
why = "a test"
rate = 0.05
rate_batch = 64
every = 2048
warmup = 5
most = 60_000
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tta")
    (folder / "rules.toml").write_text(QUICK)

    def run():
        return tta.time_to_target(
            ["digits-shifted"],
            ["sgd", "ps-async"],
            [256, 1024],
            seeds=2,
            folder=folder / "out",
            rules=folder / "rules.toml",
        )

    return folder, run(), run


@pytest.mark.timeout(900)
def test_a_table_is_run_predicted_and_audited(ran):
    folder, table, _ = ran
    assert [(row.contestant, row.batch) for row in table.rows] == [
        ("sgd", 256),
        ("ps-async", 256),
        ("sgd", 1024),
        ("ps-async", 1024),
    ]
    for row in table.rows:
        assert row.reached == 2 and row.trials == 2 and row.predicted_s > 0
        for run in row.runs:
            last = run.evaluations[-1]
            # the clock stops at the end of the evaluation that meets the target, and has counted all of them
            assert last["metric"] >= 0.25 > max([0, *(one["metric"] for one in run.evaluations[:-1])])
            assert run.reached_s == last["seconds"] and run.evaluation_s < run.reached_s <= run.wall_s
            assert [one["step"] for one in run.evaluations] == [
                (2048 // row.batch) * (place + 1) for place in range(len(run.evaluations))
            ]
    found = audit(folder / "out" / tta.REPORT)
    assert not found.findings
    assert len(list((folder / "out" / tta.LOGS).rglob("result_*.txt"))) == 8
    record = learning.read(folder / "out" / "learning-digits-shifted.toml")
    assert set(record.curves) == {"sgd", "ps-async"} and record.target == 0.25


@pytest.mark.timeout(900)
def test_a_table_goes_on_where_it_was_interrupted(ran):
    folder, table, again = ran
    raw = folder / "out" / RAW
    whole = raw.read_text()
    assert again().rows == table.rows and raw.read_text() == whole
    # a run that was killed in the middle of a line
    raw.write_text(whole[: whole.rindex('{"kind"') + 40])
    assert len(lines(raw)) == whole.count("\n") - 1
    found = again()
    assert found.rows[0].runs == table.rows[0].runs and len(lines(raw)) == whole.count("\n")
    assert [row.steps for row in found.rows[::2]] == [row.steps for row in table.rows[::2]]


def test_runs_by_other_rules_are_not_taken_for_these(ran):
    folder, _, _ = ran
    (folder / "rules.toml").write_text(QUICK.replace("target = 0.25", "target = 0.3"))
    with pytest.raises(DataError, match=r"with target 0.25, not 0.3; give another --output"):
        tta.time_to_target(
            ["digits-shifted"], ["sgd"], [256], seeds=2, folder=folder / "out", rules=folder / "rules.toml"
        )
