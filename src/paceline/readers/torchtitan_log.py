"""Logs of torchtitan.

Format: `torchtitan/components/metrics.py` of pytorch/torchtitan. A line per logged step, with the tokens per
second
of each device and the peak of reserved memory since the line before:

    ... step: 10  loss:  7.8  grad_norm: 1.2  memory: 60.12GiB(76.2%)  tps: 5,762  tflops: 390.1  mfu: 39.45%

Seconds come from the times of the lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime

from paceline.readers.training_logs import LoggedStep, TrainingLog, number

_STEP = re.compile(
    r"step:\s*(?P<step>\d+)\s+loss:.*?memory:\s*(?P<memory>[\d.]+)GiB.*?tps:\s*(?P<tps>[\d,.]+)"
    r"(?:\s+tflops:\s*(?P<tflops>[\d,.]+))?"
)
_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})")
_SIZES = re.compile(
    r"local batch size (?P<micro>\d+), global batch size (?P<whole>\d+).*?sequence length (?P<seq>\d+)"
)


def read(lines: Iterable[str], path: str) -> TrainingLog | None:
    """The log; None where no line is one of torchtitan's."""
    steps: list[LoggedStep] = []
    peak = 0.0
    before: tuple[int, datetime] | None = None
    sizes: dict[str, int] = {}
    for line in lines:
        if match := _SIZES.search(line):
            sizes = {name: int(value) for name, value in match.groupdict().items()}
        match = _STEP.search(line)
        if match is None:
            continue
        at, place = _time(line), int(match["step"])
        peak = max(peak, float(match["memory"]))
        seconds = None
        if before is not None and at is not None and place > before[0]:
            seconds = (at - before[1]).total_seconds() / (place - before[0])
        flops = number(match["tflops"]) * 1e12 if match["tflops"] else None
        steps.append(
            LoggedStep(
                number=place,
                seconds=seconds,
                tokens_per_s_per_device=number(match["tps"]),
                flops_per_device=flops,
            )
        )
        before = (place, at) if at is not None else None
    if not steps:
        return None
    return TrainingLog(
        path=path,
        program="torchtitan",
        steps=tuple(steps),
        memory_bytes={"reserved": round(peak * 2**30)},
        global_batch=sizes.get("whole", 0),
        micro_batch=sizes.get("micro", 0),
        seq=sizes.get("seq", 0),
    )


def _time(line: str) -> datetime | None:
    match = _TIME.search(line)
    try:
        return datetime.fromisoformat(f"{match[1]}.{match[2]}") if match else None
    except ValueError:
        return None
