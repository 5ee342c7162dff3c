"""Models that something else keeps the same: parameter servers, shared memory, FSDP2, tensor parallelism.

`paceline.train.of` gives one of these for them, so that a loop which asks for `synchronize` or `no_sync` is
written once for all plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from paceline.train.split_state import gathered, optimizer_parts
from paceline.train.strategies.base import State, Strategy


class Foreign(Strategy):
    """What stands for another mechanism; `close` ends that, or is called for each of several optimizers."""

    paper = "see the mechanism"
    exact = False
    own_engine = False

    def __init__(self, name: str, model: nn.Module, optimizer: Any, close: Callable[[], None]) -> None:
        super().__init__()
        self.name = name  # type: ignore[misc]
        self.model, self.optimizer = model, optimizer
        self._attached = True
        self.also(close)

    def also(self, close: Callable[[], None]) -> None:
        """Another optimizer of the same model, which is a run of its own."""
        self._undo.callback(close)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        return self.optimizer.step(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        parts = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for part in parts:
            part.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for part in parts:
                part.set_requires_gradient_sync(True, recurse=False)

    def optimizer_state(self) -> State:
        state: State = gathered(self.optimizer.state_dict())
        return state

    def load_optimizer_state(self, state: State) -> None:
        self.optimizer.load_state_dict(optimizer_parts(self.optimizer, state))
