"""`whatif`, `explain`, `compare` and whole jobs on the command line; views, plots and pages."""

import io
import json
import re

import pytest

pytest.importorskip("torch", reason="capture needs torch")

from rich.console import Console

from paceline.cli import main
from paceline.errors import MissingExtra, SpecError
from paceline.report import page, plots
from paceline.whatif.change import change
from paceline.whatif.compare import compare
from paceline.whatif.explain import explain
from paceline.whatif.subject import Subject
from paceline.whatif.sweep import sweep

SMALL = ["resnet18", "--cluster", "2xp100-node-10gbe", "--batch", "4", "--image", "64"]
GPT = ["gpt3-1.3b", "--cluster", "4xdgx-a100", "--plan", "tp=2 gbs=64"]


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert not stopped.value.code
    return capsys.readouterr().out


def fails(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 2
    text = capsys.readouterr().err.strip()
    assert "\n" not in text and text.startswith("paceline: ")
    return text


@pytest.fixture(scope="module")
def subject():
    return Subject.of("resnet18", "2xp100-node-10gbe", "ddp", batch=4, image=64)


def test_whatif(capsys):
    shown = run(capsys, "whatif", *GPT, "--set", "network.inter.bandwidth=800Gb/s", "--set", "nodes=8")
    assert (
        "network.inter.bandwidth=800Gb/s, nodes=8" in shown
        and "the throughput" in shown
        and "fell by" in shown
    )
    data = json.loads(run(capsys, "whatif", *GPT, "--set", "nodes=8", "--json"))
    assert (
        data["speedup"] == pytest.approx(data["after"]["throughput"] / data["before"]["throughput"])
        and data["reasons"][0]["text"]
    )


def test_sweep(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    shown = run(
        capsys,
        "whatif",
        *SMALL,
        "--plan",
        "overlap",
        "--sweep",
        "nodes=1..4",
        "--plot",
        str(tmp_path / "s.png"),
    )
    assert "weak scaling" in shown and "efficiency" in shown
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads(run(capsys, "whatif", *SMALL, "--sweep", "nodes=1..4", "--json"))
    assert [p["devices"] for p in data["points"]] == [4, 8, 16] and data["scaling"]["naive"]


def test_explain(capsys):
    shown = run(capsys, "explain", *SMALL)
    for words in (
        "if it had no limit",
        "elasticities add up to",
        "roofline",
        "BSP: w + h g + s l",
        "average parallelism",
        "a device draws",
    ):
        assert words in shown
    data = json.loads(run(capsys, "explain", *GPT, "--json"))
    assert (
        data["bottlenecks"][0]["saved_s"] > 0
        and data["anatomy"]["roofline"]
        and data["parallelism"]
        and data["prediction"]["step_s"]
    )


def test_compare(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    plans = "ddp,overlap,terngrad,dgc,powersgd,local-sgd,diloco,ps-sync,ps-async,easgd"
    shown = run(
        capsys, "compare", *SMALL, "--plans", plans, "--break-even", "--html", str(tmp_path / "c.html")
    )
    assert (
        all(re.search(rf"^{plan} ", shown, re.MULTILINE) for plan in plans.split(",")) and "pays at" in shown
    )
    written = (tmp_path / "c.html").read_text()
    assert (
        written.startswith("<!doctype html>")
        and "data:image/png;base64," in written
        and "terngrad" in written
        and "<script" not in written
    )
    data = json.loads(run(capsys, "compare", *SMALL, "--plans", "ddp,terngrad", "--json"))
    assert data["best"] in ("ddp", "terngrad") and data["rows"][1]["accuracy"]["source"]


@pytest.mark.parametrize(
    ("plans", "headline", "names"),
    [
        ("ddp,fsdp", "seq=1024 bf16", ["ddp", "fsdp"]),
        ("ddp seq=512,fsdp", "bf16", ["ddp seq=512", "fsdp seq=1024"]),
        ("ddp fp32,fsdp", "seq=1024", ["ddp fp32", "fsdp bf16"]),
        ("ddp seq=512 fp32,fsdp", "", ["ddp seq=512 fp32", "fsdp seq=1024 bf16"]),
    ],
)
def test_what_plans_share_is_in_the_headline_and_the_rest_in_their_rows(capsys, plans, headline, names):
    first, _, *rows = run(capsys, "compare", "gpt2", "--cluster", "1xdgx-h100", "--plans", plans).splitlines()
    said = first.split(" on dgx-h100")[1]
    assert said.strip() == (f": {headline}" if headline else "")
    assert [row.partition("  ")[0] for row in rows] == names


def test_whole_jobs(capsys):
    shown = run(capsys, "predict", *GPT, "--tokens", "300G", "--price", "2USD/h")
    for words in ("time to train", "goodput", "device-hours", "USD", "Wh", "interrupted every"):
        assert words in shown
    data = json.loads(run(capsys, "predict", *SMALL, "--epochs", "90", "--json"))
    assert data["job"]["steps"] > 0 and data["step_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["whatif", *GPT], "--set field=value"),
        (["whatif", *GPT, "--set", "nodez=2"], "did you mean 'nodes'"),
        (["whatif", *GPT, "--strong"], "--sweep"),
        (["whatif", *GPT, "--set", "nodes=2", "--plot", "x.png"], "--plot goes with --sweep"),
        (["compare", *GPT, "--plans", ","], "at least one plan"),
        (["whatif", *GPT, "--sweep", "nodes=4..1"], "a sweep goes from"),
        (["predict", *GPT, "--tokens", "some"], "tokens"),
        (["predict", *GPT, "--price", "2USD/h"], "needs --tokens or --epochs"),
        (["predict", "resnet18", "--device", "h200", "--epochs", "1"], "--cluster"),
        (["explain", "resnet18"], "cluster"),
        (["whatif", *SMALL, "--sweep", "nodes=1,2", "--plot", "x.txt"], "written as .png"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, words):
    assert words in fails(capsys, *arguments)


def test_from_python():
    from paceline import whatif

    subject = whatif.Subject.of("resnet18", "2xp100-node-10gbe", "ddp", batch=4, image=64)
    assert whatif.change(subject, ["network.inter.bandwidth=40Gb/s"]).speedup > 1
    assert whatif.compare(subject, ["ddp", "dgc"]).best.plan and whatif.sweep(subject, "nodes=1,2").scaling
    assert whatif.job(subject.predict(), subject.cluster, whatif.Budget(epochs=1)).steps > 0
    assert all(hasattr(whatif, name) for name in whatif.__all__)


# -- plots -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answers(subject):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    return {
        "scaling": sweep(subject, "nodes=1..4"),
        "sweep": sweep(subject, "network.inter.bandwidth=1Gb/s..40Gb/s"),
        "words": sweep(subject, "compress=dgc,fp16"),
        "roofline": explain(subject),
        "comparison": compare(subject, ["ddp", "overlap", "ps-sync"]),
    }


@pytest.mark.parametrize("kind", ["scaling", "sweep", "words", "roofline", "comparison"])
def test_axes_are_honest(answers, kind):
    """An axis is named, and starts at zero or says that it is logarithmic; predictions have their
    interval.
    """
    axes = plots.figure(answers[kind]).axes[0]
    value, name = (
        (axes.get_xlim()[0], axes.get_xlabel())
        if kind == "comparison"
        else (axes.get_ylim()[0], axes.get_ylabel())
    )
    scale = axes.get_xscale() if kind == "comparison" else axes.get_yscale()
    assert name and ("log scale" in name if scale == "log" else value == 0)
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert kind in ("roofline", "comparison") or "90 % interval" in legend
    assert axes.get_title()


def test_lines_of_a_scaling_plot_are_the_data(answers):
    drawn = plots.figure(answers["scaling"]).axes[0].get_lines()
    curve = answers["scaling"].scaling
    assert [tuple(line.get_ydata()) for line in drawn[:3]] == [curve.throughput, curve.ideal, curve.naive]


def test_without_matplotlib_the_extra_is_named(answers, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"paceline\[plots\]"):
        plots.figure(answers["sweep"])


def test_files_that_cannot_be_written(answers, tmp_path):
    with pytest.raises(SpecError, match="cannot write plot"):
        plots.save(answers["sweep"], tmp_path / "none" / "x.png")
    with pytest.raises(SpecError, match="cannot write page"):
        page.write(tmp_path / "none" / "x.html", "")


def test_views_fit_a_terminal(answers, subject):
    console = Console(width=120, record=True, file=io.StringIO())
    for answer in (*answers.values(), change(subject, ["nodes=4"])):
        console.print(answer)
    text = console.export_text()
    assert "nan" not in text.replace("resnet", "") and "None" not in text
