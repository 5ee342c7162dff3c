"""Output of nccl-tests and rccl-tests: seconds of a collective by size.

Format: "Performance reported by NCCL tests", https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md,
and the tables that `all_reduce_perf` and its sisters print; rccl-tests prints the same. Lines may stand among
others and behind a prefix (Slurm, mpirun). Bus bandwidth is `algbw` times 2(n-1)/n for all-reduce, (n-1)/n
for
all-gather, reduce-scatter and all-to-all, and 1 for the others.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import DataError
from paceline.readers.stream import opened, printable

_KINDS = "u?int(?:8|32|64)|half|float|double|bfloat16|fp8_e4m3|fp8_e5m2|f8e4m3|f8e5m2"
_TIMES = r"\s+(?P<{0}time>\d+\.?\d*)\s+(?P<{0}alg>[\d.]+|inf)\s+(?P<{0}bus>[\d.]+|inf)\s+(?P<{0}wrong>\S+)"
_ROW = re.compile(
    rf"(?P<size>\d+)\s+(?P<count>\d+)\s+(?P<dtype>{_KINDS})(?:\s+(?P<redop>sum|prod|max|min|avg|mulsum|none))?"
    rf"(?:\s+(?P<root>-?\d+))?{_TIMES.format('out_')}(?:{_TIMES.format('in_')})?\s*$"
)
_RANK = re.compile(
    r"#\s*Rank\s+(?P<rank>\d+)\b.*?\bon\s+(?P<host>\S+)\s+device\s+\d+\s+\[[^]]*\]\s*(?P<device>.*?)\s*$"
)
_PROGRAM = re.compile(r"(?<![A-Za-z])([a-z_]+?)_perf(?![A-Za-z])")
#: programs of the tests -> collectives as `cost.collectives` calls them
_OPS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "broadcast": "broadcast", "reduce": "reduce", "sendrecv": "send_recv",
    "gather": "gather", "scatter": "scatter",
}  # fmt: skip
#: characters of a line that are looked at
_LONGEST = 2000


@dataclass(frozen=True, slots=True)
class Timing:
    """One entry of a table: bytes as the tests count them, seconds, bytes per second."""

    size_bytes: int
    dtype: str
    seconds: float
    busbw_Bps: float
    in_place: bool
    #: values that came out wrong; None: they were not checked
    wrong: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """What one run of a test printed."""

    path: str
    #: empty: neither the log nor its file's name says which, and the table fits several
    op: str
    #: 0: not said
    ranks: int
    nodes: int
    #: as the driver names it; empty: not said
    device: str
    rows: tuple[Timing, ...]
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Table:
    """A run while it is read."""

    op: str = ""
    ranks: dict[int, str] = field(default_factory=dict)
    devices: Counter[str] = field(default_factory=Counter)
    rows: list[Timing] = field(default_factory=list)
    #: bus bandwidth over algorithm bandwidth of large sizes
    factors: list[float] = field(default_factory=list)
    reductions: set[str] = field(default_factory=set)


def read(path: Path | str) -> tuple[Timings, ...]:
    """The tables of a log, in their order; DataError where there is none."""
    tables: list[_Table] = [_Table()]
    named = _program(Path(path).name)
    with opened(path) as file:
        for line in file:
            _take(line[:_LONGEST], tables)
    found = tuple(_timings(str(path), table, named) for table in tables if table.rows)
    if not found:
        raise DataError(f"{path}: no table of nccl-tests or rccl-tests in it")
    return found


def _take(line: str, tables: list[_Table]) -> None:
    """One line; a new table begins where programs or ranks are named after rows."""
    row = _ROW.search(line)
    if row is not None:
        _add(row, tables[-1])
        return
    rank, program = _RANK.search(line), _program(line)
    if (rank is not None or program) and tables[-1].rows:
        tables.append(_Table())
    if rank is not None:
        tables[-1].ranks[int(rank["rank"])] = printable(rank["host"])
        tables[-1].devices[printable(rank["device"])] += 1
    if program:
        tables[-1].op = program


def _program(text: str) -> str:
    """The collective of a program that a text names."""
    return next((_OPS[name] for name in _PROGRAM.findall(text) if name in _OPS), "")


def _add(row: re.Match[str], table: _Table) -> None:
    size = int(row["size"])
    table.reductions.add(row["redop"] or "none")
    for way in ("out_", "in_"):
        if row[f"{way}time"] is None:
            continue
        seconds, algorithm = float(row[f"{way}time"]) * 1e-6, row[f"{way}alg"]
        bus = row[f"{way}bus"]
        if seconds <= 0 or size == 0 or "inf" in (algorithm, bus):
            continue
        wrong = int(row[f"{way}wrong"]) if row[f"{way}wrong"].isdigit() else None
        table.rows.append(Timing(size, row["dtype"], seconds, float(bus) * 1e9, way == "in_", wrong))
        # three digits are enough from here on
        if float(algorithm) >= 10:
            table.factors.append(float(bus) / float(algorithm))


def _timings(path: str, table: _Table, named: str) -> Timings:
    factor = sorted(table.factors)[len(table.factors) // 2] if table.factors else 0.0
    ranks = max(table.ranks, default=-1) + 1
    op = table.op or named or _by_factor(factor, ranks, table.reductions)
    notes = [] if op else ["which collective it is is not said: name the file after the program"]
    if not ranks:
        notes.append("how many ranks there are is not said")
    wrong = sum(row.wrong or 0 for row in table.rows)
    if wrong:
        notes.append(f"{wrong} values came out wrong")
    return Timings(
        path=path,
        op=op,
        ranks=ranks,
        nodes=len(set(table.ranks.values())),
        device=table.devices.most_common(1)[0][0] if table.devices else "",
        rows=tuple(table.rows),
        notes=tuple(notes),
    )


def _by_factor(factor: float, ranks: int, reductions: set[str]) -> str:
    """The collective whose bus bandwidth is so many times its algorithm bandwidth, where it is only one."""
    if not factor or not ranks:
        return ""
    adds = reductions != {"none"}
    double, single = 2 * (ranks - 1) / ranks, (ranks - 1) / ranks
    if adds and ranks > 2 and abs(factor - double) < 0.02:
        return "all_reduce"
    if adds and abs(factor - single) < 0.02:
        return "reduce_scatter"
    return ""
