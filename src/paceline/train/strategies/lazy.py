"""Lazy update of the bottom layers: their gradients add up for a few steps and then travel as one message.

The bottom layers' gradients are ready last, so that no computation is left to hide them under; that is where
an all-reduce shows. Layers above are treated as `priority` does. The interval adapts to what adding up does
to the gradient: with A what has been added up (its mean over ranks) and G the latest, it grows by one where G
points the way of A and is not small against it, and shrinks where neither holds:

    direction    |G - A|^2 + |G|^2 <= |A|^2
    magnitude    count |G|^2 <= |A|^2

Bytes per step: those of the upper layers, and of the lower 1 / interval. Synchronous SGD with a larger batch
for some layers: not exact.

Lee et al., lazy parameter update, Journal of Parallel and Distributed Computing 2022.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import RunError, SpecError
from paceline.train.comm import Collective, single
from paceline.train.strategies.arrangement import Arrangement
from paceline.train.strategies.base import State
from paceline.train.strategies.deferral import Deferred
from paceline.train.strategies.parts import DeferredPart, PiecePart


class Lazy(Deferred):
    """`share`: of the gradient bytes, counted from the bottom, that are lazy; `most`: the longest interval;
    `adapt=False` keeps `interval`.
    """

    name = "lazy"
    paper = "Lee et al., JPDC 2022"
    exact = False
    shares = False

    def __init__(
        self, *, share: float = 0.3, interval: int = 2, most: int = 8, adapt: bool = True, **options: Any
    ) -> None:
        super().__init__(**options)
        if not 0 <= share <= 1 or not 1 <= interval <= most:
            raise SpecError(
                f"share is from 0 to 1 and 1 <= interval <= most; got share={share:g}, interval={interval},"
                f" most={most}"
            )
        self.share, self.interval, self.most, self.adapt = share, interval, most, adapt
        #: parts that are lazy, and their parameters
        self._lazy: list[PiecePart] = []
        self._bottom: set[nn.Parameter] = set()
        #: gradients that were added up since the last were sent
        self._count_added = 0
        #: whether there was a pass since the last step
        self._passed = False
        #: gradients of the first step
        self._first: dict[nn.Parameter, Tensor] = {}
        #: what the last lazy piece had added up before its latest gradient
        self._before: Tensor | None = None

    def scaled_by(self, scaler: Any) -> None:
        raise SpecError(
            "lazy adds gradients up over several steps, whose loss scales differ; train in bf16 or float32,"
            " or use another strategy"
        )

    def _ready(self, parameter: nn.Parameter) -> None:
        if self._passed and self._entries[parameter].kept:
            raise RunError(
                "lazy counts backward passes as steps; run all but the last of a step within"
                " paceline.train.of(model).no_sync()"
            )
        super()._ready(parameter)

    def _step(self, closure: Any = None) -> Any:
        self._passed = False
        return super()._step(closure)

    def _place(self, known: Arrangement) -> None:
        super()._place(known)
        pieces = [part for part in self.parts if isinstance(part, PiecePart)]
        held = list(accumulate(part.piece.bytes for part in pieces))  # as the forward pass needs them
        lazy = [part for part, size in zip(pieces, held, strict=True) if size <= self.share * held[-1]]
        # a parameter cut in two must not be lazy in part
        self._lazy = [
            part for part in lazy if all(set(self._entries[p].parts) <= {*lazy} for p in part.parameters)
        ]
        self._bottom = {parameter for part in self._lazy for parameter in part.parameters}
        if self._lazy:
            self._before = torch.zeros_like(self._lazy[-1].piece.grad)

    def _bring(self) -> None:
        raise RunError(
            "lazy adds gradients of the bottom layers up over several steps, so that p.grad cannot be read "
            "or changed (by clip_grad_norm_, clip_grad_value_, GradScaler...); to clip, pass clip_norm= to "
            "parallelize"
        )

    def _show(self) -> None:
        for parameter, entry in self._entries.items():
            if entry.kept:
                first, added = self._first[parameter], entry.take()
                parameter.grad = first if added is None else first + added

    def _adds(self, parameter: nn.Parameter) -> bool:
        return self._count_added > 0 and parameter in self._bottom

    @property
    def _due(self) -> bool:
        """Whether what was added up is sent in this step."""
        return self._count_added + 1 >= self.interval

    def _send(self, part: DeferredPart) -> None:
        if part not in self._lazy:
            super()._send(part)
        elif self._due:
            if self.adapt and part is self._lazy[-1]:
                self._local = self._lazy[-1].piece.grad.clone()  # the sum over ranks takes its place
            super()._send(part)

    def _done(self) -> None:
        sent = self._due  # the interval may change on the way
        super()._done()
        self._passed = True
        if (
            not self.parts
        ):  # the first step refuses what the others must refuse, though its gradients are here
            self._first = {p: p.grad for p in self._entries if p.grad is not None}
            self._hand_out()
            return
        if sent and self._lazy and self.adapt:
            self._adapt(self._lazy[-1], self._count_added + 1)
        self._count_added = 0 if sent else self._count_added + 1
        if self._count_added and self._before is not None:
            self._before.copy_(self._lazy[-1].piece.grad)

    def _adapt(self, part: PiecePart, count: int) -> None:
        """Judges the last lazy piece, whose sum of `count` gradients is on its way."""
        assert part.reduced is not None and self._before is not None
        latest = self._local - self._before if count > 1 else self._local
        part.reduced.wait()
        (mean,) = part.gradients
        numbers = torch.stack([tensor.square().sum() for tensor in (latest - mean, latest, mean)])
        self.engine.submit("interval", single(Collective("sum", [numbers]))).wait()
        apart, new, added = numbers.tolist()
        direction, magnitude = apart + new <= added, count * new <= added
        if direction and magnitude:
            self.interval = min(self.most, self.interval + 1)
        elif not direction and not magnitude:
            self.interval = max(1, self.interval - 1)

    def finish(self) -> None:
        """Sends what has been added up, and updates with it."""
        super().finish()
        if not self._count_added:
            return
        for part in self.parts:  # a pass that no step followed
            self._drop(part)
        for part in self._lazy:
            super()._send(part)
        self._count_added = 0
        self._apply()
        self.synchronize()

    def _asked(self) -> dict[str, Any]:
        return {**super()._asked(), "share": self.share}

    def state_dict(self) -> State:
        """Also what this rank has added up since it was last sent."""
        state = {**super().state_dict(), "interval": self.interval}
        if self._count_added:
            state |= {"count": self._count_added, "added": [part.piece.grad.clone() for part in self._lazy]}
        return state

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.interval, self._count_added = state["interval"], 0
        if self._before is not None and self._arrangement == Arrangement.of(state) and "count" in state:
            self._count_added = state["count"]
            for part, added in zip(self._lazy, state["added"], strict=True):
                part.piece.grad.copy_(added)
            self._before.copy_(state["added"][-1])
