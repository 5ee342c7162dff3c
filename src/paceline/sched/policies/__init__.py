"""The policies by name, and those of a user's file."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import SpecError, UnknownName
from paceline.sched.policies.backfill import Easy
from paceline.sched.policies.elastic import Elastic
from paceline.sched.policies.fair import Gavel, MaxMin
from paceline.sched.policies.gittins import Gittins
from paceline.sched.policies.las import Las
from paceline.sched.policies.optimus import Optimus
from paceline.sched.policies.order import Fifo, Sjf, Srsf, Srtf
from paceline.sched.policies.success import Success
from paceline.sched.policy import Policy

#: name -> (how it is made, what it is)
POLICIES: dict[str, tuple[Callable[..., Policy], str]] = {
    "fifo": (Fifo, "first come, first served"),
    "easy": (Easy, "FIFO with EASY backfill"),
    "sjf": (Sjf, "shortest job first, not preemptive"),
    "srtf": (Srtf, "shortest remaining time first"),
    "srsf": (Srsf, "shortest remaining service (time x devices) first"),
    "las": (Las, "least attained service in two levels (Tiresias), rounds of 60 s"),
    "tiresias": (Las, "the same as las"),
    "gittins": (Gittins, "Gittins index over levels of attained service, learnt from jobs that are over"),
    "gittins-ends": (lambda **kw: Gittins(**{"successes": True, **kw}), "the same, knowing which ends are successes (Yao et al., lengths unknown)"),
    "optimus": (Optimus, "one device each, then by gain in remaining time (Optimus), rounds of 60 s"),
    "pollux": (lambda **kw: Elastic(**{"haste": 0.0, "adaptive": True, **kw}), "largest sum of goodput speedups"),
    "goodput": (lambda **kw: Elastic(**{"haste": 0.5, "adaptive": True, **kw}), "goodput per device, weighted towards short jobs; batches adapt"),
    "marginal": (lambda **kw: Elastic(**{"haste": 1.0, **kw}), "speedup per added device over remaining time"),
    "marginal-ends": (lambda **kw: Elastic(**{"haste": 1.0, "knows_ends": True, **kw}), "the same, knowing the distribution of early ends"),
    "efficiency": (lambda **kw: Elastic(**{"haste": 0.0, "floor": 0.5, **kw}), "speedup per added device alone, none below one half"),
    "maxmin": (MaxMin, "equal shares over time, kinds of devices not told apart"),
    "gavel": (Gavel, "equal shares over time, each job on the kind it gains most from"),
    "srtf-ends": (lambda **kw: Success(**{"service": False, **kw}), "srtf that knows early ends: expected time over the chance of success"),
    "success": (Success, "chance of success per expected device-second, knowing early ends (Yao et al.)"),
}


def names() -> list[str]:
    """Names of the policies that come with it."""
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
    if not path.is_file():
        raise SpecError(f"no file {file}, named by policy {text!r}")
    spec = importlib.util.spec_from_file_location(f"_policy_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SpecError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SpecError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if found is None:
        known = [n for n, v in vars(module).items() if inspect.isclass(v) and issubclass(v, Policy) and v is not Policy]
        raise UnknownName(f"policy in {file}", name, known)
    made = found(**options) if callable(found) else found
    if not isinstance(made, Policy):
        raise SpecError(f"{text}: expected a subclass of paceline.sched.Policy, got {type(made).__name__}")
    return made
