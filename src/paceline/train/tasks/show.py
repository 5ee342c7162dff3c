"""Progress of runs on a terminal: rank 0 of the run appends to a file, the process that the user started
draws a bar.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: where rank 0 is to say how far it is
SHOWN = "PACELINE_SHOWN"
_EVERY_S = 0.2


class Shown:
    """Rank 0 says now and then which step it is at; silent where nobody looks."""

    def __init__(self, rank: int, total: int, start: int) -> None:
        self._path = Path(os.environ[SHOWN]) if rank == 0 and os.environ.get(SHOWN) else None
        self._total, self._last = total, 0.0
        self._write(start, None)

    def step(self, number: int, loss: float) -> None:
        """Called after each step."""
        if number == self._total or time.monotonic() > self._last + _EVERY_S:
            self._write(number, loss)

    def _write(self, number: int, loss: float | None) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": number, "total": self._total, "loss": loss}) + "\n")
        self._last = time.monotonic()


@contextmanager
def bars(names: list[str]) -> Iterator[dict[str, str]]:
    """Draws a bar for runs that come one after another, if standard error is a terminal; the environment to
    start them with.
    """
    if not sys.stderr.isatty():
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        path, over = Path(folder, "shown"), threading.Event()
        path.touch()
        thread = threading.Thread(target=_draw, args=(path, names, over), daemon=True)
        thread.start()
        try:
            yield {SHOWN: str(path)}
        finally:
            over.set()
            thread.join()


def _draw(path: Path, names: list[str], over: threading.Event) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        path.open(encoding="utf-8") as lines,
    ):
        run, bar, rest = 0, None, ""
        while not over.wait(_EVERY_S):
            rest += lines.read()
            *whole, rest = rest.split("\n")
            for line in whole:
                found = json.loads(line)
                if found["loss"] is None:  # a run begins
                    if bar is not None:
                        progress.remove_task(bar)
                    bar = progress.add_task(names[run % len(names)], total=found["total"], loss="")
                    run += 1
                if bar is not None:
                    progress.update(
                        bar,
                        completed=found["step"],
                        loss="" if found["loss"] is None else f"loss {found['loss']:.3f}",
                    )
