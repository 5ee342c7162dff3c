"""All-reduce of gradients in pieces; all ranks update everything, hidden under the next forward pass. The
layers that it needs first go first.

Synchronous SGD, exactly, with a plain first step, as `overlap` has it.

Jayarajan et al., Priority-based Parameter Propagation, SysML 2019; Peng et al., SOSP 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from paceline.train.strategies.deferral import Deferred
from paceline.train.strategies.parts import Part, PiecePart

T = TypeVar("T")


class Priority(Deferred):
    """All-reduce in pieces; bottom layers, which the next forward pass needs first, overtake where they can.

    Which can is found once, by playing the first backward pass on the link found here: whenever the link is
    free, of the pieces that are ready the one needed first goes. The order found holds for all ranks and
    steps.
    """

    name = "priority"
    paper = "Jayarajan et al., SysML 2019; Peng et al., SOSP 2019"
    shares = False

    def _order(self, ready: Sequence[Part], when: Mapping[Part, float]) -> Sequence[Part]:
        if self.world == 1:
            return ready
        machine = self._here()
        sent = 2 * (self.world - 1) / self.world / machine.reduce_Bps

        def seconds(part: Part) -> float:
            size = part.piece.bytes if isinstance(part, PiecePart) else 0
            return machine.latency_s + sent * size

        return urgent_first(ready, ready_s=lambda part: when[part], need=self.parts.index, seconds=seconds)


def urgent_first(
    parts: Iterable[T],
    *,
    ready_s: Callable[[T], float],
    need: Callable[[T], float],
    seconds: Callable[[T], float],
) -> list[T]:
    """The order in which parts travel: whenever the link is free, of those that are ready the one needed
    first.
    """
    waiting, order, now = sorted(parts, key=ready_s), list[T](), 0.0
    while waiting:
        now = max(now, ready_s(waiting[0]))
        part = min((one for one in waiting if ready_s(one) <= now), key=need)
        waiting.remove(part)
        order.append(part)
        now += seconds(part)
    return order
