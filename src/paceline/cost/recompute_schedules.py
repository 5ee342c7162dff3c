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
    """The fastest schedules of a chain for every amount of memory: bytes beside what lives before the step.

    With C(s, t, m) the seconds of both passes over links s to t with m bytes, the input of s apart:

        C(s, t, m) = min of
          forward(s) + C(s+1, t, m - saved(s)) + backward(s)                    keep what s saves
          forward(s..k) + C(k+1, t, m - output(k)) + C(s, k, m)   for every k   one checkpoint from s to k

    each where the bytes of its parts fit. Of the whole chain, a link may also keep the results of its dear
    operators alone: the first line with selective(s) in place of saved(s), and selective_s(s) more. Not
    within a checkpoint: torch would keep them from the first run on. Memory is a grid of `STEPS`; sizes are
    rounded up to it.
    """

    def __init__(self, chain: Sequence[ChainLink], most: float, steps: int = STEPS) -> None:
        self.chain = tuple(chain)
        self.unit = max(1.0, most) / steps
        self.steps = steps
        n = len(self.chain)
        self._forward = np.cumsum([0.0, *(link.forward_s for link in self.chain)])
        # gradients that are there once the links from one on have gone back
        self._gradients = np.cumsum([0.0, *(link.gradients for link in reversed(self.chain))])[::-1]
        # the last link of the longest checkpoint that begins at each
        self._reach = [self._last_of_span(first) for first in range(n)]
        self._within = _Table(n, n, steps)
        for length in range(1, n):
            for first in range(n - length + 1):
                last = first + length - 1
                self._within.put(first, last, self._options(first, last, self._within))
        #: states that reach the end of the chain
        self._whole = _Table(n, 1, steps)
        for first in reversed(range(n)):
            options = self._options(first, n - 1, self._whole)
            options.append((_SELECT, self._kept(first, n - 1, _SELECT, self._whole)))
            self._whole.put(first, n - 1, options)

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

    def _options(self, first: int, last: int, after: _Table) -> list[tuple[int, Array]]:
        """Choices for the first link of a stretch of the chain; `after` knows what follows."""
        # what comes last is computed again at once: nothing is won by not keeping it
        ends = range(first, min(self._reach[first], last - 1) + 1)
        options = [(_KEEP, self._kept(first, last, _KEEP, after))]
        return options + [(end, self._checkpointed(first, end, last, after)) for end in ends]

    def _kept(self, first: int, last: int, how: int, after: _Table) -> Array:
        """Seconds where the first link keeps what it saves, or what is dear."""
        link = self.chain[first]
        held = link.saved if how == _KEEP else link.selective
        if math.isinf(held):
            return np.full(self.steps + 1, np.inf)
        mine = link.forward_s + link.backward_s + (link.selective_s if how == _SELECT else 0.0)
        rest = np.zeros(self.steps + 1)
        if first < last:
            rest = self._shifted(after.seconds(first + 1, last), held)
        ahead = held + link.forward_extra + self._beside(last)
        back = link.saved + link.backward_extra + float(self._gradients[first])
        return self._needing(mine + rest, max(ahead, back))

    def _checkpointed(self, first: int, end: int, last: int, after: _Table) -> Array:
        """Seconds where links up to `end` are one checkpoint."""
        passed = self.chain[first : end + 1]
        before = [0.0, *(link.output for link in passed[:-1])]
        most = max(link.bare + given for link, given in zip(passed, before, strict=True))
        ahead = float(self._forward[end + 1] - self._forward[first])
        rest = self._shifted(after.seconds(end + 1, last), passed[-1].output)
        # alone in a checkpoint, a link has nothing more to leave out
        alone = end == first
        again = self._kept(first, first, _KEEP, after) if alone else self._within.seconds(first, end)
        return self._needing(ahead + rest + again, most + self._beside(last))

    def _beside(self, last: int) -> float:
        """Bytes beside a forward pass that ends with a link: gradients of the links after it, and that of its
        result, which waits for it.
        """
        if last == len(self.chain) - 1:
            return 0.0
        return float(self._gradients[last + 1]) + self.chain[last].output

    def _needing(self, seconds: Array, size: float) -> Array:
        out = seconds.copy()
        out[: min(self._cells(size), self.steps + 1)] = np.inf
        return out

    def least(self) -> float:
        """Bytes below which there is no schedule."""
        known = np.flatnonzero(np.isfinite(self._whole.seconds(0, len(self.chain) - 1)))
        return float(known[0] * self.unit) if len(known) else math.inf

    def seconds(self, memory: float) -> float:
        """Seconds of both passes with so many bytes; infinite where there is no schedule."""
        return float(self._whole.seconds(0, len(self.chain) - 1)[self._cell(memory)])

    def _cell(self, memory: float) -> int:
        return max(0, min(self.steps, math.floor(memory / self.unit + 1e-9)))

    def spans(self, memory: float) -> tuple[ChainSpan, ...]:
        """The checkpoints of the fastest schedule with so many bytes, outer ones before those within."""
        return tuple(self._spans(self._whole, 0, len(self.chain) - 1, self._cell(memory)))

    def _spans(self, table: _Table, first: int, last: int, cell: int) -> Iterator[ChainSpan]:
        choice = table.choice(first, last, cell)
        link = self.chain[first]
        if choice in (_KEEP, _SELECT):
            if choice == _SELECT:
                yield ChainSpan(first, first, selective=True)
            if first < last:
                held = link.saved if choice == _KEEP else link.selective
                yield from self._spans(table, first + 1, last, cell - self._cells(held))
        elif choice != _NONE:
            yield ChainSpan(first, choice)
            if choice > first:
                yield from self._spans(self._within, first, choice, cell)
            yield from self._spans(table, choice + 1, last, cell - self._cells(self.chain[choice].output))


class _Table:
    """Seconds, and the choice that they come from, by first and last link and memory."""

    def __init__(self, firsts: int, lasts: int, steps: int) -> None:
        self._seconds = np.full((firsts, lasts, steps + 1), np.inf)
        self._choice = np.full((firsts, lasts, steps + 1), _NONE, dtype=np.int16)
        # a table of one last link holds states that reach the end of the chain
        self._one = lasts == 1

    def _at(self, first: int, last: int) -> tuple[int, int]:
        return first, 0 if self._one else last

    def put(self, first: int, last: int, options: Sequence[tuple[int, Array]]) -> None:
        """The best of some choices; where several are as fast, the first of them."""
        times = np.array([seconds for _, seconds in options])
        best = times.argmin(axis=0)
        found = times.min(axis=0)
        numbers = np.array([number for number, _ in options], dtype=np.int16)[best]
        numbers[np.isinf(found)] = _NONE
        self._seconds[self._at(first, last)], self._choice[self._at(first, last)] = found, numbers

    def seconds(self, first: int, last: int) -> Array:
        """By memory."""
        found: Array = self._seconds[self._at(first, last)]
        return found

    def choice(self, first: int, last: int, cell: int) -> int:
        """The number of the best choice."""
        return int(self._choice[self._at(first, last)][cell])


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
