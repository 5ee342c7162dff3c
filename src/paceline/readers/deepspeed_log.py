"""Logs of DeepSpeed.

Format: `ThroughputTimer` and `SynchronizedWallClockTimer` in `deepspeed/utils/timer.py` of
deepspeedai/DeepSpeed, and the
configuration that the engine prints (`name ..... value`):

    [...] epoch=0/micro_step=100/global_step=10, RunningAvgSamplesPerSec=12.3, CurrSamplesPerSec=12.5,
      MemAllocated=2.34GB, MaxMemAllocated=8.15GB

Samples are those of all ranks; GB are 2**30 bytes. Seconds of a step are its batch over samples per second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from paceline.readers.training_logs import LoggedStep, TrainingLog

_STEP = re.compile(
    r"global_step=(?P<step>\d+),\s*RunningAvgSamplesPerSec=(?P<mean>[\d.]+),\s*CurrSamplesPerSec=(?P<now>[\d.]+)"
    r"(?:.*?MaxMemAllocated=(?P<memory>[\d.]+)GB)?"
)
_SETTING = re.compile(r"\b(?P<name>[a-z]\w*) \.{3,} (?P<value>\S.*)$")
_MOST = 2000


def read(lines: Iterable[str], path: str) -> TrainingLog | None:
    """The log; None where no line is one of DeepSpeed's."""
    found: list[tuple[int, float]] = []
    peak = 0.0
    settings: dict[str, str] = {}
    for line in lines:
        if match := _STEP.search(line):
            found.append((int(match["step"]), float(match["now"])))
            peak = max(peak, float(match["memory"] or 0.0))
        elif len(settings) < _MOST and (match := _SETTING.search(line)):
            settings[match["name"]] = match["value"].strip()
    if not found:
        return None
    batch = _whole(settings, "train_batch_size")
    steps = tuple(
        LoggedStep(number=step, samples_per_s=rate, seconds=batch / rate if batch and rate else None)
        for step, rate in found
    )
    return TrainingLog(
        path=path,
        program="deepspeed",
        steps=steps,
        memory_bytes={"allocated": round(peak * 2**30)} if peak else {},
        devices=_whole(settings, "world_size"),
        global_batch=batch,
        micro_batch=_whole(settings, "train_micro_batch_size_per_gpu"),
        arguments=settings,
        notes=() if batch else ("the batch is not in the log: seconds of a step are not known",),
    )


def _whole(settings: dict[str, str], name: str) -> int:
    text = settings.get(name, "")
    return int(text) if text.isdigit() else 0
