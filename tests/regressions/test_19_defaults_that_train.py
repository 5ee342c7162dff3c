"""Defaults that train: `auto` is exact unless told otherwise and says what it took; `signsgd` converges."""

import os
from pathlib import Path

from paceline.train.launch import NOTE, run
from paceline.train.strategies import estimate, make
from paceline.train.tasks.compare import compare

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}


def test_auto_loses_nothing_unless_told_and_says_once_what_it_took(tmp_path):
    first, second = run(
        "workers_19:all_of", world=2, arguments={"folder": str(tmp_path)}, environment=HERE, timeout_s=200
    )
    assert all(not one["said"] for one in second.values())  # rank 0 speaks for all
    assert {name: one["taken"] for name, one in first.items()} == {
        "default": "overlap",
        "some": "dgc",
        "again": "dgc",
        "no longer": "overlap",
        "too short": None,
    }
    exact = f"{NOTE}auto goes on with 'overlap', which is exact; "
    exact += "auto:loss=some also allows lossy compression"
    lossy = f"{NOTE}auto goes on with 'dgc', which is lossy; auto:loss=none keeps gradients exact"
    assert first["default"]["said"] == first["no longer"]["said"] == [exact]
    assert first["some"]["said"] == first["again"]["said"] == [lossy]
    (short,) = first["too short"]["said"]
    assert short.startswith(f"{NOTE}auto ended before it settled") and short.endswith("which are exact")


def test_words_of_auto_say_what_may_be_lost():
    assert make("auto").schemes == () == make("auto:loss=none,watch=3").schemes
    lossy = ("bf16", "fp16", "terngrad", "dgc")
    assert make("auto:loss=some").schemes == estimate.allowed("auto:loss=some") == lossy
    assert estimate.allowed("auto") == estimate.allowed("auto:watch=3") == ()
    assert estimate.allowed("auto:loss=rounding") == ("bf16", "fp16")


def test_signsgd_trains_at_the_rate_of_the_task():
    (row,) = compare("digits-cnn", ["signsgd"], world=2, steps=200).rows
    assert row.accuracy > 0.9  # guessing is right once in ten
