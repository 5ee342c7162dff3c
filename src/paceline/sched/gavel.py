"""Jobs with the throughputs that Gavel (OSDI 2020) measured on K80, P100 and V100."""

from __future__ import annotations

import ast
import json
import random
from collections import defaultdict
from pathlib import Path

from paceline.errors import DataError
from paceline.sched.job import Job
from paceline.sched.speed import RateTable
from paceline.sched.traces import Trace
from paceline.spec.tables import csv_rows, text_lines

#: what Gavel calls a kind -> our catalog
KINDS = {"k80": "k80", "p100": "p100-sxm", "v100": "v100-sxm-16gb"}
#: mean seconds between arrivals, as in one of Gavel's studies
GAP_S = 700.0


def throughputs(path: Path) -> dict[str, dict[str, dict[int, float]]]:
    """Model -> kind -> devices -> steps per second, alone on its devices and placed together."""
    try:
        data = json.loads("".join(text_lines(path)))
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not JSON: {error.msg}") from None
    out: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for kind, table in data.items():
        if kind in KINDS:
            for key, row in table.items():
                model, devices = ast.literal_eval(key)
                if row.get("null"):
                    out[model][KINDS[kind]][int(devices)] = float(row["null"])
    return {model: dict(by_kind) for model, by_kind in out.items() if len(by_kind) == len(KINDS)}


def read(speeds: Path, lengths: Path, count: int, seed: int) -> Trace:
    """`count` jobs: model and length drawn, devices as in Philly, arrivals Poisson."""
    draw = random.Random(seed)
    models = throughputs(speeds)
    rows = [
        (float(row["duration_s"]), int(float(row["num_gpus"])))
        for row in csv_rows(lengths, ("duration_s", "num_gpus"))
    ]
    jobs, now_s = [], 0.0
    for i in range(count):
        now_s += draw.expovariate(1 / GAP_S)
        model = draw.choice(sorted(models))
        rates = models[model]
        seconds, devices = draw.choice(rows)
        most = min(max(table) for table in rates.values())
        devices = max((n for n in rates[KINDS["v100"]] if n <= min(devices, most)), default=1)
        jobs.append(
            Job(
                name=f"gavel-{i}",
                submit_s=now_s,
                work=max(seconds, 60.0) * rates[KINDS["v100"]][devices],
                speed=RateTable(rates),
                devices=devices,
                least=1,
                most=most,
                powers_of_two=True,
                tenant=model,
            )
        )
    kinds = "+".join(f"36x1x{kind}" for kind in KINDS.values())
    return Trace(name="gavel", jobs=tuple(jobs), cluster=kinds)
