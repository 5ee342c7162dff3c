"""What every task of a program did when, those inside others in their place, as far as a file can hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from paceline.sim.engine import Run
from paceline.sim.program import JOIN, LAUNCHED, Label, Program
from paceline.sim.timeline import Span, task_span

#: spans that a trace file holds at most, about; beyond, passes are not written out piece by piece
MOST_SPANS = 150_000


def written_out(
    program: Program, found: Run, since: float, run: Callable[[Program], Run]
) -> tuple[Span, ...]:
    """The spans of a program that has run, from `since` on, by rank and time; `run` runs what labels hold."""
    depth = next((depth for depth in (2, 1) if _count(program, depth) <= MOST_SPANS), 0)
    spans = [span for span in Detail(run).spans(program, found, depth, -since) if span.start_s >= 0]
    return tuple(sorted(spans, key=lambda span: (span.rank, span.start_s, span.end_s)))


@dataclass(frozen=True, slots=True)
class Detail:
    """Programs inside labels, each run once."""

    run: Callable[[Program], Run]
    _found: dict[Label, Run] = field(default_factory=dict)

    def spans(
        self, program: Program, found: Run, depth: int, origin: float, scale: float = 1.0, rank: int = 0
    ) -> Iterator[Span]:
        """Spans of a program's tasks, those of a label's program in its place."""
        for task, number in enumerate(program.label.tolist()):
            label, (role, stream) = program.labels[number], program.streams[program.stream[task]]
            begin, stop = origin + scale * float(found.start[task]), origin + scale * float(found.end[task])
            if label is JOIN or stream == LAUNCHED:
                continue
            if label.body is None or not depth or stop <= begin:
                yield task_span(program, task, begin, stop, rank)
                continue
            if label not in self._found:
                self._found[label] = self.run(label.body)
            inside = self._found[label]
            within = (stop - begin) / inside.seconds
            yield from self.spans(label.body, inside, depth - 1, begin, within, rank + role)


def _count(program: Program, depth: int) -> int:
    """Spans of a program written out to a depth."""
    each = np.array(
        [_count(label.body, depth - 1) if label.body is not None and depth else 1 for label in program.labels]
    )
    return int(each[program.label].sum())
