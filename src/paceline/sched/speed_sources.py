"""Where the speed of a job comes from, in samples per second: Paceline's predictor, a profile of one or two
nodes, or a measured table.

`Goodput` makes a `Speed` of a source: samples at the job's batch, or, for policies that adapt batches, at the
batch of the best goodput. A sample counts less the larger the batch: with gradient noise scale s, (s + b0) /
(s + b) of one at the batch b0 that the job was planned for (McCandlish et al. 2018). What a source says of
each size is kept in a plain table (`tabulated`), which is all that a live scheduler stores: it decides the
same after a restart, whatever became of the profile or the predictor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import DataError, PlanError, SpecError, UnknownName
from paceline.sched.nodes import ClusterShape
from paceline.sched.speed import OnePhaseSpeed, packed

if TYPE_CHECKING:
    from paceline.queueing.profile import JobProfile
    from paceline.queueing.synchronous import SynchronousModel

#: by kind and devices: work per second and batch as planned, and the same at the batch of the best goodput
Rows = Mapping[str, Mapping[str, tuple[float, float, float, float]]]
#: parameter servers: the modes in which a step waits for all workers
TOGETHER = ("sync", "backup")


class SpeedSource(ABC):
    """Samples per second of a job. A size at which it cannot run has none, and `why` says why."""

    __slots__ = ()

    @abstractmethod
    def samples_per_s(self, counts: tuple[int, ...], kind: str, batch: float) -> float:
        """On `counts` devices per node of that kind, `batch` samples a step in all; 0 where it cannot run."""

    def batch(self, devices: int, planned: float) -> float:
        """Samples of a step in all; a job keeps the batch it was planned for."""
        return planned

    def why(self, counts: tuple[int, ...], kind: str) -> str:
        """What keeps it from running there."""
        return "it cannot run there"


@dataclass(frozen=True, slots=True, eq=False)
class PredictedSpeed(SpeedSource):
    """A model that Paceline predicts, under a plan whose data-parallel degree follows the size; the batch is
    the same at every size.
    """

    model: str
    plan: str = ""
    #: the device of kinds that the catalog does not know, and the network between nodes (`100 Gb/s`)
    device: str = ""
    network: str = ""
    #: how a model outside the catalog of transformers is captured
    options: Mapping[str, Any] = field(default_factory=dict)
    _memo: dict[tuple[tuple[int, ...], str, float], float] = field(default_factory=dict, repr=False)
    _why: dict[tuple[tuple[int, ...], str], str] = field(default_factory=dict, repr=False)

    def samples_per_s(self, counts: tuple[int, ...], kind: str, batch: float) -> float:
        key = (counts, kind, batch)
        if key not in self._memo:
            try:
                self._memo[key] = batch / self._step_s(counts, kind, int(batch))
            except PlanError as error:
                self._memo[key] = 0.0
                self._why[counts, kind] = str(error)
        return self._memo[key]

    def why(self, counts: tuple[int, ...], kind: str) -> str:
        return self._why.get((counts, kind), "it cannot run there")

    def _step_s(self, counts: tuple[int, ...], kind: str, batch: int) -> float:
        """Seconds of a step, in micro-batches as large as memory allows unless the plan says how large."""
        from paceline import api
        from paceline.spec.plan import Plan

        devices, plan = sum(counts), Plan.parse(self.plan)
        each = plan.replica_ranks
        ranks, left = divmod(devices, each)
        if left:
            raise PlanError(f"plan {self.plan!r} runs on multiples of {each} devices, got {devices}")
        if batch % ranks:
            raise PlanError(f"{devices} devices do not share a batch of {batch} evenly")
        micro = plan.mbs or batch // ranks
        while True:
            words = f"{self.plan} gbs={batch}" + ("" if plan.mbs else f" mbs={micro}")
            found = api.predict(self.model, cluster=self._cluster(counts, kind), plan=words, **self.options)
            if found.fit.fits:
                return float(found.step_s)
            if plan.mbs or micro == 1:
                raise PlanError(
                    f"{self.model} does not fit: {found.fit.needed_bytes / 1e9:.0f} GB on a device of "
                    f"{found.fit.available_bytes / 1e9:.0f} GB"
                )
            micro = next(m for m in range(micro // 2, 0, -1) if batch // ranks % m == 0)

    def _cluster(self, counts: tuple[int, ...], kind: str) -> str:
        device = self._device(kind)
        if len(counts) == 1:
            return f"1x{counts[0]}x{device}"
        if not self.network:
            raise SpecError(
                f"{sum(counts)} devices are on {len(counts)} nodes: say how these are connected, such as"
                f' network = "100 Gb/s", or give the job at most {max(counts)} devices'
            )
        return f"{len(counts)}x{max(counts)}x{device}@{self.network.replace(' ', '')}/node"

    def _device(self, kind: str) -> str:
        from paceline.catalog import devices

        try:
            return devices.get(kind).name
        except UnknownName:
            if self.device:
                return devices.get(self.device).name
            raise SpecError(
                f"the predictor does not know devices of kind {kind!r}; say what they are, such as device ="
                ' "a100-sxm-80gb" (paceline devices lists all)'
            ) from None


@dataclass(frozen=True, slots=True, eq=False)
class AllReduceSpeed(SpeedSource):
    """Synchronous data parallelism, fitted to steps measured on one and two nodes
    (`queueing.synchronous`).
    """

    model: SynchronousModel

    def samples_per_s(self, counts: tuple[int, ...], kind: str, batch: float) -> float:
        from paceline.sched.throughput import ProfiledSpeed

        return ProfiledSpeed(self.model, int(batch)).rate(counts, "", 0, False)

    @staticmethod
    def read(path: Path) -> AllReduceSpeed:
        """From a CSV file of measured steps: columns nodes, replicas, batch (samples on each replica),
        step_s; optionally widest.
        """
        from paceline.queueing.synchronous import MeasuredStep, SynchronousModel
        from paceline.spec.tables import csv_rows

        rows = []
        for number, row in enumerate(csv_rows(path, ("nodes", "replicas", "batch", "step_s")), 2):
            try:
                nodes, replicas = int(row["nodes"]), int(row["replicas"])
                widest = int(row.get("widest") or -(-replicas // nodes))
                rows.append(
                    MeasuredStep(
                        nodes=nodes,
                        replicas=replicas,
                        widest=widest,
                        batch=float(row["batch"]),
                        step_s=float(row["step_s"]),
                    )
                )
            except (TypeError, ValueError, ZeroDivisionError):
                raise DataError(
                    f"{path}: line {number}: nodes and replicas are whole numbers, batch and step_s numbers"
                    " above zero"
                ) from None
        return AllReduceSpeed(SynchronousModel.fit(rows))


@dataclass(frozen=True, slots=True, eq=False)
class ServerSpeed(SpeedSource):
    """Workers and parameter servers, by the queueing model of a profile; each device is a worker with the
    batch that was profiled.
    """

    profile: JobProfile
    _memo: dict[int, float] = field(default_factory=dict, repr=False)

    def samples_per_s(self, counts: tuple[int, ...], kind: str, batch: float) -> float:
        from paceline.queueing.estimate import fine

        workers = sum(counts)
        if workers not in self._memo:
            self._memo[workers] = fine(self.profile, workers)[0] * self.profile.batch
        return self._memo[workers]

    def batch(self, devices: int, planned: float) -> float:
        return self.profile.batch * (devices if self.profile.mode in TOGETHER else 1)


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRates(SpeedSource):
    """A measured table: samples per second by devices, between sizes a straight line."""

    rates: Mapping[int, float]

    def samples_per_s(self, counts: tuple[int, ...], kind: str, batch: float) -> float:
        from paceline.sched.speed import RateTable

        return RateTable({kind: self.rates}).rate(counts, kind, 0, False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Goodput:
    """Work per second from a source: samples, weighted by what they count, over the samples that make a unit
    of work.
    """

    source: SpeedSource
    #: samples of a step that the job was planned for, and the most that it can use (for policies that adapt
    #: it)
    planned: float = 1.0
    most: float = 0.0
    #: gradient noise scale in samples; 0: not known, and then every sample counts the same
    noise_scale: float = 0.0
    samples_per_unit: float = 1.0

    def best(self, counts: tuple[int, ...], kind: str, adaptive: bool = False) -> tuple[float, float]:
        """(work per second, batch) on these devices; of an adaptive job at the batch, among doublings of the
        planned one, of most goodput.
        """
        batches = [self.source.batch(sum(counts), self.planned)]
        while adaptive and self.noise_scale and 2 * batches[-1] <= self.most:
            batches.append(2 * batches[-1])
        return max((self.rate(counts, kind, batch), batch) for batch in batches)

    def rate(self, counts: tuple[int, ...], kind: str, batch: float) -> float:
        """Work per second at that batch."""
        return (
            self.source.samples_per_s(counts, kind, batch)
            * worth(batch, self.planned, self.noise_scale)
            / self.samples_per_unit
        )

    def tabulated(self, sizes: Iterable[int], asked: int, shape: ClusterShape) -> Rows:
        """What it says of each size on each kind of a cluster, packed onto as few nodes as hold it.

        Sizes that cannot run are left out.
        """
        out: dict[str, dict[str, tuple[float, float, float, float]]] = {}
        sizes = sorted({*sizes, asked})
        for kind in sorted(set(shape.kinds)):
            held = [
                devices for devices, other in zip(shape.devices, shape.kinds, strict=True) if other == kind
            ]
            each = max(held)
            here = [
                n for n in sizes if n <= sum(held) and (n <= each or n % each == 0 or n in (sizes[0], asked))
            ]
            found = {
                n: (*self.best(packed(n, each), kind), *self.best(packed(n, each), kind, True)) for n in here
            }
            if asked in found and not found[asked][0] > 0:
                raise SpecError(
                    f"no speed on {asked} devices of kind {kind!r}:"
                    f" {self.source.why(packed(asked, each), kind)}"
                )
            out[kind] = {str(n): row for n, row in found.items()}
        # a policy may put a size onto any kind that has so many devices: it must run on all of these
        bad = {n for rows in out.values() for n, row in rows.items() if not row[0] > 0}
        return {kind: {n: row for n, row in rows.items() if n not in bad} for kind, rows in out.items()}


def worth(batch: float, planned: float, noise_scale: float) -> float:
    """What a sample counts at a batch, over one at the planned batch; 1 where the noise scale is not
    known.
    """
    return (noise_scale + planned) / (noise_scale + batch) if noise_scale else 1.0


@dataclass(frozen=True, slots=True)
class TabulatedSpeed(OnePhaseSpeed):
    """The table of `Goodput.tabulated` as a speed: only at its sizes."""

    rows: Rows

    def row(self, devices: int, kind: str) -> tuple[float, float, float, float]:
        """Of one size; zeros where it cannot run."""
        table = self.rows.get(kind) or (next(iter(self.rows.values())) if not kind and self.rows else {})
        found = table.get(str(devices), (0.0, 0.0, 0.0, 0.0))
        return found[0], found[1], found[2], found[3]

    def sizes(self) -> list[int]:
        """Those at which it can run, from the smallest."""
        return sorted({int(n) for rows in self.rows.values() for n in rows})

    def rate(self, counts: tuple[int, ...], kind: str, phase: int, adaptive: bool) -> float:
        found = self.row(sum(counts), kind)[2 if adaptive else 0]
        return found if math.isfinite(found) else 0.0
