"""Synchronous data parallelism from measured steps on one and two nodes: local work, a collective over the
network, a barrier.

    step = (local**p + network**p) ** (1/p)    p = 1: nothing overlaps, large: all of it does
    network = transfer * 2 (N-1)/N * pair(N) * (1 + sharing * (replicas/N - 1)) * (1 + spread * slowest(N))

`local` is the measured step of one node with as many replicas, by batch: what replicas of one node cost each
other (host, PCIe, intra-node reduction) is in it. 2 (N-1)/N is the share of the gradient that each node sends
in a ring. `pair(2) = 2`: between two nodes both directions of the ring use the one connection of that pair,
which moves one direction at a time in effect (gloo, and NCCL over sockets; see docs/asynchronous.md), so two
nodes are slower than three. `sharing` is what further replicas on a node add to its traffic and host work.
`spread` is the relative deviation of the network's time, taken from the fit's own residuals: a ring goes at
the pace of its slowest link, and the slowest of N normal deviations is `order.slowest_normal(N)` of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from paceline.errors import DataError, SpecError
from paceline.queueing.fit import Vector, least_squares
from paceline.queueing.order_statistics import slowest_normal

#: two nodes send both directions of a ring over one connection
PAIR = 2.0
_ROBUST = 0.1  # residuals of the logarithm: beyond 10 % a row weighs by its magnitude only


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One measured step: `replicas` over `nodes`, at most `widest` of them on one node, `batch` samples per
    replica.
    """

    nodes: int
    replicas: int
    widest: int
    batch: float
    step_s: float

    def __post_init__(self) -> None:
        if not (
            1 <= self.nodes <= self.replicas
            and 1 <= self.widest <= self.replicas
            and self.step_s > 0
            and self.batch > 0
        ):
            raise SpecError(
                f"a measured step needs 1 <= nodes <= replicas, a batch and a time above zero, got {self}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousModel:
    """Step time of one job for any number of nodes, replicas and samples per replica."""

    #: replicas on the node -> (batches, seconds), both ascending in batch
    local: Mapping[int, tuple[tuple[float, ...], tuple[float, ...]]]
    transfer_s: float = 0.0
    sharing: float = 0.0
    overlap: float = 1.0
    spread: float = 0.0

    @classmethod
    def fit(cls, rows: Iterable[MeasuredStep]) -> SynchronousModel:
        """From measured steps of one node and, for the network, of two or more (two suffice)."""
        rows = list(rows)
        alone = [row for row in rows if row.nodes == 1]
        if not any(row.replicas == 1 for row in alone):
            raise DataError(
                f"a synchronous model needs steps of one replica on one node, got {len(rows)} rows"
                " without one"
            )
        model = cls(local=_tables(alone))
        far = [row for row in rows if row.nodes > 1]
        return model._with_network(far) if far else model

    def _with_network(self, rows: Sequence[MeasuredStep]) -> SynchronousModel:
        nodes, replicas, widest = (
            np.array([getattr(row, name) for row in rows], dtype=float)
            for name in ("nodes", "replicas", "widest")
        )
        local: Vector = self.local_s(np.array([row.batch for row in rows]), widest)
        measured = np.array([row.step_s for row in rows])
        scale = float(np.log(np.median(measured)))
        spread, x = 0.0, np.zeros(3)
        for _ in range(4):  # the spread is what the fit leaves over, and shifts the fit in turn
            barrier = 1 + spread * _slowest(nodes)

            def network(x: Vector, barrier: Vector = barrier) -> Vector:
                out: Vector = (
                    np.exp(x[1]) * _ring(nodes) * (1 + float(np.exp(x[2])) * (replicas / nodes - 1)) * barrier
                )
                return out

            def residuals(x: Vector) -> Vector:
                return np.asarray(np.log(_overlapped(local, network(x), 1 + np.exp(x[0])) / measured))

            x, _ = min(
                (
                    least_squares(residuals, (start, scale - 1, -1.0), (-8, -25, -12), (2.2, 25, 5), _ROBUST)
                    for start in (0.0, 1.5)
                ),
                key=lambda found: found[1],
            )
            power = 1 + np.exp(x[0])
            # how much a relative change of the network moves the step: where it hides behind compute its
            # residual says nothing
            weight = (network(x) / _overlapped(local, network(x), power)) ** power
            spread = float(np.sqrt(np.sum((residuals(x) * weight) ** 2) / np.sum(weight**4)))
        return replace(
            self,
            transfer_s=float(np.exp(x[1])),
            sharing=float(np.exp(x[2])),
            overlap=float(1 + np.exp(x[0])),
            spread=spread,
        )

    def local_s(self, batch: Vector | float, widest: Vector | int) -> Vector:
        """Seconds of a step on one node with `widest` replicas of `batch` samples each."""
        batch, widest = np.broadcast_arrays(np.asarray(batch, float), np.asarray(widest))
        out = np.empty(batch.shape)
        for count in np.unique(widest):
            here = widest == count
            out[here] = self._local(int(count), batch[here])
        return out

    def _local(self, count: int, batch: Vector) -> Vector:
        """One replica's step, and what `count` on a node add to it; counts that were not measured lie on a
        line between those that were.
        """
        alone = _line(batch, *self.local[1])
        added = {1: np.zeros_like(alone)}
        for known, (batches, times) in self.local.items():
            if known > 1:
                extra = np.asarray(times) - _line(np.asarray(batches), *self.local[1])
                added[known] = np.interp(batch, batches, extra)
        if count in added:
            return alone + added[count]
        counts = sorted(added)
        if len(counts) == 1:
            return alone
        low, high = (
            (counts[-2], counts[-1])
            if count > counts[-1]
            else max(pair for pair in pairwise(counts) if pair[0] < count)
        )
        return np.maximum(
            alone + added[low] + (added[high] - added[low]) * (count - low) / (high - low), alone * 0.5
        )

    def network_s(self, nodes: Vector | int, replicas: Vector | int) -> Vector:
        """Seconds of the collective over the network, before any of it hides behind compute."""
        nodes, replicas = np.asarray(nodes), np.asarray(replicas)
        barrier = 1 + self.spread * _slowest(nodes)
        return np.where(
            nodes > 1,
            self.transfer_s * _ring(nodes) * (1 + self.sharing * (replicas / nodes - 1)) * barrier,
            0.0,
        )

    def step_s(
        self,
        nodes: Vector | int,
        replicas: Vector | int,
        batch: Vector | float,
        widest: Vector | int | None = None,
    ) -> Vector:
        """Seconds per step; arguments broadcast. `widest`: replicas on the fullest node, those of an even
        placement unless given.
        """
        nodes, replicas = np.asarray(nodes), np.asarray(replicas)
        return _overlapped(
            self.local_s(batch, -(-replicas // nodes) if widest is None else widest),
            self.network_s(nodes, replicas),
            self.overlap,
        )

    def throughput(
        self,
        nodes: Vector | int,
        replicas: Vector | int,
        batch: Vector | float,
        widest: Vector | int | None = None,
    ) -> Vector:
        """Samples per second of the whole job."""
        return np.asarray(
            np.asarray(replicas) * np.asarray(batch, float) / self.step_s(nodes, replicas, batch, widest)
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "local": {
                str(count): [list(batches), list(times)] for count, (batches, times) in self.local.items()
            },
            "transfer_s": self.transfer_s,
            "sharing": self.sharing,
            "overlap": self.overlap,
            "spread": self.spread,
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> SynchronousModel:
        try:
            local = {
                int(count): (tuple(map(float, batches)), tuple(map(float, times)))
                for count, (batches, times) in raw["local"].items()
            }
            return cls(
                local=local,
                **{key: float(raw[key]) for key in ("transfer_s", "sharing", "overlap", "spread")},
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SpecError(
                f"not a synchronous model: {error!r}; write one with SynchronousModel.to_dict"
            ) from None


def _tables(rows: Sequence[MeasuredStep]) -> dict[int, tuple[tuple[float, ...], tuple[float, ...]]]:
    out = {}
    for count in sorted({row.replicas for row in rows}):
        batches = sorted({row.batch for row in rows if row.replicas == count})
        times = [
            float(np.median([row.step_s for row in rows if row.replicas == count and row.batch == batch]))
            for batch in batches
        ]
        out[count] = (tuple(batches), tuple(times))
    return out


def _line(x: Vector, xs: Sequence[float], ys: Sequence[float]) -> Vector:
    """Through the points, and on with the slope of the last two: a larger batch takes longer."""
    inside = np.interp(x, xs, ys)
    if len(xs) < 2:
        return inside
    slope = max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))
    return np.where(x > xs[-1], ys[-1] + slope * (x - xs[-1]), inside)


def _ring(nodes: Vector) -> Vector:
    """What a node sends of each byte of gradient in a ring over `nodes`, twice where two nodes share one
    connection.
    """
    return 2 * (nodes - 1) / nodes * np.where(nodes == 2, PAIR, 1.0)


def _slowest(nodes: Vector) -> Vector:
    known, where = np.unique(nodes, return_inverse=True)
    return np.array([slowest_normal(int(n)) for n in known])[where].reshape(nodes.shape)


def _overlapped(local: Vector, network: Vector, power: float) -> Vector:
    longer, shorter = np.maximum(local, network), np.minimum(local, network)
    return longer * (1 + (shorter / longer) ** power) ** (1 / power)
