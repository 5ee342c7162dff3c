"""What `validate` scores is what users see: each row equals the public call, bit for bit, interval and memory
included.
"""

import csv
import os
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="capture needs torch")

import paceline as pl
from paceline.bench import models
from paceline.bench.validate import distributed, score
from paceline.bench.validate.case import csv_rows, find, json_rows

SHIPPED = Path(score.__file__).parents[1] / "data"
DATA = os.environ.get("PACELINE_DATA")


def rows_of(name, folder, tmp_path):
    path = tmp_path / "rows.csv"
    score.run([name], folder, rows_file=path)
    with path.open(newline="") as file:
        return {
            (r["row"], r["metric"]): tuple(float(r[c]) for c in ("predicted", "low", "high"))
            for r in csv.DictReader(file)
        }


def test_a_step_on_one_device(tmp_path):
    scored = rows_of("h200_steps", SHIPPED, tmp_path)
    row = next(row for row in json_rows(find(SHIPPED / "h200", "steps.jsonl")) if row.get("peak_alloc"))
    name = next(
        name
        for name, metric in scored
        if metric == "peak_bytes" and f" {row['model']} b{row['batch']} {row['precision']}" in name
    )
    p = pl.predict(models.h200_step(row), "h200")
    assert scored[name, "step_s"] == (p.step_s, p.step_s_low, p.step_s_high)
    assert scored[name, "kernel_s"] == (p.kernel_s, p.kernel_s_low, p.kernel_s_high)
    assert scored[name, "peak_bytes"] == (p.peak_bytes, p.memory.peak_low_bytes, p.memory.peak_high_bytes)


@pytest.mark.skipif(not DATA, reason="PACELINE_DATA names no folder with measurement sets")
@pytest.mark.parametrize("name", ["megatron_gpt", "simumax_b200_measured", "bloom_prequel_a100_topologies"])
def test_steps_on_many_devices(name, tmp_path):
    scored = rows_of(name, Path(DATA), tmp_path)
    compared = 0
    for row in csv_rows(Path(DATA) / "published" / f"{name}.csv", distributed._NEEDED):
        title = f"{row['case_id']} {row['model']} {row['gpu']} x{row['n_gpus']} {row['precision']}"
        if (title, "step_s") not in scored:
            continue
        model, cluster, plan, framework = distributed._read(row)
        p = pl.predict(model, plan, cluster, framework=framework)
        assert scored[title, "step_s"] == (p.step_s, p.step_s_low, p.step_s_high)
        if (title, "peak_bytes") in scored:
            held = distributed._held(p.memory, cluster.device, distributed._meter(row))
            assert scored[title, "peak_bytes"] == (held.value, held.low, held.high)
        compared += 1
    assert compared > 10
