"""Published training steps on many devices, against the bars they are held to."""

import csv
import os
import statistics
from pathlib import Path

import pytest

from paceline.bench import frameworks
from paceline.bench.validate import run
from paceline.bench.validate.distributed import _read, cluster_of
from paceline.errors import SpecError

DATA = os.environ.get("PACELINE_DATA")
#: set -> (mean or median, per cent)
BARS = {
    "vtrain_a100_multi": ("mean", 11),
    "vtrain_a100_single": ("mean", 13),
    "megatron_gpt": ("mean", 6),
    "bloom_prequel_a100_topologies": ("mean", 10),
    "llmfoundry_mpt_throughput": ("median", 11),
    "torchtitan_llama": ("median", 11),
    "dgxc_benchmarking_llm": ("median", 8),
    "nemo_megatron_bridge": ("median", 13),
    "simumax_b200_measured": ("median", 11),
}


@pytest.mark.skipif(not DATA, reason="PACELINE_DATA names no folder with measurement sets")
@pytest.mark.parametrize("name", BARS)
def test_errors_stay_within_their_bars(name):
    assert DATA is not None
    score = next(s for s in run([name], Path(DATA)) if s.metric == "step_s")
    kind, bar = BARS[name]
    assert (
        score.rows > 10
        and getattr(score, f"{kind}_abs_pct") < bar
        and score.mean_abs_pct < score.naive_mean_abs_pct
    )


@pytest.mark.skipif(not DATA, reason="PACELINE_DATA names no folder with measurement sets")
@pytest.mark.parametrize(
    ("name", "bar"),
    [("nemo_megatron_bridge", 10), ("dgxc_benchmarking_llm", 15), ("simumax_b200_measured", 15)],
)
def test_mixtures_of_experts_stay_within_their_bar(name, bar, tmp_path):
    """Per cent, median."""
    assert DATA is not None
    with (Path(DATA) / "published" / f"{name}.csv").open() as f:
        mixtures = {row["case_id"] for row in csv.DictReader(f) if row["family"] == "moe-lm"}
    run([name], Path(DATA), rows_file=tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as f:
        errors = [
            abs(float(r["error_pct"]))
            for r in csv.DictReader(f)
            if r["metric"] == "step_s" and r["row"].split()[0] in mixtures
        ]
    assert len(errors) >= 5 and statistics.median(errors) < bar


ROW = {
    "case_id": "1",
    "family": "transformer-lm",
    "model": "GPT-2 124M",
    "n_layers": "12",
    "hidden": "768",
    "heads": "12",
    "vocab": "50304",
    "seq_len": "1024",
    "framework": "nanoGPT PyTorch 2.0",
    "precision": "bf16",
    "gpu": "A100-SXM",
    "gpu_mem_gb": "40",
    "n_gpus": "1",
    "gpus_per_node": "8",
    "global_batch": "12",
    "micro_batch": "12",
    "tp": "",
    "pp": "",
    "step_time_s": "0.1",
}


def read(**columns):
    return _read({**ROW, **columns})


def test_what_a_row_leaves_out():
    assert read()[2].ranks == 1
    with pytest.raises(SpecError, match="degree"):
        read(n_gpus="8")
    wide = {"n_gpus": "8", "tp": "1", "pp": "1", "global_batch": "96", "micro_batch": ""}
    assert read(**wide, framework="Pax/JAX")[2].mbs == 12
    with pytest.raises(SpecError, match="micro-batch"):
        read(**wide)
    assert read(vocab="", model="GPT-9B")[0].vocab == 50257
    assert read(vocab="", heads="", model="GPT2-124M")[0].heads == 12
    with pytest.raises(SpecError, match="no vocab"):
        read(vocab="", model="Bloom")


def test_activations_that_do_not_fit_are_computed_again():
    wide = {"framework": "Pax/JAX", "n_layers": "48", "hidden": "8192", "heads": "64", "gpu_mem_gb": "80"}
    assert read(**wide, n_gpus="8", tp="8", pp="1", global_batch="1", micro_batch="")[2].recompute == "none"
    assert read(**wide, n_gpus="8", tp="8", pp="1", global_batch="48", micro_batch="")[2].recompute == "full"


@pytest.mark.parametrize(
    ("framework", "precision", "name"),
    [
        ("NeMo Megatron-Bridge 26.06.01 container", "MXFP8", "megatron-bridge-2026"),
        ("NeMo Megatron-Bridge 26.08 container", "BF16", "megatron-bridge"),
        ("NeMo Megatron-Bridge 26.04 container", "MXFP8", "megatron-bridge"),
        ("NeMo/Megatron-Core (DGX Cloud)", "FP8", "nemo"),
    ],
)
def test_the_release_decides_how_experts_run(framework, precision, name):
    row = {**ROW, "family": "moe-lm", "framework": framework, "precision": precision}
    assert frameworks.distributed(row).name == name


def test_rows_describe_their_cluster():
    cluster = cluster_of("a100-sxm-80gb", 64, 8, 1600.0, 8)
    assert (cluster.nodes, cluster.node_devices, len(cluster.tiers)) == (8, 8, 2)
    assert cluster.tiers[1].node_bandwidth_Bps == 200e9
    assert len(cluster_of("gb200", 64, 4, 1600.0, 72).tiers) == 1
    with pytest.raises(SpecError, match="do not fill"):
        cluster_of("a100-sxm-80gb", 12, 8, 1600.0, 8)
