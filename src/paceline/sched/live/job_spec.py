"""A job as a user submits it: a command, and what the scheduler may know about it. In TOML, one job or a
list of `[[job]]`:

    [[job]]
    name = "digits"
    command = ["python", "train.py"]      # honours TERM by checkpointing, goes on from its checkpoint
    devices = 1
    least = 1                             # sizes it can run at
    most = 4
    work = "400 steps"
    rates = { 1 = 10, 2 = 18, 4 = 30 }    # steps per second by devices; or seconds, a model, a profile

`paceline simulate --trace jobs.toml` reads the same file.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, SpecError
from paceline.sched.ends import Ends, empirical
from paceline.sched.job import Job
from paceline.sched.live import job_fields
from paceline.sched.nodes import ClusterShape
from paceline.sched.speed import RateTable, ScaledSpeed, Speed, packed
from paceline.sched.speed_sources import Rows, TabulatedSpeed, worth
from paceline.spec.facts import read_text
from paceline.spec.names import checked_name

#: default time to restart: seconds from getting devices to the first step
_RESTART_S = 10.0
#: the shortest job, in seconds
_SHORTEST_S = 1e-6
#: past jobs needed to estimate early ends; with fewer the job has no distribution of ends
_ENOUGH = 10
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

#: parser of each key
_READERS: dict[str, Callable[[Any, str, str], Any]] = {
    **dict.fromkeys(job_fields.TIMES, job_fields.seconds),
    **dict.fromkeys(job_fields.WHOLE, job_fields.whole),
    **dict.fromkeys(job_fields.COUNTS, job_fields.count),
    **dict.fromkeys(job_fields.WORDS, job_fields.words),
    "image": job_fields.whole,
    "tenant": job_fields.tenant,
    "powers_of_two": job_fields.switch,
    "overhead": job_fields.overhead,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A job as it was handed in. `fields` holds what the user wrote, checked, with times in seconds and
    absolute paths; its `speeds` are what a model or a profile predicts for the cluster at hand (`resolved`).
    """

    name: str
    command: tuple[str, ...]
    #: where the command runs
    folder: str
    environment: Mapping[str, str]
    #: seconds after the scheduler's start at which it counts as submitted; 0: at once
    submit_s: float
    #: times in a row that it is started again without having come further, after a signal killed it or its
    #: node was lost
    retries: int
    fields: Mapping[str, Any]

    @staticmethod
    def of(fields: Mapping[str, Any], folder: Path, where: str = "") -> JobSpec:
        """Checks what was written; relative paths count from `folder`."""
        name = _name(fields.get("name"), where)
        at = f"{where}: job {name!r}" if where else f"job {name!r}"
        job_fields.unknown(fields, at)
        plain = dict(fields)
        for key in fields.keys() & _READERS.keys():
            plain[key] = _READERS[key](fields[key], key, at)
        for key, read_ in (
            ("rates", job_fields.rates),
            ("ends", job_fields.ends),
            ("learnt", job_fields.ends),
            ("speeds", job_fields.speeds),
        ):
            if key in fields:
                plain[key] = read_(fields[key], at)
        plain["folder"] = str((folder / fields.get("folder", ".")).absolute())
        plain["command"] = list(job_fields.command(fields.get("command"), at))
        plain["environment"] = job_fields.environment(fields.get("environment", {}), at)
        for key in ("profile", "model"):
            if key in fields:
                plain[key] = _placed(fields[key], folder, key == "profile")
        spec = JobSpec(
            name=name,
            command=tuple(plain["command"]),
            folder=plain["folder"],
            environment=plain["environment"],
            submit_s=plain.get("submit", 0.0),
            retries=plain.get("retries", 3),
            fields=plain,
        )
        spec._check(at)
        return spec

    def _check(self, at: str) -> None:
        """What can be known to be wrong before there is a cluster."""
        sources = [key for key in job_fields.SOURCES if key in self.fields]
        if len(sources) != 1:
            raise SpecError(
                f"{at}: give one of rates (work per second by devices), seconds (run time on its devices),"
                f" model (predicted) or profile (measured), got {' and '.join(sources) or 'none'}"
            )
        stray = [key for key in job_fields.MODEL if key in self.fields]
        if stray and "model" not in self.fields:
            raise SpecError(f"{at}: {stray[0]} goes with a model")
        try:
            if "speeds" in self.fields or job_fields.goodput(self.fields) is None:
                self.job(("any",))
            else:
                self._job(1.0, ScaledSpeed(), 0.0)
        except PacelineError as error:
            raise SpecError(f"{at}: {str(error).removeprefix(f'job {self.name!r}: ')}") from None

    def resolved(self, shape: ClusterShape) -> JobSpec:
        """The same, with the speeds that its model or profile says it has on a cluster; others are returned
        as they are.
        """
        if "speeds" in self.fields or not any(key in self.fields for key in ("rates", "model", "profile")):
            return self
        try:
            job = self._job(1.0, ScaledSpeed(), 0.0)
            rows = _tabulated(
                json.dumps(
                    {key: value for key, value in self.fields.items() if key in _DECIDES}, sort_keys=True
                ),
                job,
                shape,
            )
        except PacelineError as error:
            raise SpecError(f"job {self.name!r}: {error}") from None
        if rows is None:
            return self
        return replace(
            self,
            fields={
                **self.fields,
                "speeds": {kind: {n: list(row) for n, row in table.items()} for kind, table in rows.items()},
            },
        )

    @property
    def written(self) -> dict[str, Any]:
        """What the user wrote, without what was worked out from it."""
        return {key: value for key, value in self.fields.items() if key not in job_fields.WORKED_OUT}

    def with_history(self, past: Sequence[float]) -> JobSpec:
        """The same; where it leaves its early ends to history, with those of past jobs, given as the shares
        of their work that they did.
        """
        if self.fields.get("ends") != job_fields.HISTORY or len(past) < _ENOUGH:
            return self
        ends = empirical(past)
        return replace(
            self,
            fields={**self.fields, "learnt": {"at": list(ends.shares), "chance": list(ends.probabilities)}},
        )

    @property
    def unit(self) -> str:
        """What work is counted in: samples, steps, epochs; seconds; or nothing where nobody says."""
        if "work" not in self.fields:
            return "s"
        return job_fields.amount(self.fields["work"], f"job {self.name!r}")[1]

    def job(self, kinds: Iterable[str], submit_s: float = 0.0) -> Job:
        """The job that the scheduler sees, on devices of these kinds."""
        kinds = tuple(kinds)
        work, speed = self._speed(kinds)
        job = self._job(work, speed, submit_s)
        if isinstance(speed, TabulatedSpeed):  # only sizes at which it can run
            sizes = speed.sizes()
            return replace(
                job,
                least=sizes[0],
                most=sizes[-1],
                devices=max((n for n in sizes if n <= job.devices), default=sizes[0]),
            )
        for kind in kinds:
            if not speed.rate((job.least,), kind, 0, False) > 0:
                raise SpecError(
                    f"job {self.name!r}: no speed is known on {job.least} devices; "
                    "rates must begin at its smallest size"
                )
        return job

    def check_speed(self, job: Job, shape: ClusterShape) -> None:
        """Refuses a job that does not advance on a kind of device of the cluster, or takes too long."""
        nodes = list(zip(shape.devices, shape.kinds, strict=True))
        for kind in dict.fromkeys(shape.kinds):
            node_devices = [devices for devices, other in nodes if other == kind]
            for devices in sorted({job.least, job.devices}):
                if devices > sum(node_devices):
                    continue
                rate = job.speed.rate(packed(devices, max(node_devices)), kind, 0, False)
                if not 0 < rate < math.inf:
                    raise SpecError(
                        f"job {self.name!r}: no speed is known on {devices} devices of kind {kind!r}"
                    )
                if not _SHORTEST_S <= job.work / rate <= job_fields.LONGEST_S:
                    raise SpecError(
                        f"job {self.name!r}: its work takes {job.work / rate:g} s on {devices} devices; "
                        f"allowed: {_SHORTEST_S:g} s to {job_fields.LONGEST_S:g} s"
                    )

    def _job(self, work: float, speed: Speed, submit_s: float) -> Job:
        fields = self.fields
        ends = fields.get("learnt", fields.get("ends"))
        more = {
            key: fields[key]
            for key in ("least", "most", "priority", "powers_of_two", "tenant")
            if key in fields
        }
        return Job(
            name=self.name,
            submit_s=submit_s,
            work=work,
            speed=speed,
            devices=fields.get("devices", 1),
            restart_s=fields.get("restart", _RESTART_S),
            checkpoint_s=fields.get("checkpoint", 0.0),
            checkpoint_every_s=fields.get("checkpoint_every", 0.0),
            ends=Ends(tuple(ends["at"]), tuple(ends["chance"])) if isinstance(ends, Mapping) else None,
            **more,
        )

    def _speed(self, kinds: Iterable[str]) -> tuple[float, Speed]:
        """Work, and work per second."""
        fields, devices, at = self.fields, self.fields.get("devices", 1), f"job {self.name!r}"
        work = job_fields.amount(fields["work"], at)[0] if "work" in fields else None
        if "speeds" in fields:
            return work or 0.0, TabulatedSpeed(fields["speeds"])
        if "rates" in fields:
            if work is None:
                raise SpecError(f"{at}: with rates goes work, the total in the same unit")
            table = {int(size): rate for size, rate in fields["rates"].items()}
            if any(isinstance(rate, str) for rate in table.values()):
                raise SpecError(f"{at}: its speeds are not worked out yet; hand it in with `paceline submit`")
            return work, RateTable(dict.fromkeys(kinds, table))
        if "seconds" not in fields:
            raise SpecError(f"{at}: its speeds are not worked out yet; hand it in with `paceline submit`")
        work = fields["seconds"] if work is None else work
        return work, ScaledSpeed(devices, fields.get("overhead", 0.02), per_s=work / fields["seconds"])

    def batch_environment(self, devices: int, kind: str, adaptive: bool) -> dict[str, str]:
        """Environment variables on the batch of an attempt of that size: samples of a step on all devices,
        and what each counts. Empty where the batch is not known.
        """
        if "speeds" not in self.fields:
            return {}
        table, noise = TabulatedSpeed(self.fields["speeds"]), self.fields.get("noise_scale", 0.0)
        planned = table.row(self.fields.get("devices", 1), kind)[1]
        batch = table.row(devices, kind)[3 if adaptive else 1]
        if batch <= 1:
            return {}
        return {"PACELINE_BATCH": f"{batch:.10g}", "PACELINE_WORTH": f"{worth(batch, planned, noise):.10g}"}


#: what the speeds of a job depend on, but for the cluster
_DECIDES = {"work", "devices", *job_fields.SOURCES, *job_fields.MODEL, *job_fields.COUNTS}


@lru_cache(maxsize=256)
def _tabulated(fields: str, job: Job, shape: ClusterShape) -> Rows | None:
    """Speeds on a cluster; None where they are written in the unit of work already. Predicting takes seconds:
    once for each job.
    """
    speed = job_fields.goodput(json.loads(fields))
    if speed is None:
        return None
    limit = max(
        sum(d for d, k in zip(shape.devices, shape.kinds, strict=True) if k == kind) for kind in shape.kinds
    )
    if job.least > limit:
        raise SpecError(f"it needs {job.least} devices of one kind, but the cluster has {limit}")
    return speed.tabulated(job.sizes(limit), min(job.devices, limit), shape)


def _name(value: Any, where: str) -> str:
    """The name of a job: it is also that of its folder, and of its runs on an engine."""
    form = "a name has up to 64 letters, digits, '-' and '_', and starts with a letter or digit"
    try:
        name = checked_name("job", value)
    except SpecError as error:
        raise SpecError(f"{where}: {error}" if where else str(error)) from None
    if not _NAME.fullmatch(name):
        raise SpecError(f"{where}: job {name!r}: {form}" if where else f"job {name!r}: {form}")
    return name


def _placed(text: str, folder: Path, always: bool) -> str:
    """A path beside the job file; a model that is no path stays."""
    path, colon, rest = text.partition(":") if ".py:" in text else (text, "", "")
    found = folder / path
    return f"{found.absolute()}{colon}{rest}" if always or found.is_file() else text


def read(path: Path) -> list[JobSpec]:
    """The jobs of a TOML file: `[[job]]` each, or one job at the top level."""
    text = read_text(path, "job")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path}: not valid TOML: {error}") from None
    entries = data.get("job", [data])
    if (
        not isinstance(entries, list)
        or not all(isinstance(entry, Mapping) for entry in entries)
        or ("job" in data and len(data) > 1)
    ):
        raise SpecError(f"{path}: write one job at the top level, or each as [[job]] and nothing beside them")
    specs = [JobSpec.of(entry, path.parent, str(path)) for entry in entries]
    names = [spec.name for spec in specs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SpecError(f"{path}: two jobs are named {twice!r}")
    return specs
