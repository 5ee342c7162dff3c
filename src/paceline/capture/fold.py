"""Fold repeated blocks: run two of them, log the others as repetitions.

Blocks are children of one container (ModuleList, Sequential) that are alike: same classes, same
parameter shapes, same settings. The first two run; each later one, called with inputs of the same
shapes, becomes one autograd node that logs "the same again" in the forward and the backward pass.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from paceline.capture import _torch
from paceline.capture.interpose import InterposeMode
from paceline.capture.record import LogEntry, StepRecorder
from paceline.spec.vocabulary import Phase

#: blocks below this count are not worth folding
MIN_REPEATS = 4
#: how many of each run for real; the last of them is the pattern for the rest
REAL_BLOCKS = 2
_INDEX_NAMES = (
    "layer_idx",
    "layer_id",
    "layer_index",
    "idx",
    "index",
    "layer_number",
    "layer",
    "block_idx",
    "stage_idx",
    "depth",
)


def signature(module: nn.Module) -> Any:
    """Equal for modules that do the same work; tells apart shapes, classes and settings, not weights or
    positions.
    """
    own: list[tuple[str, Any]] = []
    for name, value in sorted(vars(module).items()):
        if name in _INDEX_NAMES or name.startswith("_") or name == "training":
            continue
        if isinstance(value, float):
            own.append((name, value == 0.0))
        elif isinstance(value, (int, str, bool, type(None), torch.dtype, torch.Size)):
            own.append((name, value))
        elif isinstance(value, (tuple, list)) and all(
            isinstance(v, (int, float, str, bool, type(None))) for v in value
        ):
            own.append((name, tuple(value)))
        elif callable(value):
            own.append((name, getattr(value, "__name__", type(value).__name__)))
    tensors = [
        (name, tuple(t.shape), t.dtype, t.requires_grad) if t is not None else (name,)
        for table in (module._parameters, module._buffers)
        for name, t in table.items()
    ]
    children = tuple((name, signature(child)) for name, child in module.named_children())
    return type(module), tuple(own), tuple(tensors), children


def repeated_blocks(module: nn.Module) -> list[tuple[str, nn.Module, Any]]:
    """(path, block, signature) of the outermost blocks that repeat at least `MIN_REPEATS` times in one
    container.
    """
    found: list[tuple[str, nn.Module, Any]] = []

    def visit(path: str, node: nn.Module) -> None:
        inside = list(node.named_children())
        alike: dict[Any, int] = {}
        signatures: dict[str, Any] = {}
        if isinstance(node, (nn.ModuleList, nn.Sequential)) and len(inside) >= MIN_REPEATS:
            for name, child in inside:
                if any(True for _ in child.parameters()) and any(True for _ in child.children()):
                    signatures[name] = signature(child)
                    alike[signatures[name]] = alike.get(signatures[name], 0) + 1
        for name, child in inside:
            full = f"{path}.{name}" if path else name
            if name in signatures and alike[signatures[name]] >= MIN_REPEATS:
                found.append((full, child, signatures[name]))
            else:
                visit(full, child)

    visit("", module)
    return found


class _Alias(NamedTuple):
    """An output that is one of the inputs, by its position among them."""

    position: int


@dataclass(slots=True)
class _Pattern:
    """What a folded block repeats: where it was seen, what it returned, and which of its inputs it holds
    until backward.
    """

    path: str
    outputs: list[Any]
    structure: Any
    inputs: list[Any]  # weak references to the storages of its floating-point inputs
    input_ids: list[int]  # those inputs and its tensor outputs, as the recorder numbers them
    output_ids: list[int]
    held: list[bool] | None = None


class _Replay(torch.autograd.Function):
    """A folded block: logs a repetition forward and backward, returns empty tensors of the right shapes."""

    @staticmethod
    def forward(
        ctx: Any,
        recorder: StepRecorder,
        mark: Callable[[str], None],
        pattern: _Pattern,
        held: list[bool],
        *inputs: torch.Tensor,
    ) -> Any:
        outputs = [o for o in pattern.outputs if isinstance(o, torch.Tensor)]
        mark("forward")
        recorder.note_sequence()
        with recorder.pause():
            results = tuple(o.new_empty_strided(o.shape, o.stride()) for o in outputs)
            # gradients need shapes; only what the pattern keeps for backward is kept alive
            ctx.shapes = [
                (
                    torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
                    if t.requires_grad
                    else None
                )
                for t in inputs
            ]
        kept = [(t, twin) for t, twin, keep in zip(inputs, pattern.input_ids, held, strict=False) if keep]
        if _torch.running_node() is None:  # a recomputation stops before its results
            recorder.stands_in(results)
            recorder.pair(zip(results, pattern.output_ids, strict=True), pattern.path)
        recorder.pair(kept, pattern.path)
        ctx.save_for_backward(*(t for t, _ in kept))
        ctx.recorder, ctx.mark, ctx.inputs = recorder, mark, len(held)
        ctx.mark_non_differentiable(
            *(r for r, o in zip(results, outputs, strict=True) if not o.requires_grad)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _ = ctx.saved_tensors  # with checkpointing, asking for them is what recomputes the block
        ctx.mark("backward")
        recorder: StepRecorder = ctx.recorder
        recorder.forget(g for g in grads if g is not None)
        with recorder.pause():
            made = [torch.empty_like(t) if t is not None else None for t in ctx.shapes]
        recorder.stands_in(g for g in made[: ctx.inputs] if g is not None)
        return None, None, None, None, *made


class BlockFolder:
    """Wraps the blocks of one module for the time of one capture."""

    def __init__(
        self, recorder: StepRecorder, interpose: InterposeMode, enabled: bool, checkpointing: bool
    ) -> None:
        self.recorder = recorder
        self.interpose = interpose
        self.enabled = enabled
        self.checkpointing = checkpointing
        self._patterns: dict[Any, _Pattern] = {}
        self._seen: dict[Any, int] = {}

    @contextmanager
    def around(self, module: nn.Module) -> Iterator[None]:
        """Within it, calls of repeated blocks fold; with checkpointing, their activations are recomputed."""
        blocks = repeated_blocks(module) if self.enabled or self.checkpointing else []
        for path, block, key in blocks:
            original = block.forward
            wrapped = self._folding(path, block, key, original)
            if self.checkpointing:
                wrapped = functools.partial(
                    checkpoint,
                    wrapped,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    determinism_check="none",
                )
            block.forward = wrapped
        try:
            yield
        finally:
            for _, block, _ in blocks:
                vars(block).pop("forward", None)  # a block may be in two containers

    def _folding(
        self, path: str, block: nn.Module, key: Any, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        calls = 0
        pattern: Any = None
        parameters = [p for p in block.parameters() if p.requires_grad]

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls, pattern
            call, calls = calls, calls + 1
            leaves, structure = pytree.tree_flatten((args, kwargs))
            shape = (key, str(structure), tuple(_describe(leaf) for leaf in leaves), torch.is_grad_enabled())
            if call == 0:
                self._seen[shape] = self._seen.get(shape, 0) + 1
                if self.enabled and self._seen[shape] > REAL_BLOCKS:
                    pattern = self._patterns[shape]
            if pattern is not None:
                return self._replay(path, call, pattern, leaves, parameters)
            try:
                with self.interpose.resumed(), self.recorder.inside(path, call):
                    result = original(*args, **kwargs)
            finally:
                if _torch.running_node() is not None:
                    self.interpose.end_forward()  # each recomputation enters and leaves autocast by itself
            if call == 0:
                self._patterns[shape] = self._learn(path, leaves, result)
            return result

        return forward

    def _learn(self, path: str, leaves: list[Any], result: Any) -> _Pattern:
        """What a later block must return: shapes, not storages, so that a pattern holds no activation
        alive.
        """
        outputs, structure = pytree.tree_flatten(result)
        kept: list[Any] = []
        with self.recorder.pause():
            for output in outputs:
                position = next((i for i, leaf in enumerate(leaves) if leaf is output), None)
                if not isinstance(output, torch.Tensor):
                    kept.append(output)
                elif position is not None:
                    kept.append(_Alias(position))
                else:
                    shell = torch.empty_strided(
                        output.shape, output.stride(), dtype=output.dtype, device=output.device
                    )
                    kept.append(
                        shell.requires_grad_(output.requires_grad) if output.is_floating_point() else shell
                    )
        inputs, number = _floating(leaves), self.recorder.tensor_id
        fresh = [
            number(output)
            for output, shell in zip(outputs, kept, strict=True)
            if isinstance(shell, torch.Tensor)
        ]
        return _Pattern(
            path,
            kept,
            structure,
            [weakref.ref(t.untyped_storage()) for t in inputs],
            [number(t) for t in inputs],
            fresh,
        )

    def _replay(
        self, path: str, call: int, pattern: _Pattern, leaves: list[Any], parameters: list[nn.Parameter]
    ) -> Any:
        # the pattern's caller has moved on: what still lives of its inputs, backward needs
        if pattern.held is None:
            pattern.held = [reference() is not None for reference in pattern.inputs]

        def mark(phase: str) -> None:
            if phase == Phase.FORWARD and _torch.running_node() is not None:
                phase = "recompute"
            self.recorder.events.append(
                LogEntry("fold", -1, data=(path, pattern.path, phase, call if phase != Phase.BACKWARD else 0))
            )

        # under checkpointing something must be kept, for asking for it triggers the recomputation
        held = [True] * len(pattern.held) if self.checkpointing else pattern.held
        made = iter(_Replay.apply(self.recorder, mark, pattern, held, *_floating(leaves), *parameters))  # type: ignore[no-untyped-call]
        outputs = (leaves[o.position] if isinstance(o, _Alias) else o for o in pattern.outputs)
        results = [
            next(made) if isinstance(o, torch.Tensor) else value
            for o, value in zip(pattern.outputs, outputs, strict=True)
        ]
        return pytree.tree_unflatten(results, pattern.structure)


def _floating(leaves: list[Any]) -> list[torch.Tensor]:
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, (int, float, str, bool, type(None))) else type(leaf).__name__
