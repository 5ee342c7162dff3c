"""TPUs: vector units of thousands of lanes, whole steps compiled by XLA, checked against published training
steps.
"""

from dataclasses import replace

import pytest

import paceline as pl
from paceline.catalog import clusters, devices, transformers
from paceline.predict import simulated
from paceline.predict.distributed import default_framework
from paceline.spec.plan import Plan
from paceline.spec.transformer import Transformer

#: share of the peak that MaxText's README gave for dense models in 2023 and 2024, on one slice
MAXTEXT = {"tpu-v4": 0.567, "tpu-v5e": 0.611}
#: a dense decoder of 22e9 parameters
DENSE = Transformer(name="dense-22b", layers=48, hidden=6144, heads=48, ffn=24576, vocab=32768, tied=False)


@pytest.mark.parametrize("name", MAXTEXT)
def test_dense_models_reach_published_shares_of_the_peak(name):
    cluster = replace(clusters.get("1xtpu-v4-pod"), device=devices.get(name), nodes=16)
    plan = Plan.parse("fsdp gbs=256 mbs=4 seq=2048 recompute=full")
    assert simulated.predict(DENSE, cluster, plan).mfu == pytest.approx(MAXTEXT[name], rel=0.2)


#: seconds per step of Llama 3.1 70B at 8,192 tokens: AI-Hypercomputer/tpu-recipes, training/ironwood
@pytest.mark.parametrize(
    ("nodes", "gbs", "precision", "seconds"),
    [(16, 256, "bf16", 12.2), (16, 256, "fp8", 7.93), (64, 1024, "bf16", 12.27)],
)
def test_llama_on_ironwood(nodes, gbs, precision, seconds):
    cluster = clusters.get(f"{nodes}xtpu-v7x-pod")
    plan = Plan.parse(f"fsdp gbs={gbs} mbs=4 seq=8192 recompute=selective {precision}")
    found = simulated.predict(transformers.get("llama3-70b"), cluster, plan)
    assert found.step_s == pytest.approx(seconds, rel=0.2)
    assert found.step_s_low < seconds < found.step_s_high


@pytest.mark.parametrize("name", ["tpu-v4", "tpu-v5e", "tpu-v5p"])
def test_a_captured_step_is_compiled_whole(name):
    workload = pl.capture("gpt2", batch=8, seq=1024, precision="bf16")
    found = pl.predict(workload, name)
    assert found.host_s == 0 and found.bound_by != "host" and found.mfu > 0.25
    assert any("one program" in evidence.what for evidence in found.provenance)
    again = pl.predict(workload, cluster=f"1x{name}")
    assert again.step_s == pytest.approx(found.step_s, rel=1e-9)


def test_the_default_framework_of_a_tpu_is_jax():
    assert default_framework(Plan.parse("tp=2"), devices.get("tpu-v5p")) == "jax"
    assert default_framework(Plan.parse("tp=2"), devices.get("h100-sxm")) == "megatron-core"
