"""What happened when, on one device or many: simulated here, measured elsewhere, one format for both.

Written as Chrome trace events, with the fields that Perfetto and HolisticTraceAnalysis read.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import SpecError
from paceline.sim.program import Program


@dataclass(frozen=True, slots=True)
class Span:
    """One operator on one stream; seconds from the start of the step."""

    name: str
    stream: str
    start_s: float
    end_s: float
    category: str
    details: dict[str, Any]
    rank: int = 0


def kernel(op: str) -> str:
    """The name of a collective as trace analysers know it."""
    return "ncclDevKernel_" + "".join(word.capitalize() for word in op.split("_"))


def task_span(program: Program, task: int, start_s: float, end_s: float, rank: int = 0) -> Span:
    """A task of a program as it ran, its roles numbered from `rank` on."""
    label = program.labels[program.label[task]]
    role, stream = program.streams[program.stream[task]]
    number = int(program.micro_batch[task])
    details = dict(label.details)
    if label.op:
        details |= {"bytes": label.size, "axis": label.axis}
    elif number >= 0:
        details |= {"micro-batch": number}
    name = kernel(label.op) if label.op else label.name
    return Span(name, stream, start_s, end_s, label.part, details, rank + role)


#: numbers of the streams that every rank has; those that communicate come after
_NUMBERS = {"host": 1, "device": 7, "compute": 7}


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of one step, on one rank or on each kind of them."""

    spans: tuple[Span, ...]
    title: str

    @property
    def ranks(self) -> int:
        return 1 + max((span.rank for span in self.spans), default=0)

    def events(self) -> Iterator[dict[str, Any]]:
        """Chrome trace events: microseconds, one process per rank, one thread per stream."""
        streams: dict[tuple[int, str], int] = {}
        for rank, name in sorted({(span.rank, span.stream) for span in self.spans}):
            others = sum(owner == rank and number > 7 for (owner, _), number in streams.items())
            streams[rank, name] = _NUMBERS.get(name, 8 + others)
        for rank in range(self.ranks):
            yield {
                "ph": "M",
                "name": "process_name",
                "pid": rank,
                "tid": 0,
                "args": {"name": f"rank {rank}: {self.title}"},
            }
        for (rank, name), number in sorted(streams.items(), key=lambda item: (item[0][0], item[1])):
            title = f"stream {number} ({name})" if number > 1 else name
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": title}}
        # one device: calls and their kernels take turns
        pair = 2 if {span.stream for span in self.spans} == {"host", "device"} else 1
        for i, span in enumerate(self.spans):
            on_device, number = span.stream != "host", streams[span.rank, span.stream]
            yield {
                "ph": "X",
                "cat": "kernel" if on_device else "cpu_op",
                "name": span.name,
                "pid": span.rank,
                "tid": number,
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {
                    **span.details,
                    "category": span.category,
                    "External id": i // pair,
                    "correlation": i // pair,
                    **({"stream": number, "device": span.rank} if on_device else {}),
                },
            }

    def save(self, path: Path | str) -> None:
        """Write a trace file, compressed where the name ends in .gz; where it ends in neither .json nor .gz,
        a folder with a file per rank.
        """
        path = Path(path)
        if path.suffix in (".json", ".gz"):
            self._write(path, 0, list(self.events()))
            return
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(f"cannot write traces into {str(path)!r}: {error.strerror}") from None
        by_rank: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(self.ranks)}
        for event in self.events():
            by_rank[event["pid"]].append(event)
        end = 1e6 * max((span.end_s for span in self.spans), default=0.0)
        for rank, events in by_rank.items():
            step = {
                "ph": "X",
                "cat": "user_annotation",
                "name": "ProfilerStep#0",
                "pid": rank,
                "tid": 0,
                "ts": 0.0,
                "dur": end,
                "args": {},
            }
            self._write(path / f"rank-{rank}.json.gz", rank, [*events, step])

    @staticmethod
    def load(path: Path | str) -> Timeline:
        """A trace file that `save` wrote, of all ranks in one."""
        path = Path(path)
        try:
            text = (
                gzip.decompress(path.read_bytes()).decode()
                if path.suffix == ".gz"
                else path.read_text(encoding="utf-8")
            )
            events = json.loads(text)["traceEvents"]
            named = [event for event in events if event["ph"] == "M"]
            title = next(
                (e["args"]["name"].partition(": ")[2] for e in named if e["name"] == "process_name"), ""
            )
            streams = {
                (e["pid"], e["tid"]): e["args"]["name"].partition("(")[2].removesuffix(")")
                or e["args"]["name"]
                for e in named
                if e["name"] == "thread_name"
            }
            return Timeline(
                tuple(
                    _span(event, streams)
                    for event in events
                    if event["ph"] == "X" and event["cat"] != "user_annotation"
                ),
                title,
            )
        except OSError as error:
            raise SpecError(f"cannot read trace {str(path)!r}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SpecError(
                f"{str(path)!r} is not a trace that paceline wrote: {type(error).__name__} {error}"
            ) from None

    def _write(self, path: Path, rank: int, events: list[dict[str, Any]]) -> None:
        world = {"world_size": self.ranks} if self.ranks > 1 else {}
        text = json.dumps(
            {"schemaVersion": 1, "distributedInfo": {"rank": rank, **world}, "traceEvents": events}
        )
        partial = path.with_name(path.name + ".partial")
        try:
            if path.suffix == ".gz":
                with gzip.open(partial, "wt") as f:
                    f.write(text)
            else:
                partial.write_text(text)
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise SpecError(f"cannot write trace {str(path)!r}: {error.strerror}") from None


def _span(event: dict[str, Any], streams: dict[tuple[int, int], str]) -> Span:
    """The span that an event was written from."""
    details = {
        key: value
        for key, value in event["args"].items()
        if key not in ("category", "External id", "correlation", "stream", "device")
    }
    start, rank = event["ts"] * 1e-6, event["pid"]
    return Span(
        event["name"],
        streams[rank, event["tid"]],
        start,
        start + event["dur"] * 1e-6,
        event["args"]["category"],
        details,
        rank,
    )
