"""Capture one training step of a module: forward, loss, backward, optimizer."""

from __future__ import annotations

import gc
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

import paceline
from paceline.capture import _torch, assemble, optimizer, recompute
from paceline.capture.build import default_loss, inputs_to_meta
from paceline.capture.classify import DTYPE_NAMES, tensors
from paceline.capture.fold import BlockFolder
from paceline.capture.fuse import fuse
from paceline.capture.host_store import HostStore
from paceline.capture.interpose import InterposeMode
from paceline.capture.module_state import stand_ins
from paceline.capture.record import ALLOCATION_UNIT, LogEntry, ModuleEdge, RecordMode, StepRecorder
from paceline.errors import CaptureError, PacelineError, SpecError, UnknownName
from paceline.spec.recomputation import RecomputePolicy
from paceline.spec.workload import Parameter, Workload

#: precision -> (dtype of parameters, autocast dtype)
PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "fp32": (None, None),
    "tf32": (None, None),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "amp_bf16": (None, torch.bfloat16),
    "amp_fp16": (None, torch.float16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """How the step is run; everything that changes which operators appear."""

    precision: str = "fp32"
    optimizer: str = "adamw"
    checkpointing: bool = False
    channels_last: bool = False
    fused_attention: bool = True
    fold: bool = True
    #: as under torch.compile: model code sees it, and kernels are fused
    compile: bool = False
    #: what is computed again, module by module; repeated blocks are not folded then
    recompute: RecomputePolicy | None = None

    def __post_init__(self) -> None:
        if self.recompute is not None and self.checkpointing:
            raise SpecError("give checkpointing, or a recomputation policy, not both")
        if self.precision not in PRECISIONS:
            raise UnknownName("precision", self.precision, PRECISIONS, f"allowed: {', '.join(PRECISIONS)}")
        optimizer.check(self.optimizer)


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """A built module with its inputs, ready to be traced."""

    name: str
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], torch.Tensor] | None = None
    batch: int = 1
    seq: int | None = None
    unit: str = "samples"
    units_per_step: int = 1
    #: messages with which a library said, while the module was built, that it has no fused kernels
    fallbacks: list[str] = field(default_factory=list)


class TracedStep(NamedTuple):
    """A captured step: the workload, and the log that it was made from."""

    workload: Workload
    recorder: StepRecorder
    #: position in the log at which the backward pass began
    backward_start: int


def trace(job: StepInputs, settings: CaptureSettings) -> TracedStep:
    """Run one step of the job on tensors without data and return what it did; its module stays as it is."""
    dtype, _ = PRECISIONS[settings.precision]
    modules = [job.module, *([job.loss] if isinstance(job.loss, nn.Module) else [])]
    with _plain_mode(), stand_ins(modules, dtype, settings.channels_last):
        return _traced(job, settings)


@contextmanager
def _plain_mode() -> Iterator[None]:
    """A step is traced with gradients and in the precision that was asked for, whatever its caller is in."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        yield


def _traced(job: StepInputs, settings: CaptureSettings) -> TracedStep:
    """Run one step with the module's tensors on meta."""
    dtype, autocast = PRECISIONS[settings.precision]
    module = job.module
    args = inputs_to_meta(job.args, dtype, settings.channels_last)
    kwargs = inputs_to_meta(dict(job.kwargs), dtype, settings.channels_last)
    recorder = StepRecorder(settings.precision)
    interpose = InterposeMode(recorder, autocast, settings.fused_attention)
    folded = settings.fold and settings.recompute is None
    folder = BlockFolder(recorder, interpose, folded, settings.checkpointing)
    names = {parameter: name for name, parameter in module.named_parameters()}
    recorder.resident((*names, *module.buffers(), *tensors((args, list(kwargs.values())))))
    module.train()
    store = _follow(module, settings.recompute, recorder, interpose)
    ready: dict[str, int] = {}
    collecting = gc.isenabled()
    # lifetimes follow reference counts, as on the device; a cycle collected midway would not be reproducible
    gc.disable()
    try:
        with (
            _ready_hooks(recorder, names, ready),
            _module_paths(recorder, module),
            folder.around(module),
            _torch.compiling() if settings.compile else nullcontext(),
            RecordMode(recorder),
            interpose,
        ):
            with _user_code(job.name, "forward pass"):
                output = module(*args, **kwargs)
                loss = (job.loss or default_loss)(output)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise CaptureError(
                    f"{job.name}: the loss must be one number, got {_shape(loss)}; give a loss function that"
                    " returns a scalar"
                )
            if not loss.requires_grad:
                raise CaptureError(f"{job.name}: the loss does not depend on any trainable parameter")
            del output
            interpose.end_forward()
            backward_start = len(recorder.events)
            with _user_code(job.name, "backward pass"):
                # not loss.backward(): that is a torch function, and the mode would be off inside it
                torch.autograd.backward([loss])
        segments, order = assemble.segments(recorder, backward_start)
    finally:
        if collecting:
            gc.enable()
    parameters = tuple(
        Parameter(name, tuple(p.shape), DTYPE_NAMES[p.dtype], ready.get(name, -1))
        for p, name in names.items()
    )
    trained = [(tuple(p.shape), DTYPE_NAMES[p.dtype]) for p in names if p.requires_grad]
    update, state_bytes = optimizer.segment(settings.optimizer, trained)
    resident = {
        "parameters": sum(map(_allocated, {id(t): t for t in (*names, *module.buffers())}.values())),
        "optimizer": state_bytes,
        "activations": sum(_allocated(t) for t in tensors((args, list(kwargs.values())))),
    }
    workload = Workload(
        name=job.name,
        batch=job.batch,
        seq=job.seq,
        unit=job.unit,
        units_per_step=job.units_per_step,
        precision=settings.precision,
        optimizer=settings.optimizer,
        segments=(*segments, update),
        order=(*order, len(segments)),
        parameters=parameters,
        resident=resident,
        options={
            "checkpointing": settings.checkpointing,
            "channels_last": settings.channels_last,
            "fused_attention": settings.fused_attention,
            **({"offloaded_bytes": store.sent_bytes} if store.sent_bytes else {}),
        },
        captured_with={"paceline": paceline.__version__, "torch": torch.__version__},
    )
    return TracedStep(fuse(workload) if settings.compile else workload, recorder, backward_start)


def _follow(
    module: nn.Module, policy: RecomputePolicy | None, recorder: StepRecorder, interpose: InterposeMode
) -> HostStore:
    """Makes the module follow a recomputation policy; its second runs are logged as such."""

    def around(keep: Sequence[str]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        kept: deque[Any] = deque()
        return recorder.keeping(keep, kept), _second_run(recorder, interpose, keep, kept)

    settings = recompute.SpanSettings(around=around, exact=False)
    return recompute.apply(module, policy or RecomputePolicy(), settings)


@contextmanager
def _second_run(
    recorder: StepRecorder, interpose: InterposeMode, keep: Sequence[str], kept: deque[Any]
) -> Iterator[None]:
    with interpose.resumed(), recorder.inside("", 0), recorder.keeping(keep, kept, again=True):
        try:
            yield
        finally:
            interpose.end_forward()  # each second run enters and leaves autocast by itself


def _allocated(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALLOCATION_UNIT) * ALLOCATION_UNIT


def _shape(value: Any) -> str:
    return (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else f"{type(value).__name__}"
    )


@contextmanager
def _ready_hooks(
    recorder: StepRecorder, names: dict[nn.Parameter, str], ready: dict[str, int]
) -> Iterator[None]:
    """Note when each parameter's gradient is complete, and which storage holds it."""

    def note(parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # used, but nothing depends on it
            return
        ready[names[parameter]] = len(ready)  # type: ignore[index]
        with recorder.pause():
            recorder.events.append(
                LogEntry("ready", recorder._segment_now(), tensor=recorder.tensor_id(parameter.grad))
            )

    handles = [p.register_post_accumulate_grad_hook(note) for p in names if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _module_paths(recorder: StepRecorder, module: nn.Module) -> Iterator[None]:
    """Keep the path of the running module on the recorder's stack."""
    paths = {id(m): name for name, m in module.named_modules()}

    def enter(sub: nn.Module, args: Any) -> None:
        path = paths.get(id(sub), recorder.modules[-1] if recorder.modules else "")
        edge = ModuleEdge(path, _first(recorder, args))
        recorder.events.append(LogEntry("module", recorder._segment_now(), data=edge))
        recorder.modules.append(path)

    def leave(sub: nn.Module, args: Any, *others: Any) -> None:
        path, output = recorder.modules.pop(), others[-1]
        kwargs = others[0] if len(others) > 1 else {}  # torch leaves them out where the module raised
        edge = ModuleEdge(path, _first(recorder, args), recorder.place(output), _rest(args, kwargs))
        recorder.events.append(LogEntry("left", recorder._segment_now(), data=edge))

    handles = [
        module_hooks.register_module_forward_pre_hook(enter),
        module_hooks.register_module_forward_hook(leave, with_kwargs=True, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first(recorder: StepRecorder, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    return recorder.place(args[0]) if args else None


def _rest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a module is called with besides its first argument: equal for two calls with the same objects."""
    return (*map(id, args[1:]), *((name, id(value)) for name, value in sorted(kwargs.items())))


@contextmanager
def _user_code(name: str, what: str) -> Iterator[None]:
    """Turn whatever the user's module raises into one message with the end of the user's own traceback."""
    try:
        yield
    except PacelineError as error:
        raise CaptureError(f"{name}: {what}: {error}{_where(error)}") from None
    except Exception as error:
        text = str(error).strip().splitlines()
        raise CaptureError(
            f"{name}: {what} raised {type(error).__name__}: {text[0] if text else ''}{_where(error)}"
        ) from error


def _where(error: BaseException) -> str:
    """The last frames that are neither torch's nor ours nor the import system's."""
    ours, theirs = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith((theirs, "<frozen"))
        and (not f.filename.startswith(ours) or "catalog" in f.filename)
    ]
    return "".join(f"\n    {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in frames[-3:])
