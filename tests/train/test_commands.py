"""`paceline train`, `check` and `bench`: mistakes are one line and exit code 2; what they print is what was
asked for.
"""

import json
import subprocess
import sys

import pytest

from paceline.cli import main
from paceline.train.asynchronous import strategies
from paceline.train.record import Record
from paceline.train.strategies import make, words


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_mistakes(capsys, tmp_path):
    assert "did you mean 'digits-cnn'" in refused(capsys, "train", "--task", "digit-cnn")
    assert "no run at" in refused(capsys, "check", str(tmp_path / "nothing"))
    assert "whole numbers separated by commas" in refused(capsys, "bench", "strategies", "--hosts", "two")
    assert "unknown unit" in refused(capsys, "bench", "collectives", "--link", "3 parsec/s")
    assert "vgg-like" in refused(capsys, "bench", "strategies", "--model", "vgg")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--strategy", "overlp"], "unknown strategy 'overlp'; did you mean 'overlap'?"),
        (["--strategy", "ddp,nosuch"], "unknown strategy 'nosuch'; known: ddp"),
        (["--strategy", "overlap:fc=nope"], "fc must be auto, gradient, rows, factors; got 'nope'"),
        (["--strategy", "overlap:lest_bytes=1"], "did you mean 'least_bytes'"),
        (["--strategy", "priority:most_bytes=many"], "most_bytes must be a whole number; got 'many'"),
        (["--strategy", "lazy:adapt=3"], "adapt must be true or false; got '3'"),
        (["--strategy", "terngrad:clip=-1"], "clip must be 0 or more; got -1"),
        (["--strategy", "dgc:ratio=7"], "ratio must be above 0, up to 1; got 7"),
        (["--strategy", "local:period=0"], "period counts from 1"),
        (["--strategy", "auto:loss=much"], "loss must be none, rounding, some"),
        (["--strategy", "ddp:bucket_cap=3"], "did you mean 'bucket_cap_mb'"),
        (["--strategy", "ps-async:servrs=2"], "did you mean 'servers'"),
        (["--strategy", "ps-backup:backups=2"], "at most 1 can be backups"),
        (["--strategy", "ps-async:up=zip"], "unknown codec 'zip'"),
        (["--strategy", "gossip:period=0"], "counts from 1"),
        (["--strategy", "tp=x"], "tp must be a whole number"),
        (["--strategy", "fsdp pp=2"], "run it with paceline.train.Pipeline"),
        (["--optimizer", "lar"], "did you mean 'lars'"),
        (["--lr", "-1"], "must be positive"),
        (["--batch", "1"], "cannot be shared by 2 ranks"),
        (["--every", "0"], "count from 1"),
    ],
)
def test_no_rank_is_started_for_a_mistake(capsys, tmp_path, monkeypatch, arguments, said):
    pytest.importorskip("sklearn")

    def started(*_, **__):
        raise AssertionError("a rank was started")

    monkeypatch.setattr(subprocess, "Popen", started)
    folders = [
        "--record",
        str(tmp_path / "record"),
        *([] if "," in arguments[1] else ["--checkpoint", str(tmp_path / "saved")]),
    ]
    assert said in refused(capsys, "train", *arguments, *folders)
    assert not list(tmp_path.iterdir())


def test_options_in_words_reach_the_strategy():
    made = make("overlap:fc=rows,most_bytes=100000,clip_norm=1")
    assert (made.fc, made.most_bytes, made.clip_norm) == ("rows", 100000, 1)
    assert make("lazy:adapt=false,share=0.5", share=0.25).share == 0.25 and not make("lazy:adapt=False").adapt
    assert words("ps-async", "servers=2, overlap=true", strategies()["ps-async"], 2) == {
        "servers": 2,
        "overlap": True,
    }


def test_a_board_needs_a_folder_and_tensorboard(capsys, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    assert "name one with --record" in refused(capsys, "train", "--board")
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as where it is not installed
    assert "paceline[board]" in refused(capsys, "train", "--board", "--record", str(tmp_path))


def recorded(folder, strategy):
    with Record(folder) as log:
        log.write("run", task="t", strategy=strategy, world=2)
        log.write("predicted", seconds={"forward": 0.1, "backward": 0.2, "update": 0.01, "step": 0.31})
        for step in range(1, 11):
            log.write("step", step=step, loss=1.0, forward_s=0.1, backward_s=0.2, update_s=0.01, step_s=0.31)


def printed(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


def test_check_prints_both(capsys, tmp_path):
    recorded(tmp_path, "overlap")
    found = json.loads(printed(capsys, "check", str(tmp_path), "--json"))
    assert (
        found["error"] == pytest.approx(0)
        and found["steps"] == 5
        and found["title"].startswith("t, overlap, 2 ranks")
    )


def test_check_takes_a_folder_of_several_runs(capsys, tmp_path):
    for strategy in ("overlap", "dgc"):
        recorded(tmp_path / f"{strategy}-0", strategy)
    assert [
        one["title"].split(",")[1] for one in json.loads(printed(capsys, "check", str(tmp_path), "--json"))
    ] == [" dgc", " overlap"]
    assert all(name in printed(capsys, "check", str(tmp_path)) for name in ("dgc", "overlap"))
