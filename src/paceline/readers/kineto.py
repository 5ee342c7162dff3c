"""Traces of torch.profiler (Kineto) as columns.

Format: Chrome trace events, a JSON object whose `traceEvents` are objects with a phase `ph`, microseconds
`ts` and `dur`, `pid`, `tid` and `args` ("Trace Event Format", Google, 2016). What Kineto puts into them: its
`libkineto/src/output_json.cpp`, and the documentation of `torch.profiler`. `cat` says what an event is:

    kernel gpu_memcpy gpu_memset     work of the device; `correlation` is that of the call that launched it
    cuda_runtime cuda_driver         calls of the host into CUDA or HIP
    cpu_op                           operators of PyTorch, nested; `External id` is that of their kernels
    user_annotation                  regions that PyTorch or the user named; gpu_user_annotation on the device
    cpu_instant_event `[memory]`     bytes allocated and reserved

Kernels of NCCL carry their collective's name, elements, type and process group. The file of each rank of a
job has `distributedInfo`. A trace is read in one pass, at some 100 bytes of memory per event.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError
from paceline.readers.stream import JsonObject, opened, printable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = tuple(f"{kind}_{level}" for kind in ("cuda", "hip", "xpu", "mtia") for level in ("runtime", "driver"))
OPS = ("cpu_op",)
REGIONS = ("user_annotation",)
#: kinds that say nothing that is not said elsewhere: arrows, the profiler itself, frames of Python
UNUSED = {
    "ac2g", "fwdbwd", "async_gpu", "async_cpu", "async_cpu_to_gpu", "python_function", "Trace", "overhead",
    "gpu_user_annotation", "cuda_sync", "cuda_profiler_range", "collective_comm",
}  # fmt: skip
#: what a profiler was told to record, by the key of the file that says so
_RECORDED = {
    "record_shapes": "shapes", "profile_memory": "memory", "with_stack": "stacks", "with_modules": "modules",
}  # fmt: skip
#: events that are kept at the most
MOST = 100_000_000
_FILES = (".json", ".json.gz", ".gz")


@dataclass(frozen=True, slots=True)
class Call:
    """A collective as a kernel of NCCL or RCCL, or an operator, names it."""

    op: str
    dtype: str
    #: elements that go in and come out on this rank; 0: not said
    elements_in: int
    elements_out: int
    group: str
    group_size: int
    #: ranks of the group as the file lists them; empty: not said
    members: str = ""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Shapes and types of an operator's inputs, as the profiler recorded them."""

    dims: tuple[Any, ...]
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """Events of one kind, by their start; seconds from the first event of the trace."""

    start_s: Floats
    end_s: Floats
    #: places in `KinetoTrace.names`, `KinetoTrace.threads`; of work on a device: its stream
    name: Ints
    thread: Ints
    #: what joins calls to the work that they launch, and operators to both; -1: none
    correlation: Ints
    external: Ints
    #: place in `KinetoTrace.calls` (work on a device) or `KinetoTrace.inputs` (operators); -1: none
    detail: Ints

    def __len__(self) -> int:
        return len(self.start_s)

    def pick(self, which: NDArray[Any]) -> Spans:
        """Those at some places."""
        return Spans(**{column: getattr(self, column)[which] for column in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KinetoTrace:
    """What one process did."""

    path: str
    #: of the job; a process by itself is rank 0 of 1
    rank: int
    ranks: int
    #: as the driver calls it; empty: no device, work is on the host
    device: str
    device_bytes: int
    names: tuple[str, ...]
    #: process and thread, or device and stream
    threads: tuple[tuple[str, str], ...]
    work: Spans
    launches: Spans
    ops: Spans
    regions: Spans
    calls: tuple[Call, ...]
    inputs: tuple[Inputs, ...]
    #: seconds, bytes allocated and reserved on the device
    memory_s: Floats
    allocated: Floats
    reserved: Floats
    #: seconds of the trace's first event on its own clock
    origin_s: float
    #: what the profiler recorded besides, which slows the host: shapes, memory, stacks, modules
    recorded: tuple[str, ...] = ()
    #: events that were left out, by kind: those that are not understood, or contradict themselves
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def end_s(self) -> float:
        """Of the last event."""
        every = (self.work, self.launches, self.ops, self.regions)
        return max(float(spans.end_s.max()) for spans in every if len(spans))

    def spelled(self, spans: Spans) -> list[str]:
        """Names of events."""
        return [self.names[i] for i in spans.name]


def read(path: Path | str) -> KinetoTrace:
    """The trace in a file, plain or compressed."""
    reader = _Reader(str(path))
    with opened(path) as text:
        content = JsonObject(text, str(path))
        for number, event in enumerate(content.entries("traceEvents")):
            try:
                reader.take(event)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                what = printable(f"{type(error).__name__} {error}")
                raise DataError(f"{path}: event {number} is not one of a trace: {what}") from None
    return reader.trace(content.header)


def read_job(paths: Iterable[Path | str]) -> tuple[KinetoTrace, ...]:
    """Traces of the ranks of one job: files, or folders of them; by rank."""
    files = [file for path in paths for file in _files(Path(path))]
    traces = sorted((read(file) for file in files), key=lambda trace: trace.rank)
    for first, second in itertools.pairwise(traces):
        if first.rank == second.rank:
            raise DataError(f"{first.path} and {second.path} are both of rank {first.rank}")
    return tuple(traces)


def _files(path: Path) -> list[Path]:
    """The path itself, or the traces in a folder."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.name.endswith(_FILES))
    if not found:
        raise DataError(f"no trace (.json, .json.gz) in the folder {str(path)!r}")
    return found


class _Columns:
    """Events of one kind as they are read; microseconds."""

    def __init__(self) -> None:
        self.start, self.length = array("d"), array("d")
        self.name, self.thread = array("q"), array("q")
        self.correlation, self.external, self.detail = array("q"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self.start)

    def spans(self, origin: float) -> Spans:
        """The columns by start, outer events before those that they hold; seconds from `origin`."""
        start, length = np.array(self.start), np.array(self.length)
        order = np.lexsort((-length, start))
        begin = (start[order] - origin) * 1e-6
        whole = {
            column: np.array(getattr(self, column), dtype=np.int64)[order]
            for column in ("name", "thread", "correlation", "external", "detail")
        }
        return Spans(start_s=begin, end_s=begin + length[order] * 1e-6, **whole)


class _Table:
    """Things that occur often, each kept once."""

    def __init__(self) -> None:
        self.places: dict[Any, int] = {}

    def place(self, thing: Any) -> int:
        return self.places.setdefault(thing, len(self.places))


class _Reader:
    """Takes events in the order of the file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.work, self.launches, self.ops, self.regions = (_Columns() for _ in range(4))
        self.names, self.threads, self.calls, self.inputs = (_Table() for _ in range(4))
        self.memory = [array("d"), array("d"), array("d")]
        self.left_out: Counter[str] = Counter()
        self.kinds = {
            **dict.fromkeys(DEVICE, (self.work, self._call)),
            **dict.fromkeys(CALLS, (self.launches, _nothing)),
            **dict.fromkeys(OPS, (self.ops, self._inputs)),
            **dict.fromkeys(REGIONS, (self.regions, _nothing)),
        }

    def take(self, event: Any) -> None:
        """One event."""
        phase, kind = event["ph"], event.get("cat", "")
        if phase == "X" and kind in self.kinds:
            columns, detail = self.kinds[kind]
            self._span(columns, event, detail)
        elif phase == "i" and event.get("name") == "[memory]":
            self._memory(event)
        elif phase in ("X", "i") and kind and kind not in UNUSED:
            self.left_out[printable(kind)[:80]] += 1

    def _span(self, columns: _Columns, event: Any, detail: Any) -> None:
        start, length = float(event["ts"]), float(event.get("dur", 0.0))
        if not (math.isfinite(start) and 0 <= length < math.inf):
            self.left_out["events without a finite time"] += 1
            return
        if len(columns) >= MOST:
            raise DataError(f"{self.path} has over {MOST:,} events of one kind")
        args = event.get("args") or {}
        columns.start.append(start)
        columns.length.append(length)
        columns.name.append(self.names.place(event["name"]))
        columns.thread.append(self.threads.place((event["pid"], event["tid"])))
        columns.correlation.append(int(args.get("correlation", -1)))
        columns.external.append(int(args.get("External id", args.get("external id", -1))))
        columns.detail.append(detail(args))

    def _call(self, args: Mapping[str, Any]) -> int:
        """The collective that a kernel carries out."""
        op = args.get("Collective name")
        if not op:
            return -1
        group = args.get("Process Group Description") or args.get("Process Group Name") or ""
        call = Call(
            op=printable(op),
            dtype=printable(args.get("dtype", "")),
            elements_in=int(args.get("In msg nelems", 0)),
            elements_out=int(args.get("Out msg nelems", 0)),
            group=printable(group),
            group_size=int(args.get("Group size", 0)),
            members=printable(args.get("Process Group Ranks", "")),
        )
        return self.calls.place(call)

    def _inputs(self, args: Mapping[str, Any]) -> int:
        """Shapes and types of an operator's inputs."""
        if args.get("Collective name"):
            return -1
        dims = args.get("Input Dims")
        if not dims:
            return -1
        types = args.get("Input type") or args.get("Input types") or ()
        return self.inputs.place(Inputs(_frozen(dims), tuple(str(one) for one in types)))

    def _memory(self, event: Mapping[str, Any]) -> None:
        args = event.get("args") or {}
        if args.get("Device Type", 1) == 0 or "Total Allocated" not in args:
            return
        numbers = (event["ts"], args["Total Allocated"], args.get("Total Reserved", 0))
        for column, value in zip(self.memory, numbers, strict=True):
            column.append(float(value))

    def trace(self, header: Mapping[str, Any]) -> KinetoTrace:
        """All that was taken, with what the file says of itself."""
        kinds = (self.work, self.launches, self.ops, self.regions)
        if not any(len(columns) for columns in kinds):
            raise DataError(f"{self.path}: no operator and no kernel in it; is it a trace of torch.profiler?")
        origin = min(min(columns.start) for columns in kinds if len(columns))
        work, launches, ops, regions = (columns.spans(origin) for columns in kinds)
        rank, ranks = _place(header)
        name, size = _device(header, len(work) > 0)
        seconds, allocated, reserved = (np.array(column) for column in self.memory)
        return KinetoTrace(
            path=self.path,
            rank=rank,
            ranks=ranks,
            device=name,
            device_bytes=size,
            names=tuple(printable(name) for name in self.names.places),
            threads=tuple((printable(pid), printable(tid)) for pid, tid in self.threads.places),
            work=work,
            launches=launches,
            ops=ops,
            regions=regions,
            calls=tuple(self.calls.places),
            inputs=tuple(self.inputs.places),
            memory_s=(seconds - origin) * 1e-6,
            allocated=allocated,
            reserved=reserved,
            origin_s=origin * 1e-6,
            recorded=tuple(what for key, what in _RECORDED.items() if header.get(key)),
            left_out=dict(self.left_out),
        )


def _nothing(_: Mapping[str, Any]) -> int:
    return -1


def _frozen(value: Any) -> Any:
    """Nested lists as tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _place(header: Mapping[str, Any]) -> tuple[int, int]:
    """Rank and number of ranks."""
    info = header.get("distributedInfo")
    if not isinstance(info, Mapping):
        return 0, 1
    rank, ranks = info.get("rank", 0), info.get("world_size", 1)
    if type(rank) is not int or type(ranks) is not int or rank < 0:
        return 0, 1
    return rank, max(ranks, rank + 1)


def _device(header: Mapping[str, Any], worked: bool) -> tuple[str, int]:
    """Name and bytes of the device, where there was work on one."""
    found = header.get("deviceProperties")
    first = found[0] if isinstance(found, list) and found else None
    if not worked:
        return "", 0
    if not isinstance(first, Mapping):
        return "unknown device", 0
    size = first.get("totalGlobalMem", 0)
    return printable(first.get("name", "unknown device")), size if type(size) is int else 0
