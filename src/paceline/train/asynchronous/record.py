"""What each step of a worker took: kept in memory, written as one JSON object per line when a file is asked
for.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from paceline.train.asynchronous.client import RoundTrip

#: where the steps of a worker go; `{worker}` is replaced by its number
VARIABLE = "PACELINE_RECORD"


class Recorder:
    """Splits a worker's time into compute (from one exchange to the next) and the exchange itself."""

    def __init__(self, worker: int, path: Path | None = None) -> None:
        named = os.environ.get(VARIABLE)
        path = path or (Path(named.replace("{worker}", str(worker))) if named else None)
        # whole lines: who reads along stops the run
        self._file = path.open("w", buffering=1) if path else None
        self.worker = worker
        self.steps = 0
        self._since = time.perf_counter()

    def describe(self, **facts: object) -> None:
        """Writes what the run is, before its steps."""
        if self._file is not None:
            self._file.write(json.dumps({"worker": self.worker, **facts}) + "\n")

    def computed(self) -> float:
        """Seconds of compute since the last exchange ended."""
        return time.perf_counter() - self._since

    def exchanged(self, compute_s: float, exchange: RoundTrip | None) -> None:
        """One step is over."""
        self._since = time.perf_counter()
        self.steps += 1
        if self._file is not None:
            row = {
                "worker": self.worker,
                "at_s": time.time(),
                "compute_s": compute_s,
                **(asdict(exchange) if exchange else {}),
            }
            self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
