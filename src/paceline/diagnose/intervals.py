"""Unions of intervals of time, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.readers.kineto import Floats


@dataclass(frozen=True, slots=True, eq=False)
class Union:
    """Times at which at least one of some intervals runs: disjoint, in order."""

    start_s: Floats
    end_s: Floats

    @staticmethod
    def of(start_s: Floats, end_s: Floats) -> Union:
        """The union of intervals in any order."""
        order = np.argsort(start_s, kind="stable")
        start, end = start_s[order], end_s[order]
        if not len(start):
            return Union(start, end)
        reached = np.maximum.accumulate(end)
        first = np.concatenate([[True], start[1:] > reached[:-1]])
        last = np.concatenate([first[1:], [True]])
        return Union(start[first], reached[last])

    @property
    def total_s(self) -> float:
        return float((self.end_s - self.start_s).sum())

    def before(self, at_s: Floats) -> Floats:
        """Seconds that run before each of some times."""
        if not len(self.start_s):
            return np.zeros_like(at_s)
        done = np.concatenate([[0.0], np.cumsum(self.end_s - self.start_s)])
        place = np.searchsorted(self.start_s, at_s, side="right")
        ran = np.minimum(at_s - self.start_s[place - 1], self.end_s[place - 1] - self.start_s[place - 1])
        return np.where(place > 0, done[place - 1] + ran, 0.0)

    def within(self, start_s: Floats, end_s: Floats) -> Floats:
        """Seconds that run within each of some intervals."""
        return self.before(end_s) - self.before(np.minimum(start_s, end_s))

    def gaps(self, start_s: float, end_s: float) -> Union:
        """What is left of one interval."""
        inside = (self.end_s > start_s) & (self.start_s < end_s)
        begins = np.concatenate([[start_s], self.end_s[inside]])
        ends = np.concatenate([self.start_s[inside], [end_s]])
        open_ = ends > begins
        return Union(begins[open_], ends[open_])
