"""The scoreboard: that it counts every row, and that the numbers it gives hold."""

from __future__ import annotations

import csv
import gzip
import json
import os
import statistics
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest

from paceline.bench.validate import board, run
from paceline.bench.validate.score import Score
from paceline.bench.validate.sets import SETS
from paceline.errors import DataError, UnknownName

DATA = os.environ.get("PACELINE_DATA")
needs_data = pytest.mark.skipif(
    not DATA, reason="PACELINE_DATA names no folder with the measurement sets that do not ship"
)


def by_metric(scores: list[Score]) -> dict[str, Score]:
    return {score.metric: score for score in scores}


@pytest.fixture(scope="module")
def h200_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Score], Path]:
    rows = tmp_path_factory.mktemp("validate") / "rows.csv"
    return by_metric(run(["h200_steps"], rows_file=rows)), rows


@pytest.fixture(scope="module")
def h200_ops() -> dict[str, Score]:
    return by_metric(run(["h200_ops"]))


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "median", "mean"), [("kernel_s", 6, 10), ("step_s", 8, 14), ("peak_bytes", 4, 4)]
)
def test_steps_on_an_h200(
    h200_steps: tuple[dict[str, Score], Path], metric: str, median: float, mean: float
) -> None:
    score = h200_steps[0][metric]
    assert score.median_abs_pct <= median
    assert score.mean_abs_pct <= mean
    assert 85 <= score.coverage_pct <= 97


@pytest.mark.parametrize("metric", ["gemm_s", "memory_bound_s"])
def test_operators_on_an_h200(h200_ops: dict[str, Score], metric: str) -> None:
    assert h200_ops[metric].median_abs_pct <= 6
    assert h200_ops[metric].mean_abs_pct <= 10


def test_better_than_a_constant_efficiency(
    h200_steps: tuple[dict[str, Score], Path], h200_ops: dict[str, Score]
) -> None:
    for score in (*h200_steps[0].values(), *h200_ops.values()):
        assert score.mean_abs_pct < 0.6 * score.naive_mean_abs_pct


def test_networks_of_2017() -> None:
    score = by_metric(run(["tf_cnn_benchmarks_2017"]))["step_s"]
    assert score.rows == 37
    assert score.mean_abs_pct <= 15
    assert 85 <= score.coverage_pct <= 97
    assert not score.skipped


@needs_data
def test_transformers_on_devices_left_out_of_the_fit() -> None:
    (score,) = run(["neusight_fp32_training"], Path(DATA or ""), leave_out_device=True)
    assert score.mean_abs_pct <= 12
    assert score.rows == 26


@needs_data
def test_a_sample_of_vision_models_on_an_rtx3090() -> None:
    cases = SETS["timm_train_rtx3090"](Path(DATA or ""), False)
    assert cases is not None
    errors = []
    for case in islice(cases, 7, None, 67):
        with suppress(UnknownName):  # a model that the package no longer has
            assert case.predict is not None
            errors.append(abs(case.predict()["step_s"].value / case.measured["step_s"] - 1))
    assert len(errors) >= 14
    assert statistics.mean(errors) <= 0.15


# -- behaviour -------------------------------------------------------------------------------------


def test_every_row_is_predicted_or_accounted_for(h200_ops: dict[str, Score]) -> None:
    score = h200_ops["op_s"]
    reasons = {reason.split(":")[0]: count for reason, count in score.skipped.items()}
    assert reasons == {"h2d": 4, "d2h": 4, "device": 1, "launch": 1}
    assert score.rows == sum(h200_ops[m].rows for m in ("gemm_s", "memory_bound_s", "attention_s", "conv_s"))


def test_rows_are_written_with_their_predictions(h200_steps: tuple[dict[str, Score], Path]) -> None:
    scores, path = h200_steps
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert len(rows) == sum(score.rows for score in scores.values())
    errors = [abs(float(r["error_pct"])) for r in rows if r["metric"] == "kernel_s"]
    assert statistics.median(errors) == pytest.approx(scores["kernel_s"].median_abs_pct)
    assert all(float(r["low"]) < float(r["predicted"]) < float(r["high"]) for r in rows)


def test_the_board_is_plain_data(h200_ops: dict[str, Score]) -> None:
    entry = json.loads(json.dumps(board(list(h200_ops.values()))))["sets"][0]
    assert {
        "set",
        "metric",
        "rows",
        "skipped",
        "mean_abs_pct",
        "median_abs_pct",
        "p90_abs_pct",
        "bias_pct",
        "coverage_pct",
        "naive",
    } <= entry.keys()
    assert entry["naive"].keys() == {"mean_abs_pct", "median_abs_pct"}


def test_any_part_of_a_folder_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "ops.jsonl").write_text(
        '{"op": "gemm", "dtype": "bf16", "m": 4096, "n": 4096, "k": 4096, "s": 2e-4}\n'
    )
    assert {score.set for score in run([], tmp_path)} == {"h200_ops"}
    with pytest.raises(DataError, match="'kernels' is not in"):
        run(["kernels"], tmp_path)


def test_a_row_that_cannot_be_predicted_is_counted(tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "neusight_fp32_training.csv").write_text(
        "device,model,mode,seq,batch,variant,num_layer,e2e_ms,fwd_ms,bwd_ms\n"
        "Unheard_Of_GPU,bert_large,train,512,2,,24,100,30,70\n"
        "Tesla_T4,unheard_of_model,train,512,2,,24,100,30,70\n"
        "Tesla_T4,bert_large,train,512,2,dp4,24,100,30,70\n"
    )
    (score,) = run(["neusight_fp32_training"], tmp_path)
    assert score.rows == 0
    assert sum(score.skipped.values()) == 3
    assert board([score])["sets"][0]["mean_abs_pct"] is None


def test_an_unknown_set_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match="neusight_fp32_training"):
        run(["neusight_fp32_trainin"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("ops.jsonl", b'{"op": "gemm"\n', "line 1: not valid JSON"),
        ("ops.jsonl.gz", b"not compressed", "cannot read"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        run(["h200_ops"], tmp_path)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    with gzip.open(tmp_path / "kernels" / "add.csv.gz", "wt") as f:
        f.write("Device,OPName,B,H\nTesla T4,add,1,2\n")
    with pytest.raises(DataError, match="no column 'Latency'"):
        run(["kernels"], tmp_path)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no folder"):
        run([], tmp_path / "nowhere")
