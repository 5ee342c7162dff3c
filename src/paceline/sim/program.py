"""A program: what every distinct rank of a step runs, on which stream, after what.

Ranks that do the same at the same time are one *role* (all data-, tensor- and context-parallel ranks of a
pipeline stage), so that a program grows with the pipeline and not with the cluster. Tasks stand in the order
in which the host issues them, and a stream runs its tasks in that order. What a task is, how long it takes
and what it sends stands once, in a `Label`, however often it runs: a pass through forty equal layers is one
task whose label holds a program of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: the stream of a role that computes; others carry the mesh axis they communicate over, or are the host's:
#: what it issues, and what it has issued last and is still to run
COMPUTE, HOST, LAUNCHED = "compute", "host", "launched"

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Label:
    """What tasks do: seconds when nothing is in their way, and the collective (bytes as nccl-tests counts
    them) where they are one.
    """

    name: str
    #: the line of the breakdown that their time belongs to
    part: str
    seconds: float
    op: str = ""
    size: float = 0.0
    axis: str = ""
    #: whether computation on the device slows down beside it
    crowds: bool = False
    #: seconds that the host needs to issue it
    host_s: float = 0.0
    #: seconds of the device at least from when all is issued
    drain_s: float = 0.0
    #: whether the host waits for it before it goes on
    reads_back: bool = False
    #: the same in detail, and where the time goes in it
    body: Program | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    #: what else a trace says of it
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shares(self) -> Mapping[str, float]:
        """Seconds by line of the breakdown."""
        return self.parts or {self.part: self.seconds}


#: a task that only waits
JOIN = Label("join", "idle", 0.0)


@dataclass(frozen=True, eq=False)
class Program:
    """Tasks as arrays: label, stream, a second stream it occupies (or -1), micro-batch, and the tasks it
    waits for.
    """

    #: of each stream, its role and its kind
    streams: tuple[tuple[int, str], ...]
    labels: tuple[Label, ...]
    label: Ints
    stream: Ints
    also: Ints
    micro_batch: Ints
    #: task i waits for `before[first[i] : first[i + 1]]`, the tasks ahead of it on its streams among them
    first: Ints
    before: Ints

    def __len__(self) -> int:
        return len(self.label)

    @property
    def roles(self) -> int:
        return 1 + max((role for role, _ in self.streams), default=-1)

    @cached_property
    def work(self) -> NDArray[np.float64]:
        """Seconds of each task when nothing is in its way."""
        return np.array([label.seconds for label in self.labels])[self.label] if len(self) else np.zeros(0)

    @cached_property
    def role(self) -> Ints:
        """The role of each task's stream."""
        return np.array([role for role, _ in self.streams], dtype=np.int32)[self.stream]

    def collectives(self, role: int = 0, first: int = 0) -> Iterator[tuple[str, float, str]]:
        """(operation, bytes, axis) of what a role sends, in the order of issue, from task `first` on."""
        for task, label in enumerate(self.label[first:].tolist(), first):
            streams = self.stream[task], self.also[task]
            found = self.labels[label]
            if any(s >= 0 and self.streams[s][0] == role for s in streams):
                if found.body is not None:
                    yield from found.body.collectives()
                elif found.op:
                    yield found.op, found.size, found.axis


class Builder:
    """Makes a program task by task."""

    def __init__(self) -> None:
        self._streams: dict[tuple[int, str], int] = {}
        self._labels: dict[Label, int] = {}
        self._last: list[int] = []
        self._label: list[int] = []
        self._stream: list[int] = []
        self._also: list[int] = []
        self._micro_batch: list[int] = []
        self._first: list[int] = [0]
        self._before: list[int] = []

    def __len__(self) -> int:
        return len(self._label)

    def stream(self, role: int, kind: str = COMPUTE) -> int:
        """The number of a role's stream."""
        found = self._streams.setdefault((role, kind), len(self._streams))
        if found == len(self._last):
            self._last.append(-1)
        return found

    def add(
        self, stream: int, label: Label, after: Sequence[int] = (), also: int = -1, micro_batch: int = -1
    ) -> int:
        """Appends a task to a stream, and to a second one where two have to meet; it waits for `after`.
        Returns its number.
        """
        task = len(self._label)
        self._label.append(self._labels.setdefault(label, len(self._labels)))
        self._stream.append(stream)
        self._also.append(also)
        self._micro_batch.append(micro_batch)
        self._before += after
        for s in (stream, also):
            if s >= 0:
                if self._last[s] >= 0:
                    self._before.append(self._last[s])
                self._last[s] = task
        self._first.append(len(self._before))
        return task

    def last(self, stream: int) -> list[int]:
        """The task that stands last on a stream, if there is one."""
        return [self._last[stream]] if self._last[stream] >= 0 else []

    def build(self) -> Program:
        label, stream, also, micro_batch, first, before = (
            np.array(column, dtype=np.int32)
            for column in (
                self._label,
                self._stream,
                self._also,
                self._micro_batch,
                self._first,
                self._before,
            )
        )
        return Program(
            tuple(self._streams), tuple(self._labels), label, stream, also, micro_batch, first, before
        )


def buckets(
    sizes: Sequence[float],
    cap: float,
    first: float | None = None,
    times: Sequence[float] = (),
    cycle_s: float = math.inf,
) -> list[list[int]]:
    """Gradients, in the order in which they become ready, put together until a bucket holds `cap` bytes (the
    first one `first`), as DDP does; or until they are ready, at `times`, more than `cycle_s` apart.
    """
    out: list[list[int]] = []
    held: list[int] = []
    total, limit = 0.0, cap if first is None else min(cap, first)
    for i, size in enumerate(sizes):
        if held and times and times[i] - times[held[0]] > cycle_s:
            out.append(held)
            held, total, limit = [], 0.0, cap
        held.append(i)
        total += size
        if total >= limit:
            out.append(held)
            held, total, limit = [], 0.0, cap
    return [*out, held] if held else out
