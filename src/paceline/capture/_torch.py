"""Every private or fragile torch API that capture relies on; `tests/capture/test_torch_private.py` has one
test each.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn import functional

_OVERRIDE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def next_sequence() -> int:
    """Sequence number that the next autograd node will get; the node of the running operator has one less."""
    return int(torch._C._autograd._get_sequence_nr())


def running_node() -> Any | None:
    """The autograd node whose backward is being evaluated, or None outside of it."""
    return torch._C._current_autograd_node()


def node_sequence(node: Any) -> int:
    """Sequence number of an autograd node: that of the forward operator that made it."""
    return int(node._sequence_nr())


def function_modes() -> int:
    """How many torch-function modes are active; the autograd engine runs hooks (and so recomputation) with
    none.
    """
    return int(torch._C._len_torch_function_stack())


def storage_key(tensor: torch.Tensor) -> int:
    """Address of the tensor's storage object: equal for views, unique while the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def compiler_loaded() -> None:
    """Loads what the first checkpoint of a process would load amid its backward pass, where the frames of the
    import would hold tensors for a while.
    """
    importlib.import_module("torch._dynamo")


def checkpoint_begun(
    fn: Callable[..., Any],
    contexts: Callable[[], Any],
    options: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Iterator[None]:
    """A non-reentrant checkpoint that has begun here and ends at the next step of this iterator; `fn` runs
    again what happens in between. Closing the iterator abandons it.
    """
    begin = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    # torch 2.9 added early_stop before the arguments of fn
    early = (True,) if "early_stop" in inspect.signature(begin).parameters else ()
    kept, check = options["preserve_rng_state"], options["determinism_check"]
    begun: Iterator[None] = begin(fn, kept, contexts, check, False, *early, *args, **kwargs)
    next(begun)
    return begun


@contextmanager
def compiling() -> Iterator[None]:
    """Within it `torch.compiler.is_compiling()` is true, so that model code takes the branches it takes under
    torch.compile.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


class _StandIn(types.ModuleType):
    """In the place of torch's compiler: answers `disable`, gives way to the real module when asked for
    anything else.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        vars(self)["marked"] = []

    def disable(self, function: Any, *_: Any, **__: Any) -> Any:
        self.marked.append(function)
        return function

    def leave(self) -> None:
        """Make the import system forget it, and the functions it answered for ask again."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
            vars(torch).pop("_dynamo", None)
        for function in self.marked:
            vars(function).pop("__dynamo_disable", None)
        self.marked.clear()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(self.__name__), name)

    def __setattr__(self, name: str, value: Any) -> None:
        real = sys.modules.get(self.__name__, self)
        super().__setattr__(name, value) if real is self else setattr(real, name, value)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Within it torch's compiler is not imported only to be told not to trace meta kernels: a second of CPU
    time.
    """
    name = "torch._dynamo"
    if name in sys.modules:
        yield
        return
    stand_in = sys.modules[name] = vars(torch)["_dynamo"] = _StandIn(name)
    try:
        yield
    finally:
        stand_in.leave()


@cache
def opened(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The body of a Python function of torch that checks for overrides first, without that check.

    A torch-function mode is switched off while it handles a call, so the calls inside, say,
    `multi_head_attention_forward` would pass unseen. Calling this copy with the mode switched on
    again shows them. None for functions written in C.
    """
    if not isinstance(function, types.FunctionType) or function.__module__ not in (
        "torch.nn.functional",
        "torch.functional",
    ):
        return None
    scope = dict(function.__globals__)
    for name in _OVERRIDE_CHECKS:
        if name in scope:
            scope[name] = lambda *_: False
    copy = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def boolean_dispatch_targets() -> dict[Any, tuple[Any, Any, str, bool]]:
    """Functions such as `max_pool2d` that choose between two by a flag, as (if true, if false, flag,
    default).
    """
    out: dict[Any, tuple[Any, Any, str, bool]] = {}
    for name in dir(functional):
        function = getattr(functional, name)
        code = getattr(function, "__code__", None)
        if code is None or code.co_name != "fn" or not function.__closure__:
            continue
        cells = dict(
            zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True)
        )
        if {"if_true", "if_false", "arg_name", "default"} <= set(cells):
            out[function] = (cells["if_true"], cells["if_false"], cells["arg_name"], cells["default"])
    return out


def import_torchvision() -> types.ModuleType:
    """torchvision, also beside a torch build that its compiled operators do not match."""
    with torchvision_importable():
        return importlib.import_module("torchvision")


@contextmanager
def torchvision_importable() -> Iterator[None]:
    """Within it, `import torchvision` works also beside a torch build that its operators do not match.

    Only the models are used; the detection operators that its import registers are declared (without code)
    when the binary that holds them does not load. Code of users may import it too, as transformers does.
    """
    finder = _TorchvisionFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _TorchvisionFinder(MetaPathFinder):
    """Finds torchvision where it is, and has it executed by `_execute_torchvision`."""

    def find_spec(self, name: str, path: Any, target: types.ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == "torchvision" else None
        if spec is not None and spec.loader is not None:
            execute = functools.partial(_execute_torchvision, spec.loader.exec_module)
            vars(spec.loader)["exec_module"] = execute
        return spec


def _execute_torchvision(execute: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
    try:
        execute(module)
        return
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    for name in ("nms", "qnms"):
        try:
            torch.library.define(f"torchvision::{name}", schema)
        except RuntimeError:  # declared already
            continue
    for name in [name for name in sys.modules if name.startswith("torchvision.")]:
        del sys.modules[name]
    execute(module)
