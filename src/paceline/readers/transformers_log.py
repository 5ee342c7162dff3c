"""Logs of the Trainer of transformers: what it prints, `trainer_state.json`, `all_results.json`.

Format: `Trainer.train`, `speed_metrics` and `TrainerState` of huggingface/transformers. The run is timed as a
whole, and that is all the seconds it says; the progress bar's rate is rounded and not read:

    Total train batch size (w. parallel, distributed & accumulation) = 64
    {'train_runtime': 123.4, 'train_samples_per_second': 51.9, 'train_steps_per_second': 0.81, 'epoch': 1.0}
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.readers.training_logs import LONGEST, LoggedStep, TrainingLog, number

_BATCH = re.compile(r"Total train batch size \(.*?\) = ([\d,]+)")
_MICRO = re.compile(r"Instantaneous batch size per device = ([\d,]+)")
_TOTAL = re.compile(r"Total optimization steps = ([\d,]+)")
_ENTRY = re.compile(r"\{.*\}")
_METRIC = re.compile(r"^\s*(train_\w+|init_mem_gpu\w*)\s+=\s+(\S+)\s*$")
#: characters of a file of JSON
_LARGEST = 1 << 26


def read(lines: Iterable[str], path: str) -> TrainingLog | None:
    """The log; None where nothing in it is the Trainer's."""
    text = list(lines)
    entries = _file(text) if path.endswith(".json") else [e for line in text if (e := _entry(line))]
    entries += [{m[1]: m[2]} for line in text if (m := _METRIC.match(line))]
    together: dict[str, Any] = {}
    for entry in entries:
        together |= {
            key: value for key, value in entry.items() if str(key).startswith(("train_", "init_mem"))
        }
    sizes = {name: _found(pattern, text) for name, pattern in (("batch", _BATCH), ("micro", _MICRO))}
    rate, samples = (
        _number(together.get("train_steps_per_second")),
        _number(together.get("train_samples_per_second")),
    )
    if rate is None and samples is None:
        return None
    runtime = _number(together.get("train_runtime"))
    count = _found(_TOTAL, text) or int(_last_step(entries))
    seconds = 1 / rate if rate else None
    if runtime and count:
        seconds = runtime / count
    step = LoggedStep(
        number=count,
        seconds=seconds,
        samples_per_s=samples,
        tokens_per_s=_number(together.get("train_tokens_per_second")),
    )
    batch = sizes["batch"] or (round(samples * seconds) if samples and seconds else 0)
    return TrainingLog(
        path=path,
        program="transformers",
        steps=(step,),
        memory_bytes=_memory(together),
        global_batch=batch,
        micro_batch=sizes["micro"],
        notes=("the seconds are those of the whole run, with its evaluations, checkpoints and first steps",),
    )


def _file(text: list[str]) -> list[dict[str, Any]]:
    """Entries of trainer_state.json, or the one of all_results.json."""
    whole = "\n".join(text)
    if len(whole) > _LARGEST:
        return []
    try:
        data = json.loads(whole)
    except (ValueError, RecursionError):
        return []
    if not isinstance(data, dict):
        return []
    history = data.get("log_history")
    return [e for e in history if isinstance(e, dict)] if isinstance(history, list) else [data]


def _entry(line: str) -> dict[str, Any] | None:
    """The dictionary that the Trainer printed in a line."""
    match = _ENTRY.search(line) if "'train_" in line or '"train_' in line else None
    if match is None or len(match[0]) > LONGEST:
        return None
    try:
        found = ast.literal_eval(match[0])
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return found if isinstance(found, dict) else None


def _found(pattern: re.Pattern[str], text: list[str]) -> int:
    match = next((m for line in text if (m := pattern.search(line))), None)
    return int(number(match[1])) if match else 0


def _last_step(entries: list[dict[str, Any]]) -> float:
    return max((_number(entry.get("step")) or 0.0 for entry in entries), default=0.0)


def _number(value: Any) -> float | None:
    """A number; of metrics that are printed for people, those without units."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return _clock(value)
    return found if found > 0 else None


def _clock(value: Any) -> float | None:
    """Seconds of a time such as 0:01:23.45."""
    parts = str(value).split(":")
    if len(parts) != 3 or not all(re.fullmatch(r"\d+(\.\d+)?", part) for part in parts):
        return None
    hours, minutes, seconds = map(float, parts)
    return 3600 * hours + 60 * minutes + seconds


def _memory(entry: Mapping[str, Any]) -> dict[str, int]:
    """Peak of allocated bytes, where memory was measured: what was there before, and what training added."""
    parts = ("init_mem_gpu_alloc_delta", "train_mem_gpu_alloc_delta", "train_mem_gpu_peaked_delta")
    sizes = [_number(entry.get(part)) or 0.0 for part in parts]
    return {"allocated": round(sum(sizes))} if sizes[2] else {}
