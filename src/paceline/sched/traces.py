"""Job lists: readers of published traces and of one's own, by one name.

    pollux:FILE.csv    a workload of the Pollux study (name, time, application, num_replicas, batch_size);
                       its measured applications come from the data folder (traces/pollux) or stand beside the
                       folder of the file
    philly             all jobs of the Philly trace in the data folder (traces/philly/philly.csv, plain or
                       .gz); philly:FILE reads another
    gavel              jobs with Gavel's measured throughputs on three kinds of GPU and Philly's lengths,
                       Poisson arrivals
    alibaba            GPU pods of Alibaba's trace of 2023 with whole devices
    philly-like        generated, with Philly's statistics; needs no files
    trials             generated, with Philly's arrivals and sizes, but lengths of one order, as where many
                       variants of a model are trained
    slurm:FILE         what `sacct --parsable2` printed: jobs with devices that ran (`readers/sacct.py`)
    FILE.csv           one's own: see `read_own`
    FILE.toml          jobs as `paceline schedule` takes them: see `read_jobs`

Published files are not part of this package: philly and pollux come from github.com/petuum/adaptdl (branch
osdi21-artifact, `simulator/traces` and `simulator/workloads`), gavel from
github.com/stanford-futuredata/gavel, alibaba from github.com/alibaba/clusterdata (v2023).
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline import units
from paceline.errors import DataError, SpecError, UnitError, UnknownName
from paceline.readers import sacct
from paceline.sched import pollux
from paceline.sched.job import Job
from paceline.sched.speed import ScaledSpeed
from paceline.spec.names import checked_name
from paceline.spec.tables import Row, csv_rows, find

#: how far a job of a trace that gives only its length can be stretched, and what each device costs it (drawn
#: between the two)
STRETCH, OVERHEADS = 4, (0.005, 0.06)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A job list and the cluster it was meant for."""

    name: str
    jobs: tuple[Job, ...]
    cluster: str
    #: see `simulate.Settings`
    clock_s: float = 0.0
    #: whether lengths are what jobs ask for, of which those that end early do a part; else what they ran, and
    #: such jobs had asked for more
    asked: bool = False

    def scaled(self, load: float, devices: int) -> Trace:
        """The same jobs, arriving so that they keep `load` of the devices busy between the first and the last
        arrival.
        """
        if not load > 0:
            raise SpecError(f"a load must be above zero, got {load!r}")
        first, last = self.jobs[0].submit_s, self.jobs[-1].submit_s
        work = sum(
            job.speed.seconds(job.work * job.ends_at, 0, job.devices, job.devices, False) * job.devices
            for job in self.jobs
        )
        span = last - first
        if span <= 0:
            raise SpecError(f"{self.name}: all jobs arrive at once, so that no load can be set")
        factor = work / (load * devices) / span
        return replace(
            self,
            jobs=tuple(replace(job, submit_s=first + (job.submit_s - first) * factor) for job in self.jobs),
        )


def load(
    text: str,
    *,
    count: int | None = None,
    data: Path | None = None,
    seed: int = 0,
    cluster: str | None = None,
) -> Trace:
    """The trace that `text` names, its first `count` jobs (or as many generated); `data`: the data folder,
    else PACELINE_DATA.

    `cluster` is where it will run, for jobs whose speed is predicted.
    """
    if count is not None and count < 1:
        raise SpecError(f"a trace has at least one job, got {count}")
    name, _, file = text.partition(":")
    if name in READERS:
        trace = READERS[name](file, _folder(data), count, seed)
    elif text.endswith((".csv", ".csv.gz")):
        trace = read_own(Path(text))
    elif text.endswith(".toml"):
        trace = read_jobs(Path(text), cluster or OWN_CLUSTER, seed)
    else:
        raise UnknownName("trace", name, READERS, f"allowed: {', '.join(READERS)}, or a .csv or .toml file")
    return replace(trace, jobs=trace.jobs[:count]) if count is not None else trace


def _folder(data: Path | None) -> Path | None:
    if data is None and os.environ.get("PACELINE_DATA"):
        data = Path(os.environ["PACELINE_DATA"])
    return data / "traces" if data is not None else None


def _needed(folder: Path | None, place: str, what: str) -> Path:
    """A file of the data folder, or one line on where it comes from."""
    found = find(folder / Path(place).parent, Path(place).name) if folder is not None else None
    if found is None:
        where = f"no {place} in {folder}" if folder is not None else "no data folder is given"
        raise DataError(
            f"{where}; --data or PACELINE_DATA names the folder that holds traces/{place} (from {what})"
        )
    return found


def read_pollux(file: str, folder: Path | None, count: int | None = None, seed: int = 0) -> Trace:
    """A workload of the Pollux study; jobs can run at any size at which each device still has its least
    batch.
    """
    if not file:
        raise SpecError("write pollux:FILE.csv, a workload of the Pollux study")
    path = Path(file)
    rows = csv_rows(path, ("name", "time", "application", "num_replicas", "batch_size"))
    places = [*([folder / "pollux", folder] if folder is not None else []), path.parent.parent, path.parent]
    home = next(
        (
            place
            for place in places
            if any((place / name / "placements.csv").is_file() for name in pollux.APPLICATIONS)
        ),
        None,
    )
    if home is None:
        raise DataError(
            f"no measured applications (cifar10/placements.csv ...) beside {path} or in the data folder;"
            " --data or PACELINE_DATA names the folder that holds traces/pollux (github.com/petuum/adaptdl,"
            " branch osdi21-artifact)"
        )
    jobs = []
    for row in rows:
        devices, batch = _whole(row, "num_replicas", path), _whole(row, "batch_size", path)
        application = pollux.application(home, row["application"])
        most = min(application.most_devices, batch // application.least_local)
        jobs.append(
            Job(
                name=_name(row, path),
                submit_s=_number(row, "time", path),
                work=application.progress[-1],
                speed=pollux.speed(home, row["application"], batch),
                devices=devices,
                least=1,
                most=max(devices, most),
            )
        )
    return Trace(
        name=path.stem, jobs=tuple(sorted(jobs, key=lambda j: j.submit_s)), cluster="16x4xt4", clock_s=1.0
    )


def read_philly(file: str, folder: Path | None, count: int | None = None, seed: int = 0) -> Trace:
    """Jobs of the Philly trace by submission time: length and devices; `cluster` (a virtual cluster) is the
    tenant.
    """
    path = (
        Path(file)
        if file
        else _needed(folder, "philly/philly.csv", "github.com/petuum/adaptdl, branch osdi21-artifact")
    )
    rows = csv_rows(path, ("timestamp", "duration", "num_gpus", "cluster"))
    try:
        times = [datetime.fromisoformat(row["timestamp"]).timestamp() for row in rows]
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    first = min(times)
    draw = random.Random(seed)
    jobs = [
        stretchable(
            f"philly-{i}",
            time - first,
            max(1.0, _number(row, "duration", path)),
            _whole(row, "num_gpus", path),
            draw,
            _name(row, path, "cluster") if row["cluster"] else "",
        )
        for i, (time, row) in enumerate(sorted(zip(times, rows, strict=True), key=lambda pair: pair[0]))
    ]
    return Trace(name="philly", jobs=tuple(jobs), cluster="64x8xp100")


def stretchable(
    name: str, submit_s: float, seconds: float, devices: int, draw: random.Random, tenant: str = ""
) -> Job:
    """A job of which only its length on some devices is known: how it scales to others is drawn."""
    return Job(
        name=name,
        submit_s=submit_s,
        work=seconds,
        speed=ScaledSpeed(devices, draw.uniform(*OVERHEADS)),
        devices=devices,
        least=1,
        most=STRETCH * devices,
        tenant=tenant,
    )


def read_alibaba(file: str, folder: Path | None, count: int | None = None, seed: int = 0) -> Trace:
    """GPU pods of Alibaba's cluster in 2023 that use whole devices; those that failed are jobs that end
    early.
    """
    path = (
        Path(file)
        if file
        else _needed(
            folder, "alibaba_v2023/pods.csv", "github.com/alibaba/clusterdata, cluster-trace-gpu-v2023"
        )
    )
    draw = random.Random(seed)
    jobs = []
    for row in csv_rows(
        path,
        ("name", "num_gpu", "gpu_milli", "pod_phase", "creation_time", "deletion_time", "scheduled_time"),
    ):
        devices = _whole(row, "num_gpu", path)
        if (
            devices < 1
            or _number(row, "gpu_milli", path) < 1000
            or not row["scheduled_time"]
            or not row["deletion_time"]
        ):
            continue
        seconds = _number(row, "deletion_time", path) - _number(row, "scheduled_time", path)
        if seconds > 0:
            job = stretchable(_name(row, path), _number(row, "creation_time", path), seconds, devices, draw)
            jobs.append(replace(job, outcome="failed") if row["pod_phase"] == "Failed" else job)
    return Trace(name="alibaba", jobs=tuple(sorted(jobs, key=lambda j: j.submit_s)), cluster="128x8xt4")


def read_slurm(file: str, folder: Path | None, count: int | None = None, seed: int = 0) -> Trace:
    """Jobs of a dump of Slurm's accounting: they ran as long as they ran, on as many devices; how each would
    scale to others is drawn.
    """
    if not file:
        raise SpecError("write slurm:FILE, what sacct --parsable2 printed")
    found = sacct.read(file)
    draw = random.Random(seed)
    jobs = []
    for job in found.jobs:
        made = stretchable(job.name, job.submit_s, job.seconds, job.devices, draw, job.user)
        jobs.append(replace(made, outcome=job.outcome))
    return Trace(name=Path(file).stem, jobs=tuple(jobs), cluster=OWN_CLUSTER)


_OWN = ("name", "submit_s", "devices", "seconds")
#: where one's own jobs run unless a cluster is given
OWN_CLUSTER = "16x4xv100"


def read_own(path: Path) -> Trace:
    """One's own job list as CSV. Columns `name`, `submit_s`, `devices`, `seconds` (run time on these devices)
    are needed; times are seconds or carry a unit (`2 h`). Others are optional: `least`, `most` (sizes it can
    run at), `overhead` (share of a step that each further device adds), `restart_s`, `checkpoint_s`,
    `priority`, `tenant`, `outcome` (completed, killed, failed), `ends_at` (share of the work done when it
    ends early).
    """
    jobs = []
    for row in csv_rows(path, _OWN):
        devices = _whole(row, "devices", path)
        given: dict[str, Any] = {
            **{key: _whole(row, key, path) for key in ("least", "most", "priority") if row.get(key)},
            **{
                key: _number(row, key, path)
                for key in ("restart_s", "checkpoint_s", "ends_at")
                if row.get(key)
            },
            **{key: _name(row, path, key) for key in ("tenant", "outcome") if row.get(key)},
        }
        jobs.append(
            Job(
                name=_name(row, path),
                submit_s=_number(row, "submit_s", path),
                work=_number(row, "seconds", path),
                devices=devices,
                speed=ScaledSpeed(devices, _number(row, "overhead", path) if row.get("overhead") else 0.02),
                **given,
            )
        )
    if not jobs:
        raise DataError(f"{path} lists no job")
    return Trace(name=path.stem, jobs=tuple(sorted(jobs, key=lambda j: j.submit_s)), cluster=OWN_CLUSTER)


def read_jobs(path: Path, cluster: str, seed: int = 0) -> Trace:
    """The jobs of a file for `paceline schedule` (`sched/live/job_spec.py`), with the speeds that their
    models and profiles give on that cluster. A job with `ends` may end early, by its chance.
    """
    from paceline.sched.live.job_spec import read
    from paceline.sched.nodes import ClusterShape

    shape, draw = ClusterShape.parse(cluster), random.Random(seed)
    jobs = []
    for order in read(path):
        job = order.resolved(shape).job(shape.kinds, order.submit_s)
        share = job.ends.draw(draw.random()) if job.ends is not None else 1.0
        jobs.append(replace(job, ends_at=share, outcome="killed") if share < 1 else job)
    return Trace(name=path.stem, jobs=tuple(sorted(jobs, key=lambda j: j.submit_s)), cluster=cluster)


def _name(row: Row, path: Path, key: str = "name") -> str:
    try:
        return checked_name("job" if key == "name" else key, row[key])
    except SpecError as error:
        raise DataError(f"{path}: {error}") from None


def _number(row: Row, key: str, path: Path) -> float:
    try:
        value = units.parse(row[key], "time") if not _plain(row[key]) else float(row[key])
    except (UnitError, TypeError, ValueError):
        raise DataError(
            f"{path}: {key} of {row.get('name', 'a row')} must be a number, got {row[key]!r}"
        ) from None
    if not math.isfinite(value):
        raise DataError(f"{path}: {key} of {row.get('name', 'a row')} must be finite, got {row[key]!r}")
    return value


def _plain(text: str) -> bool:
    return text is not None and not text.strip()[-1:].isalpha()


def _whole(row: Row, key: str, path: Path) -> int:
    value = _number(row, key, path)
    if value != int(value):
        raise DataError(
            f"{path}: {key} of {row.get('name', 'a row')} must be a whole number, got {row[key]!r}"
        )
    return int(value)


def _gavel(file: str, folder: Path | None, count: int | None, seed: int) -> Trace:
    from paceline.sched.gavel import read

    return read(
        _needed(folder, "gavel/simulation_throughputs.json", "github.com/stanford-futuredata/gavel"),
        _needed(folder, "gavel/philly_job_distribution.csv", "the same"),
        count or 1000,
        seed,
    )


def _generated(file: str, folder: Path | None, count: int | None, seed: int) -> Trace:
    from paceline.sched.generate import philly_like

    return philly_like(count or 1000, seed=seed)


def _trials(file: str, folder: Path | None, count: int | None, seed: int) -> Trace:
    from paceline.sched.generate import trials

    return trials(count or 1000, seed=seed)


READERS: dict[str, Callable[[str, Path | None, int | None, int], Trace]] = {
    "pollux": read_pollux,
    "philly": read_philly,
    "gavel": _gavel,
    "alibaba": read_alibaba,
    "slurm": read_slurm,
    "philly-like": _generated,
    "trials": _trials,
}
