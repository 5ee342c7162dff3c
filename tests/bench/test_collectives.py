"""Collectives against the measurements that ship."""

import pytest

from paceline.bench import collectives
from paceline.bench.validate import run
from paceline.bench.validate.score import files


@pytest.fixture(scope="module")
def rows():
    return list(collectives.published(files("paceline.bench") / "data"))


def test_scores():
    scores = {score.metric: score for score in run(["collectives_busbw"])}
    large = scores["busbw"]
    assert large.rows > 100 and large.median_abs_pct < 10 and large.mean_abs_pct < 15
    assert 85 <= large.coverage_pct <= 97
    assert scores["busbw_small"].median_abs_pct < 15


def test_rows_that_are_no_target_say_why(rows):
    why = {row.skip for row in rows if row.skip}
    assert why <= {
        "network known to be misconfigured or degraded",
        "device not stated",
        "network not stated",
        "time not given",
    }
    assert all(row.skip for row in rows if "misconfigured" in row.system or "degraded" in row.system)


def test_clusters_from_columns(rows):
    by_system = {row.system: row for row in rows if row.cluster}
    rack = by_system["coreweave_gb200_144"]
    assert (
        rack.group.members == (72, 144)
        and "nvls" in rack.cluster.tiers[0].features
        and "sharp" in rack.cluster.tiers[1].features
    )
    assert by_system["oci_gb200_128"].group.members == (64, 128)
    assert by_system["mi355x_8"].library == "rccl" and by_system["mi355x_8_alltoall"].op == "all_to_all"


def test_absent_folder(tmp_path):
    assert (
        collectives.published(tmp_path) is None
        and collectives.fp16(tmp_path) is None
        and collectives.gloo(tmp_path) is None
    )


def test_other_readers(tmp_path):
    folder = tmp_path / "kernels_fp16" / "gh200"
    folder.mkdir(parents=True)
    (folder / "nccl_allreduce_fp16_2_1.csv").write_text(
        "shape,nodes,GPUsPerNode,dur(us)\n20971520,2,1,1020\n"
    )
    (folder / "nccl_allgather_large_fp16_8_1.csv").write_text(
        "shape,nodes,GPUsPerNode,dur(us)\n134217728,8,1,117\n"
    )
    (tmp_path / "h200").mkdir()
    row = '{"kind": "collective", "op": "all_reduce", "world": 4, "bytes": 1048576, "s": 1e-3}'
    (tmp_path / "h200" / "gloo_loopback_16core.jsonl").write_text(row + "\n")
    gather, reduce = collectives.fp16(tmp_path)
    assert gather.skip == "all_gather: faster than the line rate"
    assert reduce.skip is None and reduce.size == 2 * 20971520 and reduce.group.members == (2,)
    (loop,) = collectives.gloo(tmp_path)
    assert loop.group.size == 4 and loop.library == "gloo"
    scores = run(["kernels_fp16_nccl", "gloo_loopback"], tmp_path)
    assert [score.rows for score in scores] == [1, 1]
