"""Record what a step does: operators, tensor lifetimes, gradients becoming ready.

Floating-point tensors live on `meta` and hold nothing. Small integer and boolean tensors (indices,
masks, positions) stay real on the CPU, so that model code may ask for their values; an operator that
mixes the two runs on `meta`.
"""

from __future__ import annotations

import bisect
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.capture import _torch, classify
from paceline.capture.classify import DeviceWork, tensors
from paceline.errors import CaptureError
from paceline.spec.vocabulary import Phase, Precision
from paceline.spec.workload import Access, Op

#: a real tensor above this many elements moves to meta before it is computed with
REAL_LIMIT = 1 << 22
#: the CUDA caching allocator hands out multiples of this many bytes
ALLOCATION_UNIT = 512

_NO_KERNEL = {
    "detach",
    "detach_",
    "alias",
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "lift_fresh",
    "lift",
    "set_",
    "resize_",
    "is_same_size",
    "unsafe_split",
    "unsafe_split_with_sizes",
    "unsafe_chunk",
    "sym_size",
    "sym_stride",
    "sym_numel",
    "sym_storage_offset",
    "_has_compatible_shallow_copy_type",
    "record_stream",
    "equal",
    "_nested_tensor_size",
    "requires_grad_",
    "set_data",
    "is_pinned",
    "as_strided_",
    "squeeze_",
    "unsqueeze_",
    "t_",
    "transpose_",
}


@dataclass(slots=True)
class LogEntry:
    """One entry of the log: an operator, an allocation, a release, a ready gradient or a folded block."""

    what: str  # "op" | "alloc" | "known" | "free" | "ready" | "fold" | "call" | "module" | "left"
    segment: int
    op: Op | None = None
    tensor: int = -1
    bytes: int = 0
    data: Any = None


class ModuleEdge(NamedTuple):
    """Where a call of a module begins or ends: its path, its first argument, at its end what it returned (see
    `StepRecorder.place`) and its other arguments.
    """

    path: str
    given: tuple[Any, ...] | None
    returned: tuple[Any, ...] | None = None
    rest: tuple[Any, ...] = ()


@dataclass(slots=True)
class ForwardScope:
    """A stretch of the forward pass whose operators (and their backward) form one segment."""

    path: str
    phase: str
    call: int = 0


class KeptResults(NamedTuple):
    """Results that a span of a recomputation policy keeps: in its first run they are added, in the second
    handed out.
    """

    kinds: Sequence[str]
    results: deque[Any]
    again: bool


@dataclass
class StepRecorder:
    """The log of one step, with the bookkeeping to attribute backward operators to forward scopes."""

    precision: str
    events: list[LogEntry] = field(default_factory=list)
    scopes: list[ForwardScope] = field(default_factory=list)
    paused: int = 0
    modules: list[str] = field(default_factory=list)
    current: int = 0
    #: forward scope and module by autograd sequence number, ascending
    _sequence: list[int] = field(default_factory=list)
    _origin: list[tuple[int, str]] = field(default_factory=list)
    _tensors: dict[int, int] = field(default_factory=dict)
    _guards: dict[int, Any] = field(default_factory=dict)
    _count: int = 0
    _backward_scopes: dict[int, int] = field(default_factory=dict)
    _last_backward: tuple[int, str] = (0, "")
    #: bytes touched so far, and at the last use of each tensor
    _traffic: int = 0
    _last_use: dict[int, int] = field(default_factory=dict)
    recompute: int = 0
    #: storages at the edge of folded blocks -> (path of the pattern, the storage in that place of it)
    twins: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    #: spans that keep results of operators that torch does not see here, the innermost last
    kept_results: list[KeptResults] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.current = self.scope("", "forward")

    def scope(self, path: str, phase: str, call: int = 0) -> int:
        self.scopes.append(ForwardScope(path, phase, call))
        return len(self.scopes) - 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Operators run unseen; their results count as neither allocated nor freed."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    @contextmanager
    def inside(self, path: str, call: int) -> Iterator[int]:
        """Operators belong to a scope of their own; what follows it, to a new scope of the outer path."""
        outer, outer_path, outer_phase = (
            self.current,
            self.scopes[self.current].path,
            self.scopes[self.current].phase,
        )
        phase = "recompute" if _torch.running_node() is not None else "forward"
        self.recompute += phase == Phase.RECOMPUTE
        self.current = self.scope(path, phase, call)
        try:
            yield self.current
        finally:
            self.recompute -= phase == Phase.RECOMPUTE
            self.current = outer if phase == Phase.RECOMPUTE else self.scope(outer_path, outer_phase)

    @contextmanager
    def keeping(self, kinds: Sequence[str], results: deque[Any], again: bool = False) -> Iterator[None]:
        """Results of operators of these kinds are kept for a second run, or handed out in it."""
        self.kept_results.append(KeptResults(kinds, results, again))
        try:
            yield
        finally:
            self.kept_results.pop()

    def once(self, kind: str, make: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        """What `make` computes and logs; in a second run that kept it, what it returned in the first."""
        inner = self.kept_results[-1] if self.kept_results else None
        if inner is None or kind not in inner.kinds:
            return make()
        if inner.again:
            with self.pause():
                return tuple(t.detach() for t in inner.results.popleft())
        made = make()
        with self.pause():
            inner.results.append(tuple(t.detach() for t in made))
        return made

    # -- tensors -----------------------------------------------------------------------------

    def tensor_id(self, tensor: torch.Tensor) -> int:
        """Id of the tensor's storage; a storage not seen before counts as there from the start."""
        key = _torch.storage_key(tensor)
        found = self._tensors.get(key)
        return self._adopt(tensor, key) if found is None else found

    def place(self, value: Any) -> tuple[Any, ...] | None:
        """Storage id, shape and version of a tensor: equal as long as nothing changed it."""
        if not isinstance(value, torch.Tensor):
            return None
        number = self._tensors.get(_torch.storage_key(value))
        return None if number is None else (number, tuple(value.shape), value._version)

    def _adopt(self, tensor: torch.Tensor, key: int) -> int:
        self._count += 1
        number = self._count
        self._tensors[key] = number
        storage = tensor.untyped_storage()

        def gone(_: Any, key: int = key, number: int = number) -> None:
            self._tensors.pop(key, None)
            self._guards.pop(number, None)
            self.events.append(LogEntry("free", self._segment_now(), tensor=number))

        self._guards[number] = weakref.ref(storage, gone)
        return number

    def resident(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make storages known that exist before the step."""
        for tensor in tensors:
            self.tensor_id(tensor)

    def stands_in(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors of a folded block whose allocation its pattern already counts; their release is seen
        here.
        """
        for tensor in tensors:
            number = self.tensor_id(tensor)
            self.events.append(LogEntry("known", self._segment_now(), tensor=number, bytes=_rounded(tensor)))

    def pair(self, pairs: Iterable[tuple[torch.Tensor, int]], path: str) -> None:
        """Inputs and results of a folded block with those of its pattern: who releases the one, releases the
        other.
        """
        for tensor, twin in pairs:
            self.twins.setdefault(self.tensor_id(tensor), []).append((path, twin))

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors whose release the pattern of a folded block counts."""
        for tensor in tensors:
            number = self._tensors.pop(_torch.storage_key(tensor), None)
            if number is not None:
                self._guards.pop(number, None)

    def allocated(self, outputs: Sequence[torch.Tensor]) -> None:
        """Note storages that an operator has just made."""
        for out in outputs:
            key = _torch.storage_key(out)
            if key not in self._tensors:
                number = self._adopt(out, key)
                self.events.append(LogEntry("alloc", self._segment_now(), tensor=number, bytes=_rounded(out)))

    # -- attribution -------------------------------------------------------------------------

    def _segment_now(self) -> int:
        node = _torch.running_node()
        if node is None or self.recompute:
            return self.current
        return self._backward_scope(node)[0]

    def _backward_scope(self, node: Any) -> tuple[int, str]:
        sequence = _torch.node_sequence(node)
        if sequence >= 1 << 62:  # gradient accumulation belongs to whoever ran last
            return self._last_backward
        at = bisect.bisect_right(self._sequence, sequence) - 1
        forward, module = self._origin[at] if at >= 0 else (0, "")
        scope = self._backward_scopes.get(forward)
        if scope is None:
            origin = self.scopes[forward]
            scope = self._backward_scopes[forward] = self.scope(origin.path, "backward", origin.call)
        self._last_backward = (scope, module)
        return self._last_backward

    def note_sequence(self) -> None:
        """Remember which scope and module the autograd node of the running forward operator belongs to."""
        sequence = _torch.next_sequence() - 1
        if not self._sequence or sequence > self._sequence[-1]:
            self._sequence.append(sequence)
            self._origin.append((self.current, self.modules[-1] if self.modules else ""))

    # -- operators ---------------------------------------------------------------------------

    def record(
        self, name: str, works: Sequence[DeviceWork] | Iterator[DeviceWork], outputs: Sequence[torch.Tensor]
    ) -> None:
        """Log one call: its pieces of work and the storages it made."""
        node = _torch.running_node()
        if node is None or self.recompute:
            segment, module = self.current, self.modules[-1] if self.modules else ""
            phase = "recompute" if self.recompute else "forward"
        else:
            (segment, module), phase = self._backward_scope(node), "backward"
        self.allocated(outputs)
        for work in works:
            dtype = work.dtype or self._dtype(work)
            if (
                dtype == Precision.FP32
                and self.precision == Precision.TF32
                and work.kind in ("gemm", "conv", "rnn")
            ):
                dtype = "tf32"
            reads, writes = self._accesses(work.reads), self._accesses(work.writes)
            needs, makes = (tuple(map(self.tensor_id, some)) for some in (work.needs, work.makes))
            op = Op(
                name,
                work.kind,
                phase,
                module,
                dtype,
                work.flops,
                reads,
                writes,
                work.dims,
                work.tags,
                needs,
                makes,
            )
            self.events.append(LogEntry("op", segment, op=op))
            self._traffic += op.bytes_read + op.bytes_written
            for access in (*reads, *writes):
                self._last_use[access.tensor] = self._traffic

    def _accesses(self, tensors: Sequence[torch.Tensor]) -> tuple[Access, ...]:
        out = []
        for t in tensors:
            if t.numel():
                number = self.tensor_id(t)
                last = self._last_use.get(number)
                out.append(
                    Access(number, classify.touched_bytes(t), -1 if last is None else self._traffic - last)
                )
        return tuple(out)

    @staticmethod
    def _dtype(work: DeviceWork) -> str:
        lead = max((*work.writes, *work.reads), key=torch.Tensor.numel, default=None)
        return "fp32" if lead is None else classify.DTYPE_NAMES.get(lead.dtype, "fp32")


class RecordMode(TorchDispatchMode):
    """Sees every ATen call below autograd and hands it to the recorder."""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self._plans: dict[Any, tuple[str, Callable[..., Any] | None]] = {}

    def _plan(self, func: Any) -> tuple[str, Callable[..., Any] | None]:
        """(name, handler or None when no kernel runs), once per operator."""
        name = func._schema.name.split("::")[-1]
        handler: Callable[..., Any] | None = classify.HANDLERS.get(name, classify.pointwise)
        returns = func._schema.returns
        is_view = bool(returns) and all(
            r.alias_info is not None and not r.alias_info.is_write for r in returns
        )
        if is_view or name in _NO_KERNEL:
            handler = None
        self._plans[func] = (name, handler)
        return self._plans[func]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        inputs = tensors(args) + tensors(tuple(kwargs.values()))
        on_meta = sum(t.is_meta for t in inputs)
        if on_meta != len(inputs) and (on_meta or sum(t.numel() for t in inputs) > REAL_LIMIT):
            args, kwargs = _to_meta(args), {k: _to_meta(v) for k, v in kwargs.items()}
            inputs = tensors(args) + tensors(tuple(kwargs.values()))
        if recorder.paused:
            return func(*args, **kwargs)
        name, handler = self._plans.get(func) or self._plan(func)
        if name == "_local_scalar_dense" and on_meta:
            raise CaptureError(
                "the model asks for the value of a tensor that is not computed here (.item(), bool(), or a"
                " comparison in Python); pass the value in, or guard that branch during capture"
            )
        known = {_torch.storage_key(t) for t in inputs} if handler is classify.pointwise else set()
        try:
            out = func(*args, **kwargs)
        except NotImplementedError as error:
            raise CaptureError(
                f"operator {func} cannot run without data: {str(error).splitlines()[0]}"
            ) from error
        recorder.note_sequence()
        recorder.events.append(LogEntry("call", recorder._segment_now()))
        if name.startswith("convolution"):
            out = self._as_cudnn_lays(name, args, out)
        elif name.startswith(("native_layer_norm", "native_group_norm")):
            with recorder.pause():  # norms write contiguous results whatever their input
                out = tuple(t.contiguous() if t is not None else None for t in out)
        outputs = tensors(out)
        if handler is None:
            if name.startswith(("empty", "new_empty")):
                recorder.allocated(outputs)
        elif (
            known
            and not func._schema.is_mutable
            and outputs
            and all(_torch.storage_key(t) in known for t in outputs)
        ):
            pass  # a view in all but name
        else:
            recorder.record(f"aten.{name}", handler(args, kwargs, out), outputs)
        return out

    def _as_cudnn_lays(self, name: str, args: Any, out: Any) -> Any:
        """Results of a convolution in the layout a GPU gives them: channels-last also when only the filter
        lies so.
        """
        x, weight = args[1:3] if name == "convolution_backward" else args[:2]
        if classify.conv_layout(x, weight) != "nhwc":
            return out
        with self.recorder.pause():
            fmt = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
            if isinstance(out, torch.Tensor):
                return out.contiguous(memory_format=fmt)
            return tuple(
                t.contiguous(memory_format=fmt) if t is not None and t.dim() == x.dim() else t for t in out
            )


def _rounded(tensor: torch.Tensor) -> int:
    return -(-tensor.untyped_storage().nbytes() // ALLOCATION_UNIT) * ALLOCATION_UNIT


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (
            value
            if value.is_meta
            else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        )
    if isinstance(value, (list, tuple)):
        return type(value)(_to_meta(item) for item in value)
    return value
