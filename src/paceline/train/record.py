"""What a run leaves behind: one JSON object per line, and a timeline in the format of the predictor's.

RUN/record.jsonl     first line: what was run and what was predicted; then one line per step; last line: how
it ended RUN/trace.json       what happened when in the last steps, for Perfetto
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from paceline.errors import DataError, RunError
from paceline.sim.timeline import Span, Timeline
from paceline.train.launch import NOTE

if TYPE_CHECKING:
    from paceline.train.comm import CommEvent

NAME, TRACE = "record.jsonl", "trace.json"


class Record:
    """Appends lines; only rank 0 writes. `board` also writes scalars for TensorBoard, where that is
    installed.
    """

    def __init__(self, folder: Path | str | None, *, rank: int = 0, board: bool = False) -> None:
        self.folder = Path(folder) if folder is not None and rank == 0 else None
        self._file: TextIO | None = None
        self._board: Any = None
        #: why nothing is written any more (a full disk); training goes on
        self.problem: str | None = None
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = (self.folder / NAME).open("a", encoding="utf-8")
            except OSError as error:
                raise RunError(
                    f"no record can be written to {str(folder)!r}: {error.strerror}; name another folder"
                ) from None
            if board:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(self.folder))

    def write(self, kind: str, **values: Any) -> None:
        """A line; whole on the disk when this returns, so that a killed run leaves no half lines but the
        last.
        """
        if self._file is not None:
            try:
                self._file.write(json.dumps({"kind": kind, **values}) + "\n")
                self._file.flush()
            except OSError as error:
                self._give_up(error)
        if self._board is not None and kind == "step":
            for name, value in values.items():
                if isinstance(value, float):
                    self._board.add_scalar(name, value, values.get("step", 0))

    def timeline(
        self,
        events: Iterable[CommEvent],
        steps: Iterable[tuple[str, float, float]],
        title: str,
        rank: int = 0,
    ) -> Timeline:
        """What the engine and the loop did, as a timeline; written beside the record. Seconds of one clock;
        the first event is zero.
        """
        found = timeline(events, steps, title, rank)
        if self.folder is not None and self.problem is None:
            try:
                found.save(self.folder / TRACE)
            except OSError as error:
                self._give_up(error)
        return found

    def _give_up(self, error: OSError) -> None:
        """A half line may be there now, and must stay the last."""
        self.problem = f"the record in {self.folder} ends here: {error.strerror}"
        print(f"{NOTE}{self.problem}", file=sys.stderr, flush=True)
        self.close()

    def close(self) -> None:
        """Ends the file."""
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # what is left of a line that there was no room for
                file.close()
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> Record:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def timeline(
    events: Iterable[CommEvent], phases: Iterable[tuple[str, float, float]], title: str, rank: int = 0
) -> Timeline:
    """Spans of a rank: phases of the loop on the compute stream, collectives on one stream per channel,
    arithmetic on its own.
    """
    spans = [Span(name, "compute", start, end, "compute", {}, rank) for name, start, end in phases]
    for event in events:
        quiet = event.op == "arithmetic"
        stream = "arithmetic" if quiet else f"communication ({event.channel})"
        details = {} if quiet else {"bytes": event.bytes, "op": event.op}
        spans.append(
            Span(
                event.name,
                stream,
                event.start_s,
                event.end_s,
                "arithmetic" if quiet else "communication",
                details,
                rank,
            )
        )
    origin = min((span.start_s for span in spans), default=0.0)
    moved = (
        Span(s.name, s.stream, s.start_s - origin, s.end_s - origin, s.category, s.details, s.rank)
        for s in spans
    )
    return Timeline(tuple(sorted(moved, key=lambda span: span.start_s)), title)


def sent_bytes(interface: str | None = None) -> int:
    """Bytes that an interface (by default the one that gloo uses, or loopback) has sent since it came up, by
    the kernel's count; 0: unknown.
    """
    wanted = interface or os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    table = Path("/proc/net/dev")
    for line in table.read_text().splitlines()[2:] if table.exists() else ():
        name, _, numbers = line.partition(":")
        if name.strip() == wanted:
            return int(numbers.split()[8])
    return 0


def read(folder: Path | str) -> list[dict[str, Any]]:
    """The lines of a run; a last line that was cut off is left out."""
    path = Path(folder) / NAME if Path(folder).is_dir() else Path(folder)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(
            f"no run at {str(folder)!r}: {error.strerror}; give the folder that `paceline train --record`"
            " wrote"
        ) from None
    out: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            raise DataError(f"{path}, line {number}: not JSON") from None
        if not isinstance(found, Mapping) or "kind" not in found:
            raise DataError(f"{path}, line {number}: not a line of a run")
        out.append(dict(found))
    return out
