"""Rows whose step ended for lack of memory: told apart from those that ran, and called."""

import os
from pathlib import Path

import pytest

from paceline.bench.validate import distributed, run

DATA = os.environ.get("PACELINE_DATA")

ROW = {
    "case_id": "a_1",
    "source_id": "",
    "family": "transformer-lm",
    "model": "GPT",
    "params": "",
    "n_layers": "72",
    "hidden": "14336",
    "heads": "64",
    "kv_heads": "64",
    "ffn_hidden": "57344",
    "vocab": "250880",
    "seq_len": "2048",
    "framework": "Megatron-DeepSpeed",
    "precision": "fp16",
    "gpu": "A100-SXM",
    "gpu_mem_gb": "80",
    "n_gpus": "384",
    "gpus_per_node": "8",
    "inter_node": "",
    "inter_node_gbps_per_node": "400",
    "global_batch": "2048",
    "micro_batch": "2",
    "tp": "8",
    "pp": "6",
    "dp": "8",
    "cp": "1",
    "ep": "1",
    "vpp": "",
    "sharding": "zero1",
    "recompute": "full",
    "options": "",
    "step_time_s": "131.02",
    "peak_mem_gib": "44",
    "inferred_fields": "",
    "notes": "",
}
#: no more than a quarter of the pipeline's stages, without recomputation, and far more samples at once: this
#: cannot fit
FULL = {
    **ROW,
    "pp": "2",
    "dp": "24",
    "micro_batch": "8",
    "global_batch": "1920",
    "recompute": "none",
    "step_time_s": "",
    "peak_mem_gib": "",
}


@pytest.mark.parametrize(
    ("columns", "out"),
    [
        ({}, False),
        ({"notes": "02-20; OOM", "step_time_s": ""}, True),
        ({"options": "out of memory", "step_time_s": ""}, True),
        ({"step_time_s": "OOM"}, True),
        ({"notes": "with 560 GPUs it is OOM"}, False),
        ({"notes": "ZOOM", "step_time_s": ""}, False),
    ],
)
def test_rows_that_ended_without_memory(columns, out):
    assert distributed._out_of_memory({**ROW, **columns}) is out


def called(row):
    case = distributed._row_case(row)
    assert case.skip is None and case.measured["oom"] == 1.0
    return case, case.predict()["oom"].value


def test_a_step_that_ran_is_called_so():
    case, right = called(ROW)
    assert right == 1.0 and set(case.measured) == {"step_s", "peak_bytes", "oom"}


def test_a_step_without_memory_is_called_so():
    case, right = called({**FULL, "notes": "OOM"})
    assert right == 1.0 and set(case.measured) == {"oom"}  # it has no time to be compared with
    assert called({**FULL, "step_time_s": "100"})[1] == 0.0  # had it run, the call would be wrong


def test_a_row_that_leaves_recomputation_open_is_not_called():
    assert "oom" not in distributed._row_case({**ROW, "recompute": ""}).measured


@pytest.mark.skipif(not DATA, reason="PACELINE_DATA names no folder with measurement sets")
@pytest.mark.parametrize(
    "name", ["bloom_prequel_a100_topologies", "torchtitan_llama", "simumax_b200_measured"]
)
def test_memory_stays_within_its_bar(name):
    """5 % (median) where it was measured, and no step that ran called one that does not fit."""
    assert DATA is not None
    scores = {score.metric: score for score in run([name], Path(DATA))}
    assert scores["peak_bytes"].median_abs_pct < 5 and scores["oom"].mean_abs_pct == 0
