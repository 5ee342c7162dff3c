"""What a job file says, value by value: checked, with one line on what is wrong, and turned into work, speed
and early ends.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from paceline import units
from paceline.errors import PacelineError, SpecError, UnitError, nearest
from paceline.sched import early_termination
from paceline.sched import ends as ends_
from paceline.sched.job import MOST_DEVICES
from paceline.sched.speed_sources import (
    TOGETHER,
    AllReduceSpeed,
    Goodput,
    MeasuredRates,
    PredictedSpeed,
    ServerSpeed,
    SpeedSource,
)
from paceline.spec.names import checked_name

TIMES = ("submit", "seconds", "restart", "checkpoint", "checkpoint_every")
SIZES = ("devices", "least", "most")
WHOLE = (*SIZES, "priority", "retries")
COUNTS = ("batch", "most_batch", "dataset", "noise_scale")
#: plain text
WORDS = ("folder", "plan", "device", "network", "optimizer", "profile", "model")
#: what a model is predicted with
MODEL = ("plan", "device", "network", "image", "optimizer")
#: not written, but found when a job is handed in: speeds on the cluster, early ends of jobs like it
WORKED_OUT = ("speeds", "learnt")
#: in place of early ends: those of past jobs of its tenant
HISTORY = "history"
#: where the speed comes from: one of these
SOURCES = ("rates", "seconds", "model", "profile")
KEYS = {
    "name",
    "command",
    "folder",
    "environment",
    "work",
    "overhead",
    "powers_of_two",
    "tenant",
    "ends",
    *WORKED_OUT,
    *TIMES,
    *WHOLE,
    *COUNTS,
    *MODEL,
    *SOURCES,
}
UNITS = ("samples", "steps", "epochs", "tokens")
_AMOUNT = re.compile(r"^\s*(\S+)\s+([A-Za-z]+)(/s)?\s*$")
#: points of a distribution that stands for published shares
_POINTS = 200
#: the longest time of a job, in seconds (3,000 years): sums of such times stay finite
LONGEST_S = 1e11
#: the largest whole number of a job file, in either direction
_LARGEST = 2**31


def unknown(fields: Mapping[str, Any], at: str) -> None:
    """Refuses keys that mean nothing, with the nearest that does."""
    for key in fields:
        if key not in KEYS:
            near = nearest(key, KEYS)
            raise SpecError(
                f"{at}: unknown key {key!r}; "
                + (f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(sorted(KEYS))}")
            )


def seconds(value: Any, key: str, at: str) -> float:
    """A time."""
    try:
        found = units.parse(value, "time")
    except UnitError as error:
        raise SpecError(f"{at}: {key}: {error}") from None
    if found < 0 or (key == "seconds" and found == 0):
        raise SpecError(
            f"{at}: {key} must be {'above zero' if key == 'seconds' else 'zero or more'}, got {value!r}"
        )
    if found > LONGEST_S:
        raise SpecError(f"{at}: {key} must be at most {LONGEST_S:g} s, got {value!r}")
    return found


def whole(value: Any, key: str, at: str) -> int:
    """A whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpecError(f"{at}: {key} must be a whole number, got {value!r}")
    least = -_LARGEST
    if key in SIZES:
        least = 1
    elif key == "retries":
        least = 0
    most = MOST_DEVICES if key in SIZES else _LARGEST
    if not least <= value <= most:
        raise SpecError(f"{at}: {key} must be a whole number from {least} to {most}, got {value!r}")
    return value


def size(value: Any, what: str, at: str) -> int:
    """A number of devices, as the key of a table."""
    text = str(value)
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= MOST_DEVICES):
        raise SpecError(f"{at}: {what} are by number of devices, from 1 to {MOST_DEVICES}, got {text[:40]!r}")
    return int(text)


def words(value: Any, key: str, at: str) -> str:
    """Text that a program can be given: without a null character, and with characters that UTF-8 has."""
    if not isinstance(value, str):
        raise SpecError(f"{at}: {key} must be text, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SpecError(f"{at}: {key} holds {value[error.start]!r}, which is not a character") from None
    if "\0" in value:
        raise SpecError(f"{at}: {key} must not hold a null character, got {value!r}")
    return value


def tenant(value: Any, key: str, at: str) -> str:
    """A name, or nothing."""
    if value == "":
        return ""
    try:
        return checked_name(key, value)
    except SpecError as error:
        raise SpecError(f"{at}: {error}") from None


def switch(value: Any, key: str, at: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise SpecError(f"{at}: {key} must be true or false, got {value!r}")
    return value


def overhead(value: Any, key: str, at: str) -> float:
    """The share of a step that each further device adds."""
    try:
        found = units.parse(value, "fraction")
    except UnitError as error:
        raise SpecError(f"{at}: {key}: {error}") from None
    if not 0 <= found <= _LARGEST:
        raise SpecError(f"{at}: {key} must be a share of a step that is zero or more, got {value!r}")
    return found


def count(value: Any, key: str, at: str) -> float:
    """A number of samples, above zero: 50000, or "1.2M"."""
    try:
        found = units.parse(value, "count")
    except UnitError as error:
        raise SpecError(f"{at}: {key}: {error}") from None
    if not found > 0 or (key == "batch" and found != int(found)):
        raise SpecError(
            f"{at}: {key} must be a {'whole ' if key == 'batch' else ''}number of samples above zero, got"
            f" {value!r}"
        )
    return found


def amount(value: Any, at: str, what: str = "work", per: str = "") -> tuple[float, str]:
    """(how much, of what): 400 or "400 steps", "3 epochs", "1.2M samples"; with `per` "/s", a rate. No unit:
    "".
    """
    form = (
        f'a number above zero, or one with its unit such as "3 epochs{per}" (samples, steps, epochs or'
        " tokens)"
    )
    if isinstance(value, str) and (match := _AMOUNT.match(value)):
        unit = match[2] if match[2].endswith("s") else f"{match[2]}s"
        if unit not in UNITS or (match[3] or "") != per:
            near = nearest(unit, UNITS)
            raise SpecError(
                f"{at}: {what} {value!r}: "
                + (f'did you mean "{match[1]} {near[0]}{per}"?' if near else f"write {form}")
            )
        value = match[1]
    else:
        unit = ""
    try:
        found = units.parse(value, "count")
    except UnitError:
        found = 0.0
    if not (found > 0 and math.isfinite(found)):
        raise SpecError(f"{at}: {what} must be {form}, got {value!r}")
    return found, unit


def rates(value: Any, at: str) -> dict[str, Any]:
    """Work per second by devices: numbers in the unit of work, or all with their own (`"120 samples/s"`)."""
    form = "{ DEVICES = WORK_PER_SECOND, ... }"
    if not isinstance(value, Mapping) or not value:
        raise SpecError(f"{at}: rates are written {form}, got {value!r}")
    found = {}
    for key, rate in value.items():
        devices = size(key, f"rates are written {form}; they", at)
        number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
        if not isinstance(rate, str) and not (number and 0 < rate < math.inf):
            raise SpecError(
                f"{at}: rates are written {form} with numbers above zero, got {devices} = {rate!r}"
            )
        found[str(devices)] = (*amount(rate, at, f"rates: {devices} =", "/s"), rate)
    if len({unit for _, unit, _ in found.values()}) > 1:
        raise SpecError(
            f"{at}: rates must all be in one unit, got {', '.join(str(rate) for *_, rate in found.values())}"
        )
    kept = {devices: rate for devices, (_, _, rate) in found.items()}
    return {devices: rate if isinstance(rate, str) else float(rate) for devices, rate in kept.items()}


def command(value: Any, at: str) -> tuple[str, ...]:
    """The words of a command."""
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise SpecError(f"{at}: command {value!r}: {error}") from None
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(word, str) for word in value):
        raise SpecError(
            f"{at}: command must be a list of words or one line (no shell reads it), got {value!r}"
        )
    return tuple(words(word, "command", at) for word in value)


def environment(value: Any, at: str) -> dict[str, str]:
    """Names and values."""
    if not isinstance(value, Mapping) or not all(isinstance(v, (str, int, float)) for v in value.values()):
        raise SpecError(f'{at}: environment is written {{ NAME = "value", ... }}, got {value!r}')
    found = {
        words(key, "environment", at): words(str(item), f"environment: {key}", at)
        for key, item in value.items()
    }
    for key in found:
        if not key or "=" in key:
            raise SpecError(f"{at}: environment: a name must not be empty nor hold '=', got {key!r}")
    return found


def ends(value: Any, at: str) -> dict[str, list[float]] | str:
    """Early ends, as shares of the work at which jobs like this one end, and the chance of each; the rest
    succeeds.

    `"history"` (left as it is), `"philly"` (a cluster with published shares), `{ early = 0.4 }`, `{ seen =
    [1, 0.2, 1] }` (what past ones did of their work), or `{ at = [0.1, 0.5], chance = [0.2, 0.1] }`.
    """
    form = (
        'ends is "history", a cluster with published shares such as "philly", { early = 0.4 }, { seen = [1,'
        " 0.2] } or { at = [0.1, 0.5], chance = [0.2, 0.1] }"
    )
    if value == HISTORY:
        return HISTORY
    try:
        if isinstance(value, str):
            found = published(value)
        elif isinstance(value, Mapping) and set(value) == {"early"}:
            found = ends_.geometric(float(value["early"]))
        elif isinstance(value, Mapping) and set(value) == {"seen"}:
            found = ends_.empirical([float(share) for share in value["seen"]])
        elif isinstance(value, Mapping) and set(value) == {"at", "chance"}:
            found = ends_.Ends(tuple(float(s) for s in value["at"]), tuple(float(p) for p in value["chance"]))
        else:
            raise SpecError(f"{form}, got {value!r}")
    except PacelineError as error:
        raise SpecError(f"{at}: {error}") from None
    except (TypeError, ValueError, OverflowError):
        raise SpecError(f"{at}: {form}, got {value!r}") from None
    return {"at": list(found.shares), "chance": list(found.probabilities)}


def published(name: str) -> ends_.Ends:
    """Early ends by the published shares of a cluster: killed jobs end evenly over their work, failed ones
    evenly in its logarithm.
    """
    shares = early_termination.get(name)
    early: list[float] = []
    for chance, first in ((shares.killed, 0.0), (shares.failed, early_termination.FIRST)):
        each = round(chance * _POINTS)
        early += [(first ** (1 - (i + 0.5) / each) if first else (i + 0.5) / each) for i in range(each)]
    return ends_.empirical([*early, *[1.0] * (_POINTS - len(early))])


def speeds(value: Any, at: str) -> dict[str, dict[str, list[float]]]:
    """A table of `Goodput.tabulated`, as it was stored."""
    try:
        out = {
            str(kind): {str(size(n, "speeds", at)): [float(x) for x in row] for n, row in rows.items()}
            for kind, rows in value.items()
        }
    except (AttributeError, TypeError, ValueError, OverflowError):
        out = {}
    rows = [row for table in out.values() for row in table.values()]
    # rate and batch as planned, then those of the best goodput
    if not rows or not all(len(row) == 4 and all(0 < x < math.inf for x in row) for row in rows):
        raise SpecError(
            f"{at}: speeds are worked out by `paceline submit` and `paceline schedule`, not written; "
            f"give one of {', '.join(SOURCES)}"
        )
    return out


def goodput(fields: Mapping[str, Any]) -> Goodput | None:
    """The speed of a job in samples, from a model, a profile or rates that have a unit; None where work and
    speed share one unit already.
    """
    unit = amount(next(iter(fields["rates"].values())), "rates", per="/s")[1] if "rates" in fields else ""
    if "model" not in fields and "profile" not in fields:
        for key in ("noise_scale", "most_batch"):
            if key in fields:
                raise SpecError(f"{key} goes with a speed that knows batches: a model or a profile")
        if not unit:
            return None
    if "work" not in fields:
        raise SpecError(
            'work is missing: how much there is to do, such as "3 epochs", "10000 steps" or "1.2M samples"'
        )
    of, batch, per = amount(fields["work"], "work")[1], fields.get("batch", 0.0), 1.0
    if not of:
        raise SpecError(
            f'work needs its unit here, such as work = "{fields["work"]} steps" (samples, steps, epochs or'
            " tokens)"
        )
    if "model" in fields:
        source, batch = _predicted(fields)
    elif "profile" in fields:
        source, batch = _profiled(fields)
    else:
        each = 1.0 if unit == of else _samples(unit, batch, fields, "rates")
        source = MeasuredRates(
            {int(size): amount(rate, "rates", per="/s")[0] * each for size, rate in fields["rates"].items()}
        )
    if unit != of:
        per = _samples(of, batch, fields, "work")
    most, noise = fields.get("most_batch", 0.0), fields.get("noise_scale", 0.0)
    if most and not noise:
        raise SpecError("most_batch needs noise_scale: without it nobody knows what a larger batch is worth")
    planned = source.batch(fields.get("devices", 1), batch) if batch else 1.0
    return Goodput(source=source, planned=planned, most=most, noise_scale=noise, samples_per_unit=per)


def _samples(unit: str, batch: float, fields: Mapping[str, Any], what: str) -> float:
    """Samples that make a unit of work."""
    from paceline.spec.plan import Plan

    if unit == "tokens":
        if not (seq := Plan.parse(fields.get("plan", "")).seq):
            raise SpecError(
                f"{what} in tokens needs a model whose plan says how many a sample has, such as plan ="
                ' "seq=2048"'
            )
        return 1 / seq
    found: float = {"samples": 1.0, "steps": batch, "epochs": fields.get("dataset", 0.0)}[unit]
    if not found:
        raise SpecError(
            f"{what} in {unit} needs"
            f" {'batch, the samples of a step' if unit == 'steps' else 'dataset, the samples of an epoch'}"
        )
    return found


def _predicted(fields: Mapping[str, Any]) -> tuple[SpeedSource, float]:
    from paceline.spec.plan import Plan

    plan = fields.get("plan", "")
    inside = Plan.parse(plan).gbs
    batch = fields.get("batch", float(inside))
    if not batch:
        raise SpecError("a model needs batch, the samples of a step on all devices together")
    if inside and batch != inside:
        raise SpecError(f"batch is {batch:g}, but the plan says gbs={inside}")
    options = {key: fields[key] for key in ("image", "optimizer") if key in fields}
    left = " ".join(word for word in plan.split() if not word.startswith("gbs="))
    return PredictedSpeed(
        fields["model"], left, fields.get("device", ""), fields.get("network", ""), options
    ), batch


def _profiled(fields: Mapping[str, Any]) -> tuple[SpeedSource, float]:
    path = Path(fields["profile"])
    source = _load(path, path.stat().st_mtime_ns if path.is_file() else 0)
    if not isinstance(source, ServerSpeed):
        if "batch" not in fields:
            raise SpecError(
                "a profile of measured steps needs batch, the samples of a step on all devices together"
            )
        return source, fields["batch"]
    job = source.profile
    if fields.get("batch", job.batch) != job.batch:
        raise SpecError(
            f"batch is {fields['batch']:g}, but {path.name} was taken with {job.batch} samples on each worker"
        )
    if job.mode not in TOGETHER and "noise_scale" in fields:
        raise SpecError(
            f"noise_scale says nothing of a job whose workers do not wait for each other ({path.name} is"
            f" {job.mode})"
        )
    return source, float(job.batch)


@lru_cache(maxsize=64)
def _load(path: Path, changed: int) -> SpeedSource:
    """A profile: measured steps (.csv) or what `paceline profile` wrote. Fitting takes a second: once, while
    the file stays as it is.
    """
    if path.suffix == ".csv":
        return AllReduceSpeed.read(path)
    from paceline.queueing.profile import JobProfile

    return ServerSpeed(JobProfile.load(path))
