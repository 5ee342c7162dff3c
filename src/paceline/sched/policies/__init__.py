"""The policies by name, those that `register` adds, and those of a user's file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from paceline import extend
from paceline.errors import SpecError, UnknownName
from paceline.sched.policies.backfill import Easy
from paceline.sched.policies.elastic import Elastic
from paceline.sched.policies.fair import Gavel, MaxMin
from paceline.sched.policies.gittins import Gittins
from paceline.sched.policies.las import Las
from paceline.sched.policies.optimus import Optimus
from paceline.sched.policies.ranked import Fifo, Sjf, Srsf, Srtf
from paceline.sched.policies.success import Success
from paceline.sched.policy import Policy

Maker = Callable[..., Policy]
M = TypeVar("M", bound=Maker)
#: name -> (how it is made, what it is)
POLICIES: dict[str, tuple[Maker, str]] = {}


def register(make: M, *, name: str = "", title: str = "") -> M:
    """Makes a policy known by its name: to simulations, studies and the live scheduler.

    `make` takes the policy's options as keywords, as a class does. A class says its own name (`name =
    "mine"`), and in the first line of its docstring what it is; this function may decorate it.
    """
    name = name or str(getattr(make, "name", ""))
    extend.claim("policy", name, make, {known: maker for known, (maker, _) in POLICIES.items()})
    POLICIES[name] = make, title or (make.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    return make


register(Fifo, title="first come, first served")
register(Easy, title="FIFO with EASY backfill")
register(Sjf, title="shortest job first, not preemptive")
register(Srtf, title="shortest remaining time first")
register(Srsf, title="shortest remaining service (time x devices) first")
register(Las, title="least attained service in two levels (Tiresias), rounds of 60 s")
register(Las, name="tiresias", title="the same as las")
register(Gittins, title="Gittins index over levels of attained service, learnt from jobs that are over")
register(
    partial(Gittins, successes=True),
    name="gittins-ends",
    title="the same, knowing which ends are successes (Yao et al., lengths unknown)",
)
register(Optimus, title="one device each, then by gain in remaining time (Optimus), rounds of 60 s")
register(partial(Elastic, haste=0.0, adaptive=True), name="pollux", title="largest sum of goodput speedups")
register(
    partial(Elastic, haste=0.5, adaptive=True),
    name="goodput",
    title="goodput per device, weighted towards short jobs; batches adapt",
)
register(partial(Elastic, haste=1.0), name="marginal", title="speedup per added device over remaining time")
register(
    partial(Elastic, haste=1.0, knows_ends=True),
    name="marginal-ends",
    title="the same, knowing the distribution of early ends",
)
register(
    partial(Elastic, haste=0.0, floor=0.5),
    name="efficiency",
    title="speedup per added device alone, none below one half",
)
register(MaxMin, title="equal shares over time, kinds of devices not told apart")
register(Gavel, title="equal shares over time, each job on the kind it gains most from")
register(
    partial(Success, service=False),
    name="srtf-ends",
    title="srtf that knows early ends: expected time over the chance of success",
)
register(Success, title="chance of success per expected device-second, knowing early ends (Yao et al.)")


def names() -> list[str]:
    """Names of the policies that come with Paceline and of those that were registered."""
    return list(POLICIES)


def get(text: str, **options: Any) -> Policy:
    """A fresh policy: a name, with options as in `las(interval_s=0)`, or `file.py:Class`."""
    base, given = _options(text)
    if ".py:" in base:
        policy = _from_file(base, {**given, **options})
    else:
        if base not in POLICIES:
            raise UnknownName("policy", base, POLICIES, f"allowed: {', '.join(POLICIES)}, or FILE.py:CLASS")
        make = POLICIES[base][0]
        try:
            policy = make(**{**given, **options})
        except TypeError as error:
            raise SpecError(f"policy {text!r}: {str(error).split('() ')[-1]}") from None
    if not policy.name or policy.name != text:
        policy.name = text
    return policy


def split(text: str) -> list[str]:
    """The policies of a comma-separated list; commas inside parentheses belong to options.

    >>> split("srtf,las(interval_s=0,thresholds=3600),optimus")
    ['srtf', 'las(interval_s=0,thresholds=3600)', 'optimus']
    """
    out, depth = [""], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "," and not depth:
            out.append("")
        else:
            out[-1] += char
    return [part.strip() for part in out if part.strip()]


def _options(text: str) -> tuple[str, dict[str, Any]]:
    base, opens, inside = text.partition("(")
    if not opens:
        return base.strip(), {}
    if not inside.endswith(")"):
        raise SpecError(f"policy {text!r}: a closing parenthesis is missing")
    out: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in inside[:-1].split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise SpecError(f"policy {text!r}: options are written NAME=VALUE, got {part!r}")
        out[key.strip()] = _value(value.strip())
    return base.strip(), out


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return float(text) if any(c in text for c in ".einf") else int(text)
    except ValueError:
        return text


def _from_file(text: str, options: dict[str, Any]) -> Policy:
    """The class `file.py:Class` of a user, made with its options."""
    file, _, name = text.rpartition(":")
    path = Path(file)
    module = extend.run(path, f"_policy_{path.stem}", f"policy {text!r}")
    found = getattr(module, name, None)
    if found is None:
        known = [
            n
            for n, v in vars(module).items()
            if inspect.isclass(v) and issubclass(v, Policy) and v is not Policy
        ]
        raise UnknownName(f"policy in {file}", name, known)
    made = found(**options) if callable(found) else found
    if not isinstance(made, Policy):
        raise SpecError(f"{text}: expected a subclass of paceline.sched.Policy, got {type(made).__name__}")
    return made
