"""Strategies on emulated links: lines as ranks write them, rows as they are read, and one run end to end."""

import json
import os
import sys
from pathlib import Path

import pytest

import paceline
from paceline.bench.emulate.cluster import _split
from paceline.bench.strategies import best_link, compare, predict, read

FACTS = {
    "kind": "facts", "model": "cnn", "batch": 16, "hosts": 2, "cores": 4, "on": "four cores",
    "machine": {"latency_s": 3e-4, "link_Bps": 1e9, "reduce_Bps": 8e8, "flops": 1e11},
    "rates": {"encode_s": {"dgc": 1e-9}, "decode_s": {"dgc": 1e-9}, "encode_call_s": {}, "decode_call_s": {}, "copy_s": 4e-10},
    "profile": {"forward_s": 0.05, "backward_s": 0.1, "update_s": 0.01, "momentum": True, "layers": [
        {"name": f"{i}.weight", "shape": [1024, 512], "need_s": 0.005 * i, "ready_s": 0.1 - 0.01 * i, "rows": 0} for i in range(10)]},
}


def lines(*steps):
    common = {"kind": "step", "model": "cnn", "batch": 16, "hosts": 2, "steps": 3, "cpu_s": 0.1, "sent_bytes": 2e7, "note": ""}
    return "\n".join(json.dumps(line) for line in (FACTS, *({**common, **step} for step in steps)))


def test_rows_are_the_median_of_rounds_and_predicted_from_the_facts(tmp_path):
    file = tmp_path / "lines.jsonl"
    expected = predict(FACTS, ("ddp", "dgc"), 2, 12.5e6)
    file.write_text(lines(*(
        {"link_Bps": 12.5e6, "strategy": name, "turn": turn, "step_s": expected[name] * factor}
        for name, factors in (("ddp", (1.0, 1.2)), ("dgc", (1.0, 1.0))) for turn, factor in enumerate(factors))))
    found = read([file])
    ddp, dgc = found.rows
    assert ddp.step_s == pytest.approx(1.1 * expected["ddp"]) and ddp.predicted_s == expected["ddp"] and ddp.link == "100 Mbit/s"
    assert found.error() == pytest.approx((1 - 1 / 1.1) / 2) and found.ranked() == 1.0
    assert found.base_s(dgc) == ddp.step_s and found.machine == "four cores"
    assert found.to_dict()["rows"][0]["step_s"] == ddp.step_s


def test_the_best_link_is_where_overlap_gains_most():
    link = best_link(FACTS, 2)

    def gain(rate):
        found = predict(FACTS, ("ddp", "overlap"), 2, rate)
        return found["ddp"] / found["overlap"]

    assert gain(link) > 1.1
    assert all(gain(link) >= 0.999 * gain(rate) for rate in (2.5e6, 12.5e6, 60e6, 125e6))
    # communication takes about four times the forward pass, as the paper says
    assert 2 < 20.97e6 / link / FACTS["profile"]["forward_s"] < 8


def test_the_model_follows_the_rows_that_ship():
    found = read([Path(paceline.__file__).parent / "bench" / "data" / "emulated_steps.jsonl"])
    assert found.error() < 0.11 and found.ranked() > 0.95
    by = {(row.model, row.strategy, row.link_Bps): row for row in found.rows}
    for model in ("cnn", "vgg-like"):
        assert by[model, "ddp", 12.5e6].step_s > 8 * by[model, "terngrad", 12.5e6].step_s
        assert by[model, "ddp", 12.5e6].step_s > 15 * by[model, "dgc", 12.5e6].step_s
    assert all(row.step_s <= 1.05 * found.base_s(row) for row in found.rows if row.strategy == "overlap")


def test_hosts_share_the_cores_out():
    assert _split(range(16), 3) == [range(5), range(5, 10), range(10, 15)]
    assert _split([4, 5], 3) == []


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs the right to make network namespaces")
def test_a_run_end_to_end(tmp_path):
    pytest.importorskip("pyroute2")
    output = tmp_path / "lines.jsonl"
    found = compare(model="mlp", strategies=("none", "dgc"), links=(None, 12.5e6), seconds=0.05, rounds=1, batch=4, output=output, timeout_s=200)
    assert [(row.strategy, row.link) for row in found.rows] == [(s, link) for s in ("none", "dgc") for link in ("unshaped", "100 Mbit/s")]
    for row in found.rows:
        assert row.step_s > 0 and row.predicted_s > 0 and (row.sent_bytes > 20_000) == (row.strategy == "dgc")
    assert json.loads(output.read_text().splitlines()[0])["kind"] == "facts"
