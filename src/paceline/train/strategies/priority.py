"""All-reduce of gradients in pieces; all ranks update everything, hidden under the next forward pass. The
layers that it needs first go first.

Synchronous SGD, exactly, with a plain first step, as `overlap` has it.

Jayarajan et al., Priority-based Parameter Propagation, SysML 2019; Peng et al., SOSP 2019.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.train.strategies.deferral import Deferred
from paceline.train.strategies.parts import DeferredPart, PiecePart


class Priority(Deferred):
    """All-reduce in pieces; bottom layers, which the next forward pass needs first, overtake where they can.

    Which can is found once, by playing the first backward pass on the link found here: whenever the link is
    free, of the pieces that are ready the one needed first goes. The order found holds for all ranks and
    steps.
    """

    name = "priority"
    paper = "Jayarajan et al., SysML 2019; Peng et al., SOSP 2019"
    shares = False

    def _order(
        self, ready: Sequence[DeferredPart], when: Mapping[DeferredPart, float]
    ) -> Sequence[DeferredPart]:
        if self.world == 1:
            return ready
        sent = 2 * (self.world - 1) / self.world / self._here.reduce_Bps
        sizes = [part.piece.bytes if isinstance(part, PiecePart) else 0 for part in ready]
        seconds = [self._here.latency_s + sent * size for size in sizes]
        ready_s, need = [when[part] for part in ready], [self.parts.index(part) for part in ready]
        return [ready[i] for i in urgent_first(ready_s, need, seconds)]


def urgent_first(ready_s: Sequence[float], need: Sequence[float], seconds: Sequence[float]) -> list[int]:
    """The order in which parts travel: whenever the link is free, of those that are ready the one needed
    first.
    """
    waiting, order, now = sorted(range(len(need)), key=ready_s.__getitem__), list[int](), 0.0
    while waiting:
        now = max(now, ready_s[waiting[0]])
        part = min((i for i in waiting if ready_s[i] <= now), key=need.__getitem__)
        waiting.remove(part)
        order.append(part)
        now += seconds[part]
    return order
