"""Logs of Megatron-LM.

Format: `training_log` and `report_memory` in `megatron/training` of NVIDIA/Megatron-LM. A line per logged
iteration, and one of memory after the first:

    iteration  100/ 500000 | consumed samples: 102400 | elapsed time per iteration (ms): 1234.5 | throughput
    per GPU
      (TFLOP/s/GPU): 123.4 | learning rate: ... | global batch size: 1024 | ...
    [Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: 2.0 | reserved: 3.0 | max
    reserved: 4.0

Memory is in units of 2**20 bytes. Arguments are printed before, `name ..... value`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from paceline.readers.training_logs import LoggedStep, TrainingLog, number

_STEP = re.compile(
    r"iteration\s+(?P<step>\d+)/\s*\d+\s*\|.*?elapsed time per iteration \(ms\):\s*(?P<ms>[\d.]+)"
)
_FLOPS = re.compile(r"throughput per GPU \(TFLOP/s/GPU\):\s*([\d.]+)")
_BATCH = re.compile(r"global batch size:\s*(\d+)")
_MEMORY = re.compile(
    r"memory \(MB\).*?max allocated:\s*(?P<allocated>[\d.]+).*?max reserved:\s*(?P<reserved>[\d.]+)"
)
_ARGUMENT = re.compile(r"^\s*(?:\[[^\]]*\]:?\s*)?(?P<name>[a-z]\w*) \.{2,}\s*(?P<value>\S.*)$")
#: arguments that are kept
_MOST = 2000


def read(lines: Iterable[str], path: str) -> TrainingLog | None:
    """The log; None where no line is one of Megatron-LM's."""
    steps: list[LoggedStep] = []
    memory: dict[str, int] = {}
    arguments: dict[str, str] = {}
    batch = 0
    for line in lines:
        if match := _STEP.search(line):
            flops = _FLOPS.search(line)
            seconds = number(match["ms"]) * 1e-3
            whole = _BATCH.search(line)
            batch = int(whole[1]) if whole else batch
            steps.append(
                LoggedStep(
                    number=int(match["step"]),
                    seconds=seconds,
                    flops_per_device=number(flops[1]) * 1e12 if flops else None,
                    samples_per_s=batch / seconds if batch and seconds else None,
                )
            )
        elif match := _MEMORY.search(line):
            for kind, size in match.groupdict().items():
                memory[kind] = max(memory.get(kind, 0), round(float(size) * 2**20))
        elif len(arguments) < _MOST and (match := _ARGUMENT.match(line)):
            arguments[match["name"]] = match["value"].strip()
    if not steps:
        return None
    return TrainingLog(
        path=path,
        program="megatron",
        steps=tuple(steps),
        memory_bytes=memory,
        devices=_whole(arguments, "world_size"),
        global_batch=batch or _whole(arguments, "global_batch_size"),
        micro_batch=_whole(arguments, "micro_batch_size"),
        seq=_whole(arguments, "seq_length"),
        arguments=arguments,
    )


def _whole(arguments: dict[str, str], name: str) -> int:
    text = arguments.get(name, "")
    return int(text) if text.isdigit() else 0
