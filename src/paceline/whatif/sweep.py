"""Sweeps: a field through many values, and what a step takes at each.

nodes=1..256                doubling from 1 to 256
nodes=1..256:200            200 values, evenly
network.inter.bandwidth=100Gb/s..1600Gb/s:9
tp=1,2,4,8                  those values
"""

from __future__ import annotations

import re
from dataclasses import replace

from paceline.errors import PlanError, SpecError
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.whatif import Point, Sweep
from paceline.spec.workload import Workload
from paceline.whatif.edits import Edit, apply
from paceline.whatif.scaling import scaling
from paceline.whatif.subject import Subject

#: fields that change the number of devices
SIZES = ("nodes", "node.devices")
_NUMBER = re.compile(r"^\s*([0-9.eE+_]+)\s*(\D*)$")


def values(text: str) -> list[str]:
    """The values that a sweep's text means."""
    if ".." not in text:
        return [value.strip() for value in text.split(",") if value.strip()]
    span, _, count = text.partition(":")
    first, _, last = span.partition("..")
    ends = [_NUMBER.match(end) for end in (first, last)]
    if ends[0] is None or ends[1] is None or (count and not count.isdigit()):
        raise SpecError(
            f"a sweep is written field=first..last, field=first..last:count or field=a,b,c; got {text!r}"
        )
    low, high, unit = float(ends[0][1]), float(ends[1][1]), ends[1][2].strip() or ends[0][2].strip()
    if low <= 0 or high < low:
        raise SpecError(f"a sweep goes from a number above zero to one that is not smaller; got {text!r}")
    whole = all(float(end[1]).is_integer() for end in ends if end is not None) and not unit
    if count:
        steps = max(2, int(count))
        found = [low + (high - low) * i / (steps - 1) for i in range(steps)]
        found = list(dict.fromkeys(round(value) for value in found)) if whole else found
    else:
        found = []
        while low < high * (1 + 1e-9):
            found.append(low)
            low *= 2
        found += [high] if found[-1] < high * (1 - 1e-9) else []
    return [f"{value:.12g}{unit}" for value in found]


def sweep(subject: Subject, text: str, *, strong: bool = False) -> Sweep:
    """Predicts a subject at every value that `text` (field=values) names.

    `strong` keeps the whole batch of the subject as it is while devices are added; else each replica keeps
    its own.
    """
    path, equals, rest = text.partition("=")
    listed = values(rest) if equals else []
    if not listed:
        raise SpecError(f"a sweep is written field=first..last or field=a,b,c; got {text!r}")
    base = subject.predict().batch if strong else 0
    points = [_point(subject, Edit(path=path.strip(), value=value), base) for value in listed]
    if not any(point.prediction is not None for point in points):
        raise PlanError(f"no value of {path.strip()} can run: {points[0].why_not}")
    kind = "strong" if strong else "weak"
    curve = scaling(points, kind) if path.strip() in SIZES else None
    return Sweep(field=path.strip(), subject=subject.title, points=tuple(points), scaling=curve)


def _point(subject: Subject, edit: Edit, batch: int) -> Point:
    number = _NUMBER.match(edit.value)
    at = float(number[1]) if number is not None else float("nan")
    try:
        edited = apply(subject, [edit])
        if batch:
            edited = _fixed(edited, batch)
        elif subject.plan.gbs and edit.path in SIZES:  # each replica keeps its batch
            whole = subject.plan.gbs * edited.cluster.device_count / subject.cluster.device_count
            edited = replace(edited, plan=replace(edited.plan, gbs=max(1, round(whole))))
        found = edited.predict()
        return Point(value=edit.value, number=at, prediction=found, line_s=line_s(edited, found))
    except PlanError as error:
        return Point(value=edit.value, number=at, why_not=str(error).removeprefix("plan cannot run: "))


def line_s(subject: Subject, found: DistributedPrediction) -> float:
    """Seconds of an all-reduce of a device's gradients over all replicas, as a ring at line rates takes
    them.
    """
    cluster, plan = subject.cluster, subject.plan
    split = plan.tp * plan.pp
    ranks = found.devices // split
    if ranks == 1 or not cluster.tiers:
        return 0.0
    # devices of a node that hold different parts of the model send at the same time
    group = cluster.group(ranks, split if cluster.device_count >= ranks * split else 1)
    rate = min(cluster.uplink(group, i) for i in range(len(cluster.tiers)) if group.fan(i) > 1)
    width = 4 if found.precision.startswith(("fp32", "tf32", "amp")) else 2
    return 2 * (ranks - 1) / ranks * found.parameters / split * width / rate


def _fixed(subject: Subject, batch: int) -> Subject:
    """The subject with a whole batch of so many samples: fewer on each device, where a module has to be
    captured again for it.
    """
    plan = replace(subject.plan, gbs=batch)
    if not isinstance(subject.model, Workload):
        ranks = subject.cluster.device_count // plan.replica_ranks
        if batch < ranks * plan.mbs:  # fewer samples than a pass of every rank takes
            plan = replace(plan, mbs=max(1, batch // max(1, ranks)))
        return replace(subject, plan=plan)
    devices = subject.cluster.device_count
    if batch % devices:
        raise PlanError(f"plan cannot run: a batch of {batch} is not a multiple of {devices} devices")
    each = min(subject.model.batch, batch // devices)
    if (batch // devices) % each:
        each = batch // devices
    smaller = subject.captured(batch=each) if each != subject.model.batch else subject
    return replace(smaller, plan=replace(plan, mbs=0))
