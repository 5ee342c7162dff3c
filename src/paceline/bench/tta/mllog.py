"""Runs as lines that MLCommons' tools read: `:::MLLOG {...}`, one file a run.

The keys are those of the training rules (mlperf-logging, `training_5.1.0/common.yaml`). A task of ours is no
benchmark of MLPerf, and the files are no submission; they say so in `submission_org` and by the task's name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.bench.tta.outcome import TargetRow, TargetRun, TargetTable

TOKEN = ":::MLLOG "
_POINT, _START, _END = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"


def write(table: TargetTable, folder: Path) -> list[Path]:
    """A file of each run, under the name of its task, contestant and batch."""
    paths = []
    for row in table.rows:
        name = row.contestant.partition(":")[0]
        place = folder / f"{row.task.partition(':')[0]}-{name}-{row.batch}"
        place.mkdir(parents=True, exist_ok=True)
        for run in row.runs:
            path = place / f"result_{run.seed}.txt"
            path.write_text("".join(f"{line}\n" for line in lines(table, row, run)), encoding="utf-8")
            paths.append(path)
    return paths


def lines(table: TargetTable, row: TargetRow, run: TargetRun) -> Iterator[str]:
    """The lines of a run, in the order of their times."""
    start_ms = datetime.fromisoformat(run.started_at).timestamp() * 1e3
    init_ms = start_ms - 1e3 * run.set_up_s
    for key, value in _settings(table, row, run).items():
        yield _line(init_ms, _POINT, key, value)
    yield _line(init_ms, _START, "init_start", None)
    yield _line(start_ms, _END, "init_stop", None)
    yield _line(start_ms, _START, "run_start", None)
    before_ms, samples = start_ms, 0
    for one in run.evaluations:
        end_ms = start_ms + 1e3 * one["seconds"]
        begun_ms = end_ms - 1e3 * one["evaluation_s"]
        block = {"samples_count": samples}
        samples = int(one["step"]) * row.batch
        now = {"samples_count": samples}
        yield _line(before_ms, _START, "block_start", None, block)
        yield _line(begun_ms, _END, "block_stop", None, now)
        yield _line(begun_ms, _START, "eval_start", None, now)
        yield _line(end_ms, _POINT, "eval_accuracy", one["metric"], now)
        yield _line(end_ms, _END, "eval_stop", None, now)
        before_ms = end_ms
    status = "success" if run.reached_s is not None else "aborted"
    ended_ms = start_ms + 1e3 * (run.reached_s if run.reached_s is not None else run.wall_s)
    yield _line(ended_ms, _END, "run_stop", None, {"status": status, "samples_count": samples})


def _settings(table: TargetTable, row: TargetRow, run: TargetRun) -> dict[str, Any]:
    return {
        "cache_clear": False,
        "submission_benchmark": row.task,
        "submission_org": "not a submission",
        "submission_platform": table.machine,
        "submission_division": "open",
        "submission_status": "research",
        "global_batch_size": row.batch,
        "gradient_accumulation_steps": 1,
        "opt_name": row.optimizer,
        "opt_base_learning_rate": run.lr,
        "opt_learning_rate_warmup_steps": table.rules[row.task].warmup,
        "strategy": row.strategy,
        "target_accuracy": table.rules[row.task].target,
        "seed": run.seed,
        "train_samples": run.train_samples,
        "eval_samples": run.eval_samples,
    }


def _line(time_ms: float, kind: str, key: str, value: Any, metadata: dict[str, Any] | None = None) -> str:
    words = {
        "namespace": "",
        "time_ms": int(time_ms),
        "event_type": kind,
        "key": key,
        "value": value,
        "metadata": metadata or {},
    }
    return TOKEN + json.dumps(words)
