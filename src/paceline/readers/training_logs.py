"""Logs of training runs: seconds of steps, tokens per second, memory; one reader per program.

`read` chooses the reader by the lines it finds. Readers go through a log line by line; what they do not know
they pass over, because logs hold much else.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import DataError
from paceline.readers.stream import opened

#: characters of a line that are looked at
LONGEST = 20_000
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
#: steps at the start that do what comes once: allocation, compilation, first batches
WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """What a log says of a step, or of the mean of the steps since the line before; 0 or None: not said."""

    number: int
    seconds: float | None = None
    #: of the whole job, and of each device
    tokens_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    samples_per_s: float | None = None
    flops_per_device: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLog:
    """What the log of a run says."""

    path: str
    #: torchtitan, megatron, deepspeed, transformers, paceline
    program: str
    steps: tuple[LoggedStep, ...]
    #: peaks on a device by what they count: allocated, reserved
    memory_bytes: dict[str, int] = field(default_factory=dict)
    #: 0: not said
    devices: int = 0
    global_batch: int = 0
    micro_batch: int = 0
    seq: int = 0
    #: arguments that the log prints
    arguments: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def step_s(self) -> float | None:
        """Median seconds of a step, without the first ones; None where the log has no times."""
        found = [step.seconds for step in self.steps if step.seconds is not None]
        return statistics.median(found[WARM_UP:] or found) if found else None

    @property
    def tokens_per_s(self) -> float | None:
        """Of the whole job: median as the log says it, else batch and sequence over the seconds of a step."""
        found = [step.tokens_per_s for step in self.steps if step.tokens_per_s is not None]
        if found:
            return statistics.median(found[WARM_UP:] or found)
        step_s = self.step_s
        return self.global_batch * self.seq / step_s if step_s and self.global_batch and self.seq else None


Reader = Callable[[Iterable[str], str], TrainingLog | None]


def read(path: Path | str) -> TrainingLog:
    """The log in a file; DataError where no reader finds a step in it."""
    from paceline.readers import deepspeed_log, megatron_log, run_record, torchtitan_log, transformers_log

    readers: tuple[Reader, ...] = (
        run_record.read,
        torchtitan_log.read,
        megatron_log.read,
        deepspeed_log.read,
        transformers_log.read,
    )
    where = Path(path)
    where = where / "record.jsonl" if where.is_dir() else where
    for reader in readers:
        found = reader(lines(where), str(where))
        if found is not None and (found.steps or found.memory_bytes):
            return found
    known = "torchtitan, Megatron-LM, DeepSpeed, the Trainer of transformers, or paceline train"
    raise DataError(f"{where}: no step of a training run in it that {known} logged")


def lines(path: Path) -> Iterator[str]:
    """Lines of a log without colours; progress bars write over their line, which makes several of it."""
    with opened(path) as file:
        while line := file.readline(LONGEST):
            yield _COLOURS.sub("", line).rstrip("\n")


def number(text: str) -> float:
    """A number with commas between its thousands."""
    return float(text.replace(",", ""))
