"""A workload: what one training step computes, independent of any device.

A step is a sequence of segments (the forward pass of a block, the backward pass of a block, the
optimizer). Repeated blocks are one `Segment`, listed as often in `Workload.order` as they run, so
size and cost grow with distinct blocks and not with depth.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.errors import SpecError
from paceline.spec import checks

FORMAT = 1

PHASES = ("forward", "backward", "recompute", "optimizer")

#: kinds of memory, in the order in which they are shown
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "temporary", "workspace")

#: bytes per element
ITEMSIZE = {
    # two values of fp4 share a byte, their scales another part of it
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "fp4": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
}

#: what the fields that are not lists hold in a file
_PLAIN: dict[str, type] = {
    "name": str,
    "batch": int,
    "unit": str,
    "units_per_step": int,
    "precision": str,
    "optimizer": str,
    "resident": dict,
    "options": dict,
    "captured_with": dict,
}


@dataclass(frozen=True, slots=True)
class Access:
    """One tensor an operator touches: which, how many bytes, and how it lies in memory."""

    tensor: int
    bytes: int
    #: bytes touched by other operators since this tensor was last used; -1: first use in the step
    reuse: int = -1


@dataclass(frozen=True, slots=True)
class Op:
    """One operator as the framework calls it; it may launch several kernels on the device.

    `kind` selects the cost formula and gives `dims` their meaning (see `cost.operators`).
    """

    name: str
    kind: str
    phase: str
    module: str
    dtype: str
    flops: float
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    dims: tuple[int, ...] = ()
    #: what else the cost depends on: layout, alignment, mask, causal...
    tags: tuple[str, ...] = ()
    #: tensors whose values it uses, where `reads` names others: a gather counts rows as those of its output
    needs: tuple[int, ...] = ()
    #: tensors that hold its result, where `writes` names others: a scatter writes into a part of its target
    makes: tuple[int, ...] = ()

    @property
    def sources(self) -> tuple[int, ...]:
        """Tensors whose values it uses."""
        return (*(access.tensor for access in self.reads), *self.needs)

    @property
    def results(self) -> tuple[int, ...]:
        """Tensors that depend on it."""
        return self.makes or tuple(access.tensor for access in self.writes)

    @property
    def bytes_read(self) -> int:
        return sum(access.bytes for access in self.reads)

    @property
    def bytes_written(self) -> int:
        return sum(access.bytes for access in self.writes)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive operators of one phase and one block, and what they do to memory.

    `net` is the change of live bytes by kind over the segment, `peak` the change at the moment
    within it when most is live; both relative to its start. `calls` counts framework calls (those
    that launch nothing included) and `modules` module calls: what the host spends its time on.
    """

    path: str
    phase: str
    ops: tuple[Op, ...]
    net: Mapping[str, int] = field(default_factory=dict)
    peak: Mapping[str, int] = field(default_factory=dict)
    calls: int = 0
    modules: int = 0


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter tensor; `ready` is its place in the order in which gradients become ready."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    ready: int = -1

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """One training step of one model at one batch size and precision."""

    name: str
    batch: int
    seq: int | None
    #: what throughput counts, and how many of them one step processes
    unit: str
    units_per_step: int
    precision: str
    optimizer: str
    segments: tuple[Segment, ...]
    order: tuple[int, ...]
    parameters: tuple[Parameter, ...]
    #: live bytes by kind before the step begins
    resident: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    #: where it was captured: versions of the libraries that decided which operators run
    captured_with: Mapping[str, str] = field(default_factory=dict)
    #: where the step that was captured is not the one that a GPU would run, a line each
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checks.names("workload", self)

    @cached_property
    def parameter_count(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def trained(self) -> int:
        """Parameter tensors that get a gradient."""
        return sum(parameter.ready >= 0 for parameter in self.parameters)

    @cached_property
    def flops(self) -> float:
        """Floating-point operations of one step, recomputation included."""
        per_segment = [sum(op.flops for op in segment.ops) for segment in self.segments]
        return sum(per_segment[index] for index in self.order)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` turns back into an equal workload."""
        names: dict[str, int] = {}
        modules: dict[str, int] = {}

        def intern(table: dict[str, int], text: str) -> int:
            return table.setdefault(text, len(table))

        def op(o: Op) -> list[Any]:
            return [
                intern(names, o.name),
                o.kind,
                o.phase,
                intern(modules, o.module),
                o.dtype,
                o.flops,
                [[a.tensor, a.bytes, a.reuse] for a in o.reads],
                [[a.tensor, a.bytes, a.reuse] for a in o.writes],
                list(o.dims),
                list(o.tags),
                *([list(o.needs), list(o.makes)] if o.needs or o.makes else []),
            ]

        segments = [
            {
                "path": s.path,
                "phase": s.phase,
                "ops": [op(o) for o in s.ops],
                "net": dict(s.net),
                "peak": dict(s.peak),
                "calls": s.calls,
                "modules": s.modules,
            }
            for s in self.segments
        ]
        return {
            "paceline_workload": FORMAT,
            **{
                f.name: getattr(self, f.name)
                for f in fields(self)
                if f.name not in ("segments", "parameters", "order")
            },
            "order": _runs(self.order),
            "parameters": [[p.name, list(p.shape), p.dtype, p.ready] for p in self.parameters],
            "op_names": list(names),
            "modules": list(modules),
            "segments": segments,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any], where: str = "workload") -> Workload:
        """The workload that `to_dict` described; messages name `where`."""
        if "model_type" in data:
            raise SpecError(f"{where}: a Hugging Face configuration; name it hf:{where}")
        version = data.get("paceline_workload")
        if version != FORMAT:
            raise SpecError(
                f"{where}: not a workload of format {FORMAT} (got {version!r}); write it again with `paceline"
                " capture`"
            )
        try:
            names, modules = data["op_names"], data["modules"]

            def op(o: list[Any]) -> Op:
                return Op(
                    names[o[0]],
                    o[1],
                    o[2],
                    modules[o[3]],
                    o[4],
                    o[5],
                    tuple(Access(*a) for a in o[6]),
                    tuple(Access(*a) for a in o[7]),
                    tuple(o[8]),
                    tuple(o[9]),
                    *(tuple(tensors) for tensors in o[10:12]),
                )

            segments = tuple(
                Segment(
                    s["path"],
                    s["phase"],
                    tuple(op(o) for o in s["ops"]),
                    s["net"],
                    s["peak"],
                    s["calls"],
                    s["modules"],
                )
                for s in data["segments"]
            )
            order = tuple(index for index, count in data["order"] for _ in range(count))
            if not order:
                raise IndexError("order is empty")
            for index in order:
                if not 0 <= index < len(segments):
                    raise IndexError(f"order names segment {index} of {len(segments)}")
            apart = ("segments", "parameters", "order", "warnings")
            plain = {f.name: data[f.name] for f in fields(Workload) if f.name not in apart}
            for key, kind in _PLAIN.items():
                if not isinstance(plain[key], kind):
                    raise TypeError(f"{key} is {plain[key]!r}")
            return Workload(
                segments=segments,
                order=order,
                parameters=tuple(Parameter(p[0], tuple(p[1]), p[2], p[3]) for p in data["parameters"]),
                warnings=tuple(str(line) for line in data.get("warnings", ())),
                **plain,
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise SpecError(
                f"{where}: broken workload: {type(error).__name__} {error}; write it again with `paceline"
                " capture`"
            ) from None

    def save(self, path: Path | str) -> None:
        """Write as JSON; the file appears whole or not at all."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        try:
            partial.write_text(json.dumps(self.to_dict(), separators=(",", ":")), encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise SpecError(f"cannot write {str(path)!r}: {error.strerror}") from None

    @staticmethod
    def load(path: Path | str) -> Workload:
        """Read what `save` wrote."""
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SpecError(f"cannot read workload {str(path)!r}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise SpecError(f"cannot read workload {str(path)!r}: not UTF-8 at byte {error.start}") from None
        except json.JSONDecodeError as error:
            raise SpecError(
                f"{path}: not valid JSON: line {error.lineno} column {error.colno}: {error.msg}"
            ) from None
        if not isinstance(data, dict):
            raise SpecError(f"{path}: expected a JSON object, got {type(data).__name__}")
        return Workload.from_dict(data, str(path))


def _runs(order: tuple[int, ...]) -> list[list[int]]:
    """Run-length coding: 0 1 1 1 2 -> [0 1] [1 3] [2 1]."""
    out: list[list[int]] = []
    for index in order:
        if out and out[-1][0] == index:
            out[-1][1] += 1
        else:
            out.append([index, 1])
    return out
