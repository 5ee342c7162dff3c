"""What happened when, on one device: simulated here, measured elsewhere, one format for both.

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


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of one step on one rank."""

    spans: tuple[Span, ...]
    title: str

    def events(self) -> Iterator[dict[str, Any]]:
        """Chrome trace events: microseconds, one process per rank, one thread per stream."""
        streams = {"host": 1, "device": 7}
        yield {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": f"rank 0: {self.title}"}}
        for name, number in streams.items():
            yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": f"stream {number} ({name})" if number > 1 else name}}
        for i, span in enumerate(self.spans):
            on_device = span.stream == "device"
            yield {
                "ph": "X", "cat": "kernel" if on_device else "cpu_op", "name": span.name, "pid": 0, "tid": streams[span.stream],
                "ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6,
                "args": {**span.details, "category": span.category, "External id": i // 2, "correlation": i // 2,
                         **({"stream": 7, "device": 0} if on_device else {})},
            }

    def save(self, path: Path) -> None:
        """Write a trace file; compressed where the name ends in .gz."""
        text = json.dumps({"schemaVersion": 1, "distributedInfo": {"rank": 0}, "traceEvents": list(self.events())})
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
