"""What --json prints is JSON: a number that is not finite is null, in every command."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest

import paceline as pl
from paceline import cli
from paceline.cli import options


def strict(text):
    """The value of JSON text; NaN and Infinity, which Python would read, are refused."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_mean_of_no_jobs_is_null(capsys, tmp_path):
    trace = tmp_path / "killed.csv"
    trace.write_text("name,submit_s,devices,seconds,outcome,ends_at\na,0,1,600,killed,0.5\n")
    log = tmp_path / "log.jsonl"
    with pytest.raises(SystemExit) as ended:
        cli.main(
            [
                "simulate",
                "--trace",
                str(trace),
                "--cluster",
                "1x4xv100",
                "-p",
                "srtf",
                "--log",
                str(log),
                "--json",
            ]
        )
    assert not ended.value.code
    [row] = strict(capsys.readouterr().out)["policies"]
    assert row["avg_successful_jct_s"] is None and row["avg_jct_s"] > 0
    assert all(strict(line) for line in log.read_text().splitlines())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_predictions_are_json(value, capsys):
    found = pl.predict("alexnet", "h100-sxm", batch=1)
    phases = {**found.phases, "forward": value}
    options.show_prediction(replace(found, energy_j=value, phases=phases), None, True)
    printed = strict(capsys.readouterr().out)
    assert printed["energy_j"] is None and printed["phases"]["forward"] is None
    assert printed["step_s"] == found.step_s


def test_every_command_prints_json_by_the_same_function():
    for path in Path(cli.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        names = [function.attr for function in called if isinstance(function, ast.Attribute)]
        assert "dumps" not in names, path.name
