"""What a user submits: a command, and what the scheduler may know of it. In TOML, one job or a list of
`[[job]]`:

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
from paceline.sched.live import given as say
from paceline.sched.nodes import Shape
from paceline.sched.samples import Rows, Tabulated, worth
from paceline.sched.speed import Scaling, Speed, Table, packed
from paceline.spec.facts import read_text
from paceline.spec.names import checked_name

#: seconds from being given devices to the first step, where nobody says
_RESTART_S = 10.0
#: the shortest job, in seconds
_SHORTEST_S = 1e-6
#: past jobs from which early ends are learnt; with fewer nothing is known
_ENOUGH = 10
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

#: how a value is read, by key
_READERS: dict[str, Callable[[Any, str, str], Any]] = {
    **dict.fromkeys(say.TIMES, say.seconds),
    **dict.fromkeys(say.WHOLE, say.whole),
    **dict.fromkeys(say.COUNTS, say.count),
    **dict.fromkeys(say.WORDS, say.words),
    "image": say.whole,
    "tenant": say.tenant,
    "powers_of_two": say.switch,
    "overhead": say.overhead,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A job as it was handed in. `given` holds what was written, checked, with times in seconds and paths
    absolute; `speeds` among it is what a model or a profile says of the cluster at hand (`resolved`)."""

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
    given: Mapping[str, Any]

    @staticmethod
    def of(given: Mapping[str, Any], folder: Path, where: str = "") -> Order:
        """Checks what was written; relative paths count from `folder`."""
        name = _name(given.get("name"), where)
        at = f"{where}: job {name!r}" if where else f"job {name!r}"
        say.unknown(given, at)
        plain = dict(given)
        for key in given.keys() & _READERS.keys():
            plain[key] = _READERS[key](given[key], key, at)
        for key, read_ in (
            ("rates", say.rates),
            ("ends", say.ends),
            ("learnt", say.ends),
            ("speeds", say.speeds),
        ):
            if key in given:
                plain[key] = read_(given[key], at)
        plain["folder"] = str((folder / given.get("folder", ".")).absolute())
        plain["command"] = list(say.command(given.get("command"), at))
        plain["environment"] = say.environment(given.get("environment", {}), at)
        for key in ("profile", "model"):
            if key in given:
                plain[key] = _placed(given[key], folder, key == "profile")
        order = Order(
            name=name,
            command=tuple(plain["command"]),
            folder=plain["folder"],
            environment=plain["environment"],
            submit_s=plain.get("submit", 0.0),
            retries=plain.get("retries", 3),
            given=plain,
        )
        order._check(at)
        return order

    def _check(self, at: str) -> None:
        """What can be known to be wrong before there is a cluster."""
        found = [key for key in say.SOURCES if key in self.given]
        if len(found) != 1:
            raise SpecError(
                f"{at}: give one of rates (work per second by devices), seconds (run time on its devices),"
                f" model (predicted) or profile (measured), got {' and '.join(found) or 'none'}"
            )
        if stray := next((key for key in say.MODEL if key in self.given and "model" not in self.given), None):
            raise SpecError(f"{at}: {stray} goes with a model")
        try:
            if "speeds" in self.given or say.goodput(self.given) is None:
                self.job(("any",))
            else:
                self._job(1.0, Scaling(), 0.0)
        except PacelineError as error:
            raise SpecError(f"{at}: {str(error).removeprefix(f'job {self.name!r}: ')}") from None

    def resolved(self, shape: Shape) -> Order:
        """The same, with the speeds that its model or profile says it has on a cluster; others are returned
        as they are.
        """
        if "speeds" in self.given or not any(key in self.given for key in ("rates", "model", "profile")):
            return self
        try:
            job = self._job(1.0, Scaling(), 0.0)
            rows = _tabulated(
                json.dumps(
                    {key: value for key, value in self.given.items() if key in _DECIDES}, sort_keys=True
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
            given={
                **self.given,
                "speeds": {kind: {n: list(row) for n, row in found.items()} for kind, found in rows.items()},
            },
        )

    @property
    def written(self) -> dict[str, Any]:
        """What the user wrote, without what was worked out from it."""
        return {key: value for key, value in self.given.items() if key not in say.WORKED_OUT}

    def learning(self, past: Sequence[float]) -> Order:
        """The same; where it leaves its early ends to history, with those of past jobs, given as the shares
        of their work that they did.
        """
        if self.given.get("ends") != say.HISTORY or len(past) < _ENOUGH:
            return self
        found = empirical(past)
        return replace(
            self,
            given={**self.given, "learnt": {"at": list(found.shares), "chance": list(found.probabilities)}},
        )

    @property
    def unit(self) -> str:
        """What work is counted in: samples, steps, epochs; seconds; or nothing where nobody says."""
        if "work" not in self.given:
            return "s"
        return say.amount(self.given["work"], f"job {self.name!r}")[1]

    def job(self, kinds: Iterable[str], submit_s: float = 0.0) -> Job:
        """The job that the scheduler sees, on devices of these kinds."""
        kinds = tuple(kinds)
        work, speed = self._speed(kinds)
        job = self._job(work, speed, submit_s)
        if isinstance(speed, Tabulated):  # only sizes at which it can run
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

    def check_speed(self, job: Job, shape: Shape) -> None:
        """Refuses a job that does not advance on a kind of device of the cluster, or takes too long."""
        nodes = list(zip(shape.devices, shape.kinds, strict=True))
        for kind in dict.fromkeys(shape.kinds):
            held = [devices for devices, other in nodes if other == kind]
            for devices in sorted({job.least, job.devices}):
                if devices > sum(held):
                    continue
                rate = job.speed.rate(packed(devices, max(held)), kind, 0, False)
                if not 0 < rate < math.inf:
                    raise SpecError(
                        f"job {self.name!r}: no speed is known on {devices} devices of kind {kind!r}"
                    )
                if not _SHORTEST_S <= job.work / rate <= say.LONGEST_S:
                    raise SpecError(
                        f"job {self.name!r}: its work takes {job.work / rate:g} s on {devices} devices; "
                        f"allowed: {_SHORTEST_S:g} s to {say.LONGEST_S:g} s"
                    )

    def _job(self, work: float, speed: Speed, submit_s: float) -> Job:
        given = self.given
        ends = given.get("learnt", given.get("ends"))
        more = {
            key: given[key]
            for key in ("least", "most", "priority", "powers_of_two", "tenant")
            if key in given
        }
        return Job(
            name=self.name,
            submit_s=submit_s,
            work=work,
            speed=speed,
            devices=given.get("devices", 1),
            restart_s=given.get("restart", _RESTART_S),
            checkpoint_s=given.get("checkpoint", 0.0),
            checkpoint_every_s=given.get("checkpoint_every", 0.0),
            ends=Ends(tuple(ends["at"]), tuple(ends["chance"])) if isinstance(ends, Mapping) else None,
            **more,
        )

    def _speed(self, kinds: Iterable[str]) -> tuple[float, Speed]:
        """Work, and work per second."""
        given, devices, at = self.given, self.given.get("devices", 1), f"job {self.name!r}"
        work = say.amount(given["work"], at)[0] if "work" in given else None
        if "speeds" in given:
            return work or 0.0, Tabulated(given["speeds"])
        if "rates" in given:
            if work is None:
                raise SpecError(f"{at}: with rates goes work, the total in the same unit")
            table = {int(size): rate for size, rate in given["rates"].items()}
            if any(isinstance(rate, str) for rate in table.values()):
                raise SpecError(f"{at}: its speeds are not worked out yet; hand it in with `paceline submit`")
            return work, Table(dict.fromkeys(kinds, table))
        if "seconds" not in given:
            raise SpecError(f"{at}: its speeds are not worked out yet; hand it in with `paceline submit`")
        work = given["seconds"] if work is None else work
        return work, Scaling(devices, given.get("overhead", 0.02), per_s=work / given["seconds"])

    def told(self, devices: int, kind: str, adaptive: bool) -> dict[str, str]:
        """What a run of that size is told of its batch, where the batch is known: samples of a step in all,
        and what each counts.
        """
        if "speeds" not in self.given:
            return {}
        table, noise = Tabulated(self.given["speeds"]), self.given.get("noise_scale", 0.0)
        planned, batch = (
            table.row(self.given.get("devices", 1), kind)[1],
            table.row(devices, kind)[3 if adaptive else 1],
        )
        return (
            {"PACELINE_BATCH": f"{batch:.10g}", "PACELINE_WORTH": f"{worth(batch, planned, noise):.10g}"}
            if batch > 1
            else {}
        )


#: what the speeds of a job depend on, but for the cluster
_DECIDES = {"work", "devices", *say.SOURCES, *say.MODEL, *say.COUNTS}


@lru_cache(maxsize=256)
def _tabulated(given: str, job: Job, shape: Shape) -> Rows | None:
    """Speeds on a cluster; None where they are written in the unit of work already. Predicting takes seconds:
    once for each job.
    """
    speed = say.goodput(json.loads(given))
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


def read(path: Path) -> list[Order]:
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
    orders = [Order.of(entry, path.parent, str(path)) for entry in entries]
    names = [order.name for order in orders]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SpecError(f"{path}: two jobs are named {twice!r}")
    return orders
