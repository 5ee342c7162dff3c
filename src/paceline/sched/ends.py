"""Ends before success, as a distribution: what share of jobs is killed or fails, and how far they get.

A job's end is drawn over the share of its work that it does. `Ends` gives the probability of reaching success
and the expected share of work from any point on, so a policy can weigh a job by what it will really cost and
by how likely it is to be worth it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.errors import SpecError


@dataclass(frozen=True, slots=True)
class Ends:
    """Ends at `shares[i]` of the work with `probabilities[i]`; the rest, at 1, is success."""

    shares: tuple[float, ...]
    probabilities: tuple[float, ...]
    #: survival and expected remaining work at each share (computed)
    _alive: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _tail: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shares, probabilities = self.shares, self.probabilities
        if len(shares) != len(probabilities) or not (
            all(p >= 0 for p in probabilities) and sum(probabilities) <= 1 + 1e-9
        ):
            raise SpecError(
                "early ends need one probability, not negative, for each share, and at most 1 in all"
            )
        if list(shares) != sorted(shares) or any(not 0 < s < 1 for s in shares):
            raise SpecError(f"early ends need rising shares between 0 and 1, got {shares!r}")
        alive = [1.0]
        for p in probabilities:
            alive.append(max(0.0, alive[-1] - p))
        edges = [0.0, *shares, 1.0]
        tail = [0.0]
        for i in range(len(edges) - 2, -1, -1):
            tail.append(tail[-1] + alive[i] * (edges[i + 1] - edges[i]))
        object.__setattr__(self, "_alive", tuple(alive))
        object.__setattr__(self, "_tail", tuple(reversed(tail)))

    @property
    def success(self) -> float:
        """Probability that a new job does all of its work."""
        return self._alive[-1]

    def success_from(self, share: float) -> float:
        """Probability of success of a job that has done that share of its work."""
        alive = self._alive[bisect_right(self.shares, share)]
        return self.success / alive if alive > 0 else 1.0

    def left_from(self, share: float) -> float:
        """Expected share of its work that such a job will still do, whether it succeeds or not."""
        i = bisect_right(self.shares, share)
        if self._alive[i] <= 0:
            return max(0.0, 1 - share)
        edge = self.shares[i] if i < len(self.shares) else 1.0
        return max(0.0, edge - share) + self._tail[i + 1] / self._alive[i]

    def checkpoint_after(self, share: float) -> float:
        """The next share at which some jobs end (1: success)."""
        i = bisect_right(self.shares, share)
        return self.shares[i] if i < len(self.shares) else 1.0

    def draw(self, uniform: float) -> float:
        """The share at which a job with that uniform number ends; 1 is success."""
        total = 0.0
        for share, p in zip(self.shares, self.probabilities, strict=True):
            total += p
            if uniform < total:
                return share
        return 1.0


def geometric(failing: float, early: float = 0.5, points: int = 12, first: float = 0.01) -> Ends:
    """`failing` of the jobs end early, at shares spaced evenly in logarithm from `first`; `early`: exponent,
    1 puts as many in each decade.

    The density over log share grows as share ** early, so a small exponent means that most ends come soon.
    """
    if not 0 <= failing < 1:
        raise SpecError(f"the share of jobs that end early must be in [0, 1), got {failing!r}")
    shares = [math.exp(math.log(first) * (1 - (i + 0.5) / points)) for i in range(points)]
    weights = [share**early for share in shares]
    whole = sum(weights)
    return Ends(tuple(shares), tuple(failing * w / whole for w in weights))


def empirical(observed: Sequence[float], points: int = 20) -> Ends:
    """From the shares of work that past jobs did (1: success)."""
    if not observed:
        raise SpecError("early ends need at least one observed job")
    early = sorted(share for share in observed if share < 1)
    if not early:
        return Ends((), ())
    groups = [early[i * len(early) // points : (i + 1) * len(early) // points] for i in range(points)]
    found: dict[float, float] = {}
    for group in groups:
        if group:
            middle = min(max(group[len(group) // 2], 1e-9), 1 - 1e-9)
            found[middle] = found.get(middle, 0.0) + len(group) / len(observed)
    return Ends(tuple(sorted(found)), tuple(found[s] for s in sorted(found)))
