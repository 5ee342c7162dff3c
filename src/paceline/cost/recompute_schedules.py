"""Schedules that trade memory for computation on a chain of modules, as pure functions of its costs.

The chain is heterogeneous: every link has its own times and sizes. `optimal` is the dynamic programme of
Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, *Optimal checkpointing for heterogeneous chains: how to
train deep neural networks with limited memory* (arXiv:1911.13214, "rotor"), which holds the chain case of
Checkmate (Jain et al., arXiv:1910.02653), with one choice more: a link may keep the results of its dear
operators and compute the others again. Nested checkpoints of torch run its schedules as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: steps into which the range of memory is divided
STEPS = 240

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLink:
    """One module of a chain: seconds and bytes."""

    forward_s: float
    backward_s: float
    #: what it keeps for its backward pass, its result among it
    saved: float
    #: what it returns
    output: float
    #: the most that is live in its forward pass where nothing is kept; besides what is kept, in its forward
    #: and in its backward pass
    bare: float
    forward_extra: float
    backward_extra: float
    #: gradients of its parameters, which stay from its backward pass on
    gradients: float = 0.0
    #: with the results of dear operators kept: what it keeps, and what the others take to compute again
    selective: float = math.inf
    selective_s: float = math.inf
    #: a checkpoint can hold it, can begin with it, and can hold it together with the link before
    spannable: bool = True
    opens: bool = True
    follows: bool = True


@dataclass(frozen=True, slots=True)
class ChainSpan:
    """Links from `first` up to and including `last` as one checkpoint, or one link that keeps the results of
    its dear operators.
    """

    first: int
    last: int
    selective: bool = False


# -- optimal ---------------------------------------------------------------------------------------

#: choices of a state that are no end of a first checkpoint
_KEEP, _SELECT, _NONE = -1, -2, -3


class OptimalSchedules:
    """The fastest schedules of a chain for every amount of memory, in bytes beside what lives before the step.

    With C(s, t, m) the seconds of both passes over links s to t with m bytes, the input of s apart:

        C(s, t, m) = min of
          forward(s) + C(s+1, t, m - saved(s)) + backward(s)                    keep what s saves
          the same with selective(s) in place of saved(s), and selective_s(s)   keep what is dear
          forward(s..k) + C(k+1, t, m - output(k)) + C(s, k, m)   for every k   one checkpoint from s to k

    each where the bytes of its parts fit. Memory is a grid of `STEPS`; sizes are rounded up to it.
    """

    def __init__(self, chain: Sequence[ChainLink], most: float, steps: int = STEPS) -> None:
        self.chain = tuple(chain)
        self.unit = max(1.0, most) / steps
        self.steps = steps
        n = len(self.chain)
        self._seconds = np.full((n + 1, n, steps + 1), np.inf)
        self._choice = np.full((n + 1, n, steps + 1), _NONE, dtype=np.int16)
        self._forward = np.cumsum([0.0, *(link.forward_s for link in self.chain)])
        # gradients that are there once the links from one on have gone back
        self._gradients = np.cumsum([0.0, *(link.gradients for link in reversed(self.chain))])[::-1]
        # the last link of the longest checkpoint that begins at each
        self._reach = [self._last_of_span(first) for first in range(n)]
        for length in range(1, n + 1):
            for first in range(n - length + 1):
                self._solve(first, first + length - 1)

    def _last_of_span(self, first: int) -> int:
        if not (self.chain[first].spannable and self.chain[first].opens):
            return first - 1
        last = first
        while last + 1 < len(self.chain) and self.chain[last + 1].follows and self.chain[last + 1].spannable:
            last += 1
        return last

    def _cells(self, size: float) -> int:
        return math.ceil(size / self.unit - 1e-9)

    def _shifted(self, values: Array, size: float) -> Array:
        """Values with so many bytes less."""
        cells = self._cells(size)
        out = np.full_like(values, np.inf)
        if cells <= self.steps:
            out[cells:] = values[: self.steps + 1 - cells]
        return out

    def _solve(self, first: int, last: int) -> None:
        best, choice = self._kept(first, last, _KEEP), np.full(self.steps + 1, _KEEP, dtype=np.int16)
        options = [(_SELECT, self._kept(first, last, _SELECT))]
        options += [(end, self._checkpointed(first, end, last)) for end in self._ends(first, last)]
        for number, seconds in options:
            better = seconds < best
            best = np.where(better, seconds, best)
            choice[better] = number
        choice[np.isinf(best)] = _NONE
        self._seconds[first, last], self._choice[first, last] = best, choice

    def _ends(self, first: int, last: int) -> range:
        # what comes last is computed again at once: nothing is won by not keeping it
        return range(first, min(self._reach[first], last - 1) + 1)

    def _kept(self, first: int, last: int, how: int) -> Array:
        """Seconds where the first link keeps what it saves, or what is dear."""
        link = self.chain[first]
        held = link.saved if how == _KEEP else link.selective
        if math.isinf(held):
            return np.full(self.steps + 1, np.inf)
        later = float(self._gradients[last + 1])
        mine = link.forward_s + link.backward_s + (link.selective_s if how == _SELECT else 0.0)
        rest = np.zeros(self.steps + 1)
        if first < last:
            rest = self._shifted(self._seconds[first + 1, last], held)
        ahead = held + link.forward_extra + later
        back = link.saved + link.backward_extra + float(self._gradients[first])
        return self._needing(mine + rest, max(ahead, back))

    def _checkpointed(self, first: int, end: int, last: int) -> Array:
        """Seconds where links up to `end` are one checkpoint."""
        passed = self.chain[first : end + 1]
        before = [0.0, *(link.output for link in passed[:-1])]
        most = max(link.bare + given for link, given in zip(passed, before, strict=True))
        ahead = float(self._forward[end + 1] - self._forward[first])
        after = self._shifted(self._seconds[end + 1, last], passed[-1].output)
        # alone in a checkpoint, a link has nothing more to leave out
        again = self._kept(first, first, _KEEP) if end == first else self._seconds[first, end]
        return self._needing(ahead + after + again, most + float(self._gradients[last + 1]))

    def _needing(self, seconds: Array, size: float) -> Array:
        out = seconds.copy()
        out[: min(self._cells(size), self.steps + 1)] = np.inf
        return out

    def least(self) -> float:
        """Bytes below which there is no schedule."""
        known = np.flatnonzero(np.isfinite(self._seconds[0, len(self.chain) - 1]))
        return float(known[0] * self.unit) if len(known) else math.inf

    def seconds(self, memory: float) -> float:
        """Seconds of both passes with so many bytes; infinite where there is no schedule."""
        return float(self._seconds[0, len(self.chain) - 1, self._cell(memory)])

    def _cell(self, memory: float) -> int:
        return max(0, min(self.steps, math.floor(memory / self.unit + 1e-9)))

    def spans(self, memory: float) -> tuple[ChainSpan, ...]:
        """The checkpoints of the fastest schedule with so many bytes, outer ones before those within."""
        return tuple(self._spans(0, len(self.chain) - 1, self._cell(memory)))

    def _spans(self, first: int, last: int, cell: int) -> Iterator[ChainSpan]:
        choice = int(self._choice[first, last, cell])
        link = self.chain[first]
        if choice in (_KEEP, _SELECT):
            if choice == _SELECT:
                yield ChainSpan(first, first, selective=True)
            if first < last:
                held = link.saved if choice == _KEEP else link.selective
                yield from self._spans(first + 1, last, cell - self._cells(held))
        elif choice != _NONE:
            yield ChainSpan(first, choice)
            if choice > first:
                yield from self._spans(first, choice, cell)
            yield from self._spans(choice + 1, last, cell - self._cells(self.chain[choice].output))


# -- square root -----------------------------------------------------------------------------------


def square_root(chain: Sequence[ChainLink]) -> tuple[ChainSpan, ...]:
    """Checkpoints of about the square root of the number of links, the last of them left out (Chen et al.,
    *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174).
    """
    count = sum(link.spannable for link in chain)
    pieces = list(_pieces(chain, max(1, math.isqrt(count))))
    return tuple(piece for piece in pieces if piece.last < len(chain) - 1 and piece != pieces[-1])


def _pieces(chain: Sequence[ChainLink], size: int) -> Iterator[ChainSpan]:
    """The chain in spans of at most so many links."""
    cuts = [0]
    for i in range(1, len(chain)):
        joined = chain[i].follows and chain[i].spannable and chain[i - 1].spannable
        full = i - cuts[-1] >= size and chain[i].opens
        if not joined or full:
            cuts.append(i)
    for first, after in pairwise([*cuts, len(chain)]):
        if chain[first].spannable and chain[first].opens:
            yield ChainSpan(first, after - 1)


def all_pieces(chain: Sequence[ChainLink], size: int) -> tuple[ChainSpan, ...]:
    """The whole chain in checkpoints of at most so many links."""
    return tuple(_pieces(chain, size))
