"""The audit finds each planted cheat and nothing else, and passes honest reports."""

import csv
import importlib.util
import io
import json
import random
import re
from pathlib import Path

import pytest

from paceline.bench.audit import audit
from paceline.cli import main
from paceline.errors import DataError
from paceline.readers import benchmark
from paceline.spec.audit import FINDINGS
from paceline.spec.benchmark import ReportedValue

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location(
    "planted_cheats", Path(__file__).with_name("planted_cheats.py")
)
planted = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(planted)
FORMATS = {"report.json": planted.as_json, "results.csv": planted.as_csv}


@pytest.fixture(params=FORMATS)
def audited(request, tmp_path):
    """Audits a report that was written in one of the formats; also the lines of the file."""

    def run(report):
        path = tmp_path / request.param
        path.write_text(FORMATS[request.param](report))
        return audit(path), path.read_text().splitlines()

    return run


@pytest.mark.parametrize(
    ("kind", "report"), [cheat[1:] for cheat in planted.CHEATS], ids=[c[0] for c in planted.CHEATS]
)
def test_each_cheat_is_found_and_nothing_else(audited, kind, report):
    found, lines = audited(report())
    assert {finding.kind for finding in found.findings} == {kind}
    for finding in found.findings:
        assert finding.evidence and finding.honest and finding.text
        for cell in finding.evidence:
            # the cell is on the line that it names: its value, and in JSON its key
            line = lines[cell.line - 1]
            key = cell.column.rpartition(".")[2]
            assert str(cell.value) in line
            assert f'"{key}": ' in line or key in lines[0].split(",")


def test_every_kind_of_finding_is_planted():
    assert {kind for _, kind, _ in planted.CHEATS} == set(FINDINGS)
    assert len(FINDINGS) >= 12


def test_an_honest_report_passes(audited):
    found, _ = audited(planted.honest())
    assert not found.findings and not found.unchecked
    assert (found.contestants, found.runs, found.evaluations) == (3, 15, 150)


def test_explanations_have_the_figures(audited):
    report = planted.cheat("the best of five runs")
    (finding,) = audited(report)[0].findings
    median = planted.middle(report, "ours")
    assert f"{median:.4g} (median of 5" in finding.honest
    assert finding.evidence[0].number == min(planted.times(report, "ours"))
    report = planted.cheat("a target only ours reaches")
    finding = audited(report)[0].findings[0]
    best = max(row["metric"] for one in planted.runs(report, "overlap") for row in one["evaluations"])
    assert f"its best is {best:.4g} in 5 runs" in finding.text
    common = min(
        max(row["metric"] for row in one["evaluations"])
        for name in ("ours", "overlap")
        for one in planted.runs(report, name)
    )
    assert f"{common:.4g}" in finding.honest and " s against " in finding.honest
    report = planted.cheat("a cut axis")
    (finding,) = audited(report)[0].findings
    assert "6 looks 4 times as large as 4.5, and is 1.333 times" in finding.text


@pytest.mark.parametrize(
    "change",
    [
        # the reverse of a cheat is none
        lambda r: r["contestants"][0].update(tuning_trials=500),
        lambda r: r["charts"][0].update(y_from=0, y_label="seconds"),
        lambda r: r["charts"][1].update(y="accuracy", y_from=0.9, y_label="accuracy (from 0.9)"),
        lambda r: r["charts"][1].update(y="loss", y_scale="log", y_label="loss (log scale)"),
        lambda r: r["charts"][1].update(x_scale="log", x_label="devices (log scale)"),
        lambda r: r["charts"][1].update(x_scale="linear", x_ticks="0 8 16 24"),
        # the mean instead of the median
        lambda r: r["claims"][0].update(statistic="mean", value=sum(planted.times(r, "ours")) / 5),
        # rounding of what is written
        lambda r: r["claims"][1].update(speedup=round(r["claims"][1]["speedup"], 1)),
        # per watt beside the figure itself
        lambda r: r["claims"].append({**r["claims"][2], "per": "device"}),
        # over every baseline, the slower ones too
        lambda r: r["claims"].append(planted.claimed(r, over="ddp")[1]),
        # a target in per cent
        lambda r: r["stated"].update(target=97),
        lambda r: r["claims"].append(
            {"contestant": "ours", "quantity": "accuracy", "value": f"{100 * planted.ends(r, 'ours'):.2f}"}
        ),
        lambda r: r["contestants"][1].update(reference=100.0),
        lambda r: r["stated"].update(batch="64 256"),
        lambda r: r["stated"].update(target_fixed="2026-01-01"),
        lambda r: r["stated"].pop("seeds"),
    ],
)
def test_what_is_no_cheat_passes(audited, change):
    report = planted.honest()
    change(report)
    assert not audited(report)[0].findings


def test_the_date_of_a_target(audited):
    report = planted.honest()
    report["stated"]["target_fixed"] = "2026-03-01"
    for one in report["runs"]:
        one["started_at"] = "2026-02-01"
    (finding,) = audited(report)[0].findings
    assert finding.kind == "target-after-runs" and len(finding.evidence) == 2


def test_a_clock_that_is_said_to_stop_is_a_note(audited):
    report = planted.cheat("a clock that stops for evaluation")
    report["stated"]["clock"] = "training"
    found, _ = audited(report)
    assert not found.findings and "training alone" in found.notes[0]


def test_runs_that_failed_are_not_left_out(audited):
    report = planted.honest()
    mine = planted.runs(report, "ours")
    for one in mine[:2]:
        for row in one["evaluations"]:
            row["metric"] = min(row["metric"], 0.96)
    report["claims"] = planted.claimed(report)
    found, _ = audited(report)
    assert {finding.kind for finding in found.findings} == {"best-of-n"}
    assert "leaves out 2 of 5 runs" in found.findings[0].text


def test_without_claims_the_better_is_the_favoured(audited):
    report = planted.honest()
    report["claims"] = []
    for row in report["contestants"]:
        del row["role"]
    assert not audited(report)[0].findings
    report["contestants"][2]["tuning_trials"] = 9
    found, _ = audited(report)
    assert [finding.kind for finding in found.findings] == ["unequal-tuning"] * 2
    assert "claims" in {one.missing for one in found.unchecked}


def test_tasks_are_compared_one_by_one(audited):
    """A target that the baseline reaches on one task, and never on the other."""
    report = planted.honest()
    hard = [{**one, "task": "hard", "target": 0.985} for one in report["runs"]]
    for one in report["runs"]:
        one["task"] = "digits-cnn"
    report["runs"] += hard
    for claim in report["claims"]:
        claim["task"] = "digits-cnn"
    found, _ = audited(report)
    assert {finding.kind for finding in found.findings} == {"unreachable-target"}
    assert "0.985" in found.findings[0].text


def test_more_frequent_by_steps_and_by_samples(audited):
    """The same interval in steps at another batch is no finer evaluation."""
    report = planted.honest()
    for one in report["runs"]:
        if one["contestant"] != "ours":
            one["batch"] = 256
    report["stated"]["batch"] = "64 256"
    assert not audited(report)[0].findings


def test_one_evaluation_at_the_end_is_not_left_out(audited):
    report = planted.honest()
    report["claims"], report["stated"]["target"] = [], 0.5
    for one in report["runs"]:
        last = one["evaluations"][-1]
        one["evaluations"] = [{**last, "seconds": one["wall_s"] - last["evaluation_s"]}]
    assert not audited(report)[0].findings


def test_a_comparison_across_batches_has_to_say_so(audited):
    report = planted.cheat("another batch")
    del report["stated"]["batch"]
    found, _ = audited(report)
    assert {finding.kind for finding in found.findings} == {"other-batch"}
    assert "ours runs at batch 256, overlap at 64" in found.findings[0].text


def test_less_can_be_better(audited):
    """Targets of a loss: the same report upside down."""
    report = planted.honest()
    report["stated"] |= {"metric": "loss", "target": round(1 - planted.TARGET, 4)}
    for one in report["runs"]:
        for row in one["evaluations"]:
            row["metric"] = round(1 - row["metric"], 4)
    assert not audited(report)[0].findings
    report["stated"]["target"] = 0.015
    report["claims"] = report["claims"][2:]
    assert {finding.kind for finding in audited(report)[0].findings} == {"unreachable-target"}


ODD = [None, "", 0, -1, "x", [], {}, [1, 2], True, 1e308, "1e999", "0", "-", "±", {"a": 1}, "1 of 0"]


def places(value, path=()):
    """The path of everything in a document."""
    keys = range(len(value)) if isinstance(value, list) else ()
    for key in value if isinstance(value, dict) else keys:
        yield (*path, key)
        yield from places(value[key], (*path, key))


@pytest.mark.parametrize("seed", range(25))
def test_broken_reports_are_audited_or_refused(tmp_path, seed):
    """Whatever is missing or odd in a report: an answer that can be printed, or one line of what is wrong."""
    chance = random.Random(seed)
    report = planted.cheat(chance.choice(planted.CHEATS)[0])
    for _ in range(chance.randint(1, 6)):
        *path, last = chance.choice(
            [place for place in places(report) if place[0] != "runs" or len(place) < 4]
        )
        holder = report
        for key in path:
            holder = holder[key]
        if chance.random() < 0.4:
            del holder[last]
        else:
            holder[last] = chance.choice(ODD)
    file = tmp_path / "report.json"
    file.write_text(planted.as_json(report))
    try:
        found = audit(file)
    except DataError as error:
        assert str(file) in str(error) and "\n" not in str(error)
        return
    assert json.dumps(found.to_dict())
    assert all(finding.evidence for finding in found.findings)


# -- our own reports -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A comparison that was really run: what --json prints, and the folder of --record."""
    from paceline.report import plain
    from paceline.train.tasks.compare import compare

    folder = tmp_path_factory.mktemp("trained")
    found = compare("digits-cnn", ["allreduce", "terngrad"], world=2, seeds=2, steps=6, record=folder / "RUN")
    (folder / "compared.json").write_text(plain.text(found.to_dict()))
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["compared.json", "RUN"])
def test_our_own_runs_pass(trained, name):
    found = audit(trained / name)
    assert not found.findings
    assert (found.contestants, found.runs) == (2, 4)
    missing = {one.missing for one in found.unchecked}
    assert "claims" in missing and "charts" in missing
    report = benchmark.read(trained / name)
    assert report.names == ("allreduce", "terngrad")
    assert all(run.number("metric") and run.number("seconds") for run in report.runs)
    if name == "RUN":
        assert {run.text("seed") for run in report.runs} == {"0", "1"}
        assert all(run.number("batch") for run in report.runs)


@pytest.mark.timeout(600)
def test_one_seed_of_our_own_is_a_finding(trained, tmp_path):
    data = json.loads((trained / "compared.json").read_text())
    for row in data["rows"]:
        for name in ("accuracies", "seconds", "reached_s", "losses"):
            row[name] = row[name][:1]
    path = tmp_path / "one.json"
    path.write_text(json.dumps(data))
    (finding,) = audit(path).findings
    assert finding.kind == "one-seed" and "allreduce and terngrad" in finding.text


def test_runs_that_ship_pass():
    """The training runs behind docs/training.md, with those that chose the settings."""
    found = audit(ROOT / "src/paceline/bench/data/task_runs.jsonl")
    assert not found.findings and found.runs == 150 and found.contestants == 10


def test_our_times_to_accuracy_pass(tmp_path):
    """The table of docs/benchmarks.md, from the runs that are kept: the report that `bench tta` writes."""
    from paceline.bench import tta
    from paceline.bench.tta import fair_report, view
    from paceline.bench.tta.measure import lines

    table = tta.table_of(tta.field_of(), lines(ROOT / "measurements" / "time_to_accuracy.jsonl.gz"))
    fair_report.write(table, tmp_path / "report.json")
    found = audit(tmp_path / "report.json")
    assert not found.findings
    assert (found.contestants, found.runs) == (6, 2 * 6 * 3 * 5)
    assert tables("benchmarks.md")["time to accuracy"].strip() == view.markdown(table)


def tables(page):
    """The tables of a page of the docs that are filled by measurements, by their marks."""
    text = (ROOT / "docs" / page).read_text()
    return dict(re.findall(r"<!-- ([\w ]+) -->\n(.*?)<!-- end \1 -->", text, re.S))


@pytest.mark.parametrize(
    ("page", "mark", "runs"),
    [
        ("training.md", "accuracy", 60),
        ("training.md", "large", 24),
        ("asynchronous.md", "time to accuracy", 45),
    ],
)
@pytest.mark.parametrize("name", ["table.md", "table.csv"])
def test_tables_of_the_docs_pass(tmp_path, page, mark, runs, name):
    path = tmp_path / name
    text = tables(page)[mark]
    if name == "table.csv":
        rows = [line.strip()[1:-1].split("|") for line in text.splitlines() if line.startswith("|")]
        buffer = io.StringIO()
        csv.writer(buffer).writerows(
            [cell.strip() for cell in row] for row in rows if set(*row[:1]) - set("-: ")
        )
        text = buffer.getvalue()
    path.write_text(text)
    found = audit(path)
    assert not found.findings and found.runs == runs


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3.0),
        ("1,234.5", 1234.5),
        ("97.5 %", 0.975),
        ("98.77%", 0.9877),
        ("12.5 ms", 0.0125),
        ("2 min", 120.0),
        ("1.82 ± 0.34", 1.82),
        ("1.4x", 1.4),
        ("-3e-2", -0.03),
        ("fast", None),
        ("3 apples", None),
        (True, None),
        (None, None),
        (float("nan"), None),
    ],
)
def test_numbers_as_people_write_them(value, number):
    assert ReportedValue(value=value, line=1, column="x").number == (
        pytest.approx(number) if number is not None else None
    )


def test_other_names_of_columns(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text(
        "\ufeffMethod;Batch Size;Random seed;Iteration;Time (s);Accuracy (%);dtype;eval_ms\n"
        "sgd;64;1;10;1.5;90.5;fp32;20\n"
        "sgd;64;1;20;3.0;92.5;fp32;20\n"
        "adam;64;1;10;1.5;91;fp32;20\n"
    )
    report = benchmark.read(path)
    first, second = report.runs
    assert report.names == ("sgd", "adam") and first.number("batch") == 64
    assert [row["metric"].number for row in first.evaluations] == pytest.approx([0.905, 0.925])
    assert first.evaluations[1]["evaluation_s"].number == pytest.approx(0.02)
    assert first.evaluations[1]["seconds"].line == 3 and second.number("seed") == 1
    assert [finding.kind for finding in audit(report).findings] == ["one-seed"]


def test_a_killed_run_cuts_its_last_line(tmp_path):
    for seed in (0, 1):
        folder = tmp_path / f"ddp-{seed}"
        folder.mkdir()
        start = {"kind": "run", "task": "t", "strategy": "ddp", "world": 2, "seed": seed, "batch": 8}
        cut = '{"kind": "end", "accuracy": 0.5, "seconds": 3.0, "reached": {"step": 3, "sec'
        (folder / "record.jsonl").write_text(f"{json.dumps(start)}\n{cut}")
    report = benchmark.read(tmp_path)
    assert [run.text("seed") for run in report.runs] == ["0", "1"]
    assert report.runs[1].fields["seed"].file == "ddp-1/record.jsonl"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "not valid JSON: line 1 column 2"),
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.json", "{}", "no `runs`"),
        ("a.json", '{"runs": {}}', "runs: expected a list, got dict"),
        ("a.json", '{"runs": []}', "no runs"),
        ("a.json", '{"runs": [3]}', "line 1, runs[0]: expected an object, got int"),
        ("a.json", '{"runs": [{"seed": 1}]}', "a run without a contestant (line 1, runs[0].seed: 1)"),
        ("a.json", '{"runs": [{"contestant": "a"}], "claims": 3}', "claims: expected a list, got int"),
        ("a.json", '{"rows": [3]}', "no `runs`"),
        ("a.csv", "", "empty"),
        ("a.csv", "seed,accuracy\n1,0.5\n", "a run without a contestant (line 2, seed: 1)"),
        ("a.csv", "contestant,seed\na,1,2\n", "line 2: 3 cells under 2 columns"),
        ("a.csv", "contestant\n", "no runs"),
        ("a.csv", "record,contestant\nclam,a\n", "a record is one of stated, contestant"),
        ("a.jsonl", '{"strategy": "a"}\nno\n', "line 2: not JSON"),
        ("a.jsonl", "3\n", "line 1: expected an object, got int"),
        ("a.csv", b"\xff\xfe\x00", "not UTF-8 at byte 0"),
    ],
)
def test_bad_input(tmp_path, capsys, name, text, message):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=re.escape(message)):
        audit(path)
    with pytest.raises(SystemExit) as stopped:
        main(["audit", str(path)])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and message in error and error.count("\n") == 1


def test_missing_files(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        audit(tmp_path / "none.csv")
    with pytest.raises(DataError, match=r"a folder without a record\.jsonl"):
        audit(tmp_path)


# -- command line ----------------------------------------------------------------------------------


def command(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main(["audit", *map(str, words)])
    return stopped.value.code, capsys.readouterr().out


def test_command(capsys, tmp_path):
    path, page = tmp_path / "report.json", tmp_path / "audit.html"
    path.write_text(planted.as_json(planted.honest()))
    code, text = command(capsys, path, "--strict")
    assert code == 0 and "no finding" in text
    cheat = planted.cheat("more tuning for ours")
    path.write_text(planted.as_json(cheat))
    code, text = command(capsys, path, "--html", page)
    assert code == 0 and "tuning budgets differ" in text and "honest:" in text
    assert re.search(r"line \d+, contestants\[2\]\.tuning_trials: 200", text)
    assert "tuning budgets differ" in page.read_text()
    code, text = command(capsys, path, "--strict", "--json")
    data = json.loads(text)
    assert code == 1 and data["findings"][0]["kind"] == "unequal-tuning"
    assert data["findings"][0]["evidence"][0]["line"] > 1
