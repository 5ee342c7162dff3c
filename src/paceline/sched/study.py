"""Many simulations: policies, loads and seeds, one after the other or over processes, with the same
results.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from paceline import extend, on_ray
from paceline.errors import SpecError
from paceline.sched import early_termination, policies, traces
from paceline.sched.job import Job
from paceline.sched.metrics import ScheduleResult, interval
from paceline.sched.nodes import ClusterShape
from paceline.sched.policy import Policy
from paceline.sched.simulate import SimulationSettings, simulate

#: called with jobs over and jobs in all
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySetup:
    """One simulation, in words: it can be sent to another process."""

    trace: str
    policy: str
    #: None: the cluster that the trace was meant for
    cluster: str | None = None
    jobs: int | None = None
    #: offered load; None: arrivals as they are (for generated lists 0.9)
    load: float | None = None
    #: published shares of early ends, by cluster; None: every job succeeds
    early_termination: str | None = None
    seed: int = 0
    #: seconds; None: as the trace or the policy says
    restart_s: float | None = None
    interval_s: float | None = None
    placement: str | None = None
    interference: float = 0.0
    node_mtbf_s: float = 0.0
    data: str | None = None

    def prepare(self) -> tuple[traces.Trace, ClusterShape]:
        """The job list and the cluster."""
        trace = traces.load(
            self.trace,
            count=self.jobs,
            data=Path(self.data) if self.data else None,
            seed=self.seed,
            cluster=self.cluster,
        )
        shape = ClusterShape.parse(self.cluster or trace.cluster)
        most = max(
            sum(d for d, k in zip(shape.devices, shape.kinds, strict=True) if k == kind)
            for kind in set(shape.kinds)
        )
        if any(job.devices > most for job in trace.jobs):
            trace = replace(trace, jobs=tuple(_cut(job, most) for job in trace.jobs))
        if self.restart_s is not None:
            trace = replace(trace, jobs=tuple(replace(job, restart_s=self.restart_s) for job in trace.jobs))
        load = (
            0.9
            if self.load is None and self.trace in ("philly-like", "trials") and len(trace.jobs) > 1
            else self.load
        )
        if self.early_termination is not None:
            trace = early_termination.apply(
                trace, early_termination.get(self.early_termination), seed=self.seed
            )
        if load is not None:
            trace = trace.scaled(load, shape.total)
        return trace, shape

    def make_policy(self) -> Policy:
        """A fresh policy with this setup's options."""
        policy = policies.get(self.policy)
        if self.interval_s is not None:
            policy.interval_s = self.interval_s
        if self.placement is not None:
            policy.placement = self.placement
        return policy

    def run(
        self, *, log: bool = False, gantt: bool = False, progress: Progress | None = None
    ) -> ScheduleResult:
        """Simulates it."""
        trace, shape = self.prepare()
        settings = SimulationSettings(
            clock_s=trace.clock_s,
            interference=self.interference,
            node_mtbf_s=self.node_mtbf_s,
            seed=self.seed,
        )
        return simulate(
            trace.jobs, shape, self.make_policy(), settings, log=log, gantt=gantt, progress=progress
        )


def _cut(job: Job, most: int) -> Job:
    """A job that asks for more than the cluster has asks for all of it, and takes longer."""
    if job.devices <= most:
        return job
    stretch = job.speed.rate((job.devices,), "", 0, False) / job.speed.rate((most,), "", 0, False)
    if not math.isfinite(stretch) or job.least > most:
        raise SpecError(f"job {job.name!r} needs {job.least} devices, but the cluster has {most}")
    return replace(job, devices=most, most=max(most, job.least))


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary:
    """One policy over several seeds: means, and half widths of their 95 % confidence intervals."""

    policy: str
    runs: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """Means; with several seeds also `ci95`, the half widths, and `seeds`."""
        first = self.runs[0]
        out: dict[str, Any] = {}
        widths: dict[str, float] = {}
        for key, value in first.items():
            if isinstance(value, str):
                out[key] = value
                continue
            out[key], widths[key] = interval([float(run[key]) for run in self.runs])
            if isinstance(value, int) and out[key] == int(out[key]):
                out[key] = int(out[key])
        if len(self.runs) > 1:
            out["ci95"] = {key: width for key, width in widths.items() if key != "elapsed_s"}
        return {**out, "seeds": len(self.runs)}


def _run(setup: StudySetup) -> dict[str, Any]:
    return setup.run().to_dict()


def run_all(
    setups: Sequence[StudySetup], *, processes: int = 1, engine: str = "local"
) -> list[dict[str, Any]]:
    """The figures of each setup, in their order, whatever runs them."""
    on_ray.check(engine)
    if processes < 0:
        raise SpecError(f"processes must not be negative, got {processes}")
    if engine == "ray":
        return on_ray.over(_run, setups)
    workers = min(processes or os.cpu_count() or 1, len(setups))
    if workers <= 1:
        return list(map(_run, setups))
    context, extensions = get_context("spawn"), extend.loaded()
    with ProcessPoolExecutor(workers, context, initializer=extend.load_all, initargs=(extensions,)) as pool:
        return list(pool.map(_run, setups))


def compare(
    setup: StudySetup, names: Sequence[str], *, seeds: int = 1, processes: int = 1, engine: str = "local"
) -> list[StudySummary]:
    """Each policy on the same job lists: seeds `setup.seed` and on."""
    if seeds < 1:
        raise SpecError(f"at least one seed is needed, got {seeds}")
    for name in names:
        policies.get(name)  # a wrong name is said before anything runs
    setups = [replace(setup, policy=name, seed=setup.seed + i) for name in names for i in range(seeds)]
    found = run_all(setups, processes=processes, engine=engine)
    return [
        StudySummary(policy=name, runs=tuple(found[i * seeds : (i + 1) * seeds]))
        for i, name in enumerate(names)
    ]


def paired(
    setup: StudySetup,
    without: str,
    knowing: str,
    *,
    metric: str = "avg_successful_jct_s",
    seeds: int = 8,
    processes: int = 1,
) -> tuple[float, float, float, float]:
    """Two policies on the same job lists: (mean of each, mean change of the second in per cent, half width of
    its 95 % interval).
    """
    first, second = (
        summary.runs for summary in compare(setup, [without, knowing], seeds=seeds, processes=processes)
    )
    change, width = interval([100 * (b[metric] / a[metric] - 1) for a, b in zip(first, second, strict=True)])
    return interval([a[metric] for a in first])[0], interval([b[metric] for b in second])[0], change, width
