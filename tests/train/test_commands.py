"""`paceline train`, `check` and `bench`: mistakes are one line and exit code 2; what they print is what was asked for."""

import json
import sys

import pytest

from paceline.cli import main
from paceline.train.record import Record


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


def test_a_board_needs_a_folder_and_tensorboard(capsys, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    assert "name one with --record" in refused(capsys, "train", "--board")
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as where it is not installed
    assert "paceline[board]" in refused(capsys, "train", "--board", "--record", str(tmp_path))


def test_check_prints_both(capsys, tmp_path):
    with Record(tmp_path) as log:
        log.write("run", task="t", strategy="overlap", world=2)
        log.write("predicted", seconds={"forward": 0.1, "backward": 0.2, "update": 0.01, "step": 0.31})
        for step in range(1, 11):
            log.write("step", step=step, loss=1.0, forward_s=0.1, backward_s=0.2, update_s=0.01, step_s=0.31)
    with pytest.raises(SystemExit) as ended:
        main(["check", str(tmp_path), "--json"])
    assert ended.value.code in (0, None)
    found = json.loads(capsys.readouterr().out)
    assert found["error"] == pytest.approx(0) and found["steps"] == 5 and found["title"].startswith("t, overlap, 2 ranks")
