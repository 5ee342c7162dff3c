"""Published training steps on many devices, against the bars they are held to."""

import os
from pathlib import Path

import pytest

from paceline.bench.validate import run
from paceline.bench.validate.distributed import cluster_of
from paceline.errors import SpecError

DATA = os.environ.get("PACELINE_DATA")
#: set -> (mean or median, per cent)
BARS = {
    "vtrain_a100_multi": ("mean", 11), "vtrain_a100_single": ("mean", 13), "megatron_gpt": ("mean", 6), "bloom_prequel_a100_topologies": ("mean", 10),
    "llmfoundry_mpt_throughput": ("median", 11), "torchtitan_llama": ("median", 11), "dgxc_benchmarking_llm": ("median", 8),
    "nemo_megatron_bridge": ("median", 13), "simumax_b200_measured": ("median", 11),
}


@pytest.mark.skipif(not DATA, reason="PACELINE_DATA names no folder with measurement sets")
@pytest.mark.parametrize("name", BARS)
def test_errors_stay_within_their_bars(name):
    assert DATA is not None
    score = next(s for s in run([name], Path(DATA)) if s.metric == "step_s")
    kind, bar = BARS[name]
    assert score.rows > 10 and getattr(score, f"{kind}_abs_pct") < bar and score.mean_abs_pct < score.naive_mean_abs_pct


def test_rows_describe_their_cluster():
    cluster = cluster_of("a100-sxm-80gb", 64, 8, 1600.0, 8)
    assert (cluster.nodes, cluster.node_devices, len(cluster.tiers)) == (8, 8, 2)
    assert cluster.tiers[1].node_bandwidth_Bps == 200e9
    assert len(cluster_of("gb200", 64, 4, 1600.0, 72).tiers) == 1
    with pytest.raises(SpecError, match="do not fill"):
        cluster_of("a100-sxm-80gb", 12, 8, 1600.0, 8)
