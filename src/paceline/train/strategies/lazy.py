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

from collections.abc import Mapping
from typing import Any

import torch

from paceline.errors import RunError, SpecError
from paceline.train.comm import Collective, Job
from paceline.train.layout import Flat, Named, Slot
from paceline.train.strategies.arrangement import Arrangement
from paceline.train.strategies.deferral import Deferred
from paceline.train.strategies.parts import Part, PiecePart


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
        self._lazy: list[PiecePart] = []
        self._count_added = 0
        #: whether there was a pass since the last step
        self._passed = False
        #: gradients of the first step, by id of their parameters
        self._first: dict[int, torch.Tensor] = {}
        #: what the last lazy piece had added up before its latest gradient
        self._before: torch.Tensor | None = None

    def scaled_by(self, scaler: Any) -> None:
        raise SpecError(
            "lazy adds gradients up over several steps, whose loss scales differ; train in bf16 or float32,"
            " or use another strategy"
        )

    def _ready(self, parameter: torch.nn.Parameter) -> None:
        if self._passed and self._kept([parameter]):
            raise RunError(
                "lazy counts backward passes as steps; run all but the last of a step within"
                " paceline.train.of(model).no_sync()"
            )
        super()._ready(parameter)

    def _step(self, closure: Any = None) -> Any:
        self._passed = False
        return super()._step(closure)

    def _place(
        self, order: list[Named], factors: Mapping[str, tuple[str, int]], sizes: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        found = super()._place(order, factors, sizes)
        pieces = [part for part in self.parts if isinstance(part, PiecePart)]
        total, held = sum(part.piece.bytes for part in pieces), 0.0
        for part in pieces:  # as the forward pass needs them
            held += part.piece.bytes
            if held > self.share * total:
                break
            self._lazy.append(part)
        lazy = set(map(id, self._lazy))
        slots = {id(p) for part in self._lazy for p in part.parameters}
        # a parameter cut in two must not be lazy in part
        self._lazy = [
            part
            for part in self._lazy
            if all(id(other) in lazy for p in part.parameters for other in self._by_parameter[id(p)])
        ]
        self._lazy_parameters = slots & {id(p) for part in self._lazy for p in part.parameters}
        self._before = torch.zeros_like(self._lazy[-1].piece.grad) if self._lazy else None
        return found

    def _bring(self) -> None:
        raise RunError(
            "lazy adds gradients of the bottom layers up over several steps, so that p.grad cannot be read "
            "or changed (by clip_grad_norm_, clip_grad_value_, GradScaler...); to clip, pass clip_norm= to "
            "parallelize"
        )

    def _hide(self) -> None:
        """Has the first step refuse what the others must refuse, though its gradients are plain ones."""
        self._first = {id(p): p.grad for _, p in self.parameters if p.grad is not None}
        self._hand_out()

    def _show(self) -> None:
        for _, parameter in self.parameters:
            if self._kept([parameter]):
                first, added = self._first[id(parameter)], self._take(parameter)
                parameter.grad = first if added is None else first + added

    def _put(self, flat: Flat, slot: Slot, gradient: torch.Tensor) -> None:
        if id(slot.parameter) in self._lazy_parameters and self._count_added:
            flat.gradient(slot).add_(gradient)
        else:
            super()._put(flat, slot, gradient)

    def _put_nothing(self, flat: Flat, slot: Slot) -> None:
        # else what was added up stays
        if id(slot.parameter) not in self._lazy_parameters or not self._count_added:
            super()._put_nothing(flat, slot)

    @property
    def _due(self) -> bool:
        """Whether what was added up is sent in this step."""
        return self._count_added + 1 >= self.interval

    def _send(self, part: Part) -> None:
        if all(part is not lazy for lazy in self._lazy):
            super()._send(part)
        elif self._due:
            if self.adapt and part is self._lazy[-1]:
                self._local = self._lazy[-1].piece.grad.clone()  # the sum over ranks takes its place
            super()._send(part)

    def _done(self) -> None:
        sent = self._due  # the interval may change on the way
        super()._done()
        self._passed = True
        if not self.parts:
            self._hide()
            return
        if sent and self._lazy and self.adapt:
            self._adapt(self._local)
        self._count_added = 0 if sent else self._count_added + 1
        if self._count_added and self._before is not None:
            self._before.copy_(self._lazy[-1].piece.grad)

    def _adapt(self, local: torch.Tensor) -> None:
        """Judges the last lazy piece, whose sum is on its way: `local` is what this rank added up."""
        part, count = self._lazy[-1], self._count_added + 1
        assert part.reduced is not None and self._before is not None
        latest = local - self._before if count > 1 else local
        part.reduced.wait()
        mean = part.gradient
        numbers = torch.stack([(latest - mean).square().sum(), latest.square().sum(), mean.square().sum()])

        def job() -> Job:
            yield Collective("sum", [numbers])

        self.engine.submit("interval", job()).wait()
        apart, new, added = (float(n) for n in numbers)
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
            Deferred._send(self, part)
        self._count_added = 0
        self._apply()
        self.synchronize()

    def _asked(self) -> dict[str, Any]:
        return {**super()._asked(), "share": self.share}

    def state_dict(self) -> dict[str, Any]:
        """Also what this rank has added up since it was last sent."""
        state = {**super().state_dict(), "interval": self.interval}
        if self._count_added:
            state |= {"count": self._count_added, "added": [part.piece.grad.clone() for part in self._lazy]}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.interval, self._count_added = state["interval"], 0
        if self._before is not None and self._arrangement == Arrangement.of(state) and "count" in state:
            self._count_added = state["count"]
            for part, added in zip(self._lazy, state["added"], strict=True):
                part.piece.grad.copy_(added)
            self._before.copy_(state["added"][-1])
