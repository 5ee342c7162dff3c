"""Answers leave out what is not there, bars are full, COLUMNS is honoured, exit codes say what fits."""

import json
import re

import pytest
from rich.console import Console

import paceline as pl
from paceline import cli
from paceline.report import html, terminal
from paceline.report.sched import _gantt
from paceline.report.training import checked
from paceline.spec.prediction import Memory

TIGHT = ("gpt3-175b", "--cluster", "1xdgx-h100")
ROOMY = ("gpt2", "--cluster", "1xdgx-h100")


def run(*words):
    """The exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    return ended.value.code or 0


def shown(thing, width=200):
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(thing)
    return captured.get()


@pytest.mark.parametrize(("words", "said"), [("gbs=8", False), ("gbs=8 recompute=full", True)])
def test_recomputation_is_named_where_there_is_some(words, said):
    found = pl.predict("gpt2", cluster="1xdgx-h100", plan=words)
    for text in (shown(found), html.distributed_html(found)):
        assert ("with recomputation" in text) == said and f"{100 * found.mfu:.1f} % of peak" in text


def test_no_time_at_all_is_none():
    seconds = {"forward": 0.1, "waiting": 0.0}
    table = shown(checked("", "", list(seconds), seconds, seconds))
    assert re.search(r"waiting\W+none\W+none", table) and "0 ns" not in table
    assert "0 ns" not in _gantt([("job", 0.0, 100.0, ((0, 1),))], [1])


@pytest.mark.parametrize("unit", [1, 1_000, 1_000_000])
def test_the_bar_of_what_does_not_fit_is_full(unit):
    kinds = {"parameters": 349 * unit, "gradients": 698 * unit, "optimizer": 2095 * unit, "workspace": 1}
    peak = sum(kinds.values())
    for reserved in (peak, 2 * peak):
        found = Memory(
            peak_bytes=peak, reserved_bytes=reserved, by_kind=kinds, available_bytes=84, peak_at=""
        )
        bar = terminal._memory_bar(found)[0].plain
        assert set(bar) == {"█"} and len(bar) == 48
    kinds = {"gradients": 25, "optimizer": 25}
    half = Memory(peak_bytes=50, reserved_bytes=60, by_kind=kinds, available_bytes=100, peak_at="")
    assert terminal._memory_bar(half)[0].plain == "█" * 24 + "░" * 24


@pytest.mark.parametrize(
    ("columns", "width"), [("60", 60), ("", 160), ("wide", 160), ("0", 160), (None, 160), ("300", 300)]
)
def test_piped_output_is_as_wide_as_columns_says(columns, width, monkeypatch, capsys):
    from paceline.cli.options import show

    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    show("x " * 400)
    assert width - 2 <= max(len(line) for line in capsys.readouterr().out.splitlines()) <= width


@pytest.mark.parametrize(
    "words",
    [
        ("predict", *TIGHT, "--plan", "gbs=8"),
        ("predict", "alexnet", "--device", "t4", "--batch", "65536"),
        ("predict", *TIGHT, "--plan", "gbs=8", "--tokens", "1B"),
        ("compare", *ROOMY, "--plans", "gbs=8,gbs=65536 mbs=8192"),
    ],
)
def test_what_does_not_fit_ends_with_code_1_where_it_has_to(words, capsys):
    assert run(*words) == 0
    plain = capsys.readouterr()
    assert "does not fit" in plain.out
    assert run(*words, "--require-fit") == 1
    assert capsys.readouterr() == plain
    assert run(*words, "--require-fit", "--json") == 1
    json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "words", [("predict", *ROOMY, "--plan", "gbs=8"), ("compare", *ROOMY, "--plans", "gbs=8,gbs=16")]
)
def test_what_fits_ends_with_code_0(words):
    assert run(*words, "--require-fit") == 0


def test_a_search_in_which_nothing_fits_ends_with_code_1_where_it_has_to(capsys):
    words = ("plan", *TIGHT, "--gbs", "8", "--forbid", "offload", "--fix", "dp=8")
    assert run(*words) == 2
    plain = capsys.readouterr()
    assert "no plan for gpt3-175b fits" in plain.err
    assert run(*words, "--require-fit") == 1
    assert capsys.readouterr() == plain
    assert run("plan", *TIGHT, "--gbs", "8", "--fix", "tp=7", "--require-fit") == 2
    assert "fits" not in capsys.readouterr().err


def test_help_says_which_code_it_is(capsys):
    for command in ("predict", "plan", "compare"):
        run(command, "--help")
        text = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert "--require-fit" in text and "exit with code 1" in text
