"""Plan a transformer: from what the user asks for to the answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline import units
from paceline.catalog import clusters
from paceline.errors import DoesNotFit, PlanError, SpecError, nearest
from paceline.plan import evidence
from paceline.plan.answer import AXES, best_measured, distinct, front, why
from paceline.plan.ranges import ranges
from paceline.plan.search import MOST, Found, Goal, Progress, Tried, search
from paceline.plan.space import LOSSY, Limits, Space
from paceline.plan.workers import reached
from paceline.spec.cluster import Cluster
from paceline.spec.planned import Planned, Range, Ranked
from paceline.spec.transformer import Transformer

#: tokens of a step where no batch is given, as large language models are trained with
TOKENS = 4 * 2**20
OBJECTIVES = ("time", "cost", "energy")


def plan_transformer(
    model: Transformer,
    where: Sequence[Cluster],
    *,
    gbs: int | None = None,
    seq: int | None = None,
    objective: str = "time",
    fix: Sequence[str] = (),
    forbid: Sequence[str] = (),
    allow: Sequence[str] = (),
    tokens: float | None = None,
    deadline_s: float | None = None,
    top: int = 10,
    pareto: Sequence[str] = (),
    most: int = MOST,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Planned:
    """The best plan of a transformer on one of some clusters, with its certificate.

    Ctrl-C ends the search with the best so far; before there is one it raises `Interrupted` with what was
    reached.
    """
    begun = time.monotonic()
    limits = Limits.of(fix, forbid, allow)
    seq = limits.settled("seq", seq, "--seq") or model.seq
    notes = []
    batch = limits.settled("gbs", gbs, "--gbs")
    if not batch:
        batch = max(1, 2 ** round(math.log2(TOKENS / seq)))
        notes.append(f"no global batch was given: {batch} samples, {batch * seq:,} tokens a step")
    space = Space(model, tuple(where), batch, seq, limits)
    with reached("the space of plans was being put together"):
        if not len(space):
            raise PlanError(space.why_empty())
    steps = tokens / (batch * seq) if tokens else None
    if deadline_s and not steps:
        raise SpecError("--deadline needs --tokens: without them there is no end to be met")
    aim = goal(objective, where, deadline_s / steps if deadline_s and steps else math.inf)
    found = search(space, aim, most=most, processes=processes, progress=progress)
    if not found.tried:
        raise _nothing(space, found, deadline_s, steps)
    ranked = [_ranked(tried, found.tried[0]) for tried in found.tried]
    shown = distinct(ranked)
    interrupted = found.interrupted
    stays: tuple[Range, ...] = ()
    if not interrupted:
        try:
            stays = ranges(model, shown)
        except KeyboardInterrupt:
            interrupted = True
    return Planned(
        model=model.name,
        sizes=model,
        objective=objective,
        gbs=batch,
        seq=seq,
        space=found.space,
        by_memory=found.by_memory,
        by_bound=found.by_bound,
        by_evaluation=len(found.tried),
        undecided=found.undecided,
        gap_pct=100 * found.gap,
        elapsed_s=time.monotonic() - begun,
        top=tuple(shown[:top]),
        measured=best_measured(shown),
        ranges=stays,
        pareto=front(ranked, pareto) if pareto else (),
        notes=(*notes, *_notes(found, interrupted)),
        interrupted=interrupted,
        steps=steps,
    )


def goal(
    objective: str, where: Sequence[Cluster], most_s: float = math.inf, *, flag_of: str = "objective"
) -> Goal:
    """What is to be small; SpecError, naming the flag, where a device has no price or power to count by."""
    if objective not in OBJECTIVES:
        near = nearest(objective, list(OBJECTIVES))
        raise SpecError(
            f"unknown objective {objective!r}; "
            + (f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(OBJECTIVES)}")
        )
    factors: dict[str, Callable[[Cluster], float | None]] = {
        "time": lambda c: 1.0,
        "cost": lambda c: c.device.price_per_s and c.device.price_per_s * c.device_count,
        "energy": lambda c: c.device.tdp_w and c.device.tdp_w * c.device_count,
    }
    missing = next((c.device.name for c in where if not factors[objective](c)), None)
    if missing:
        fact = "price" if objective == "cost" else "power"
        flag = "give --price, such as --price 2.5USD/h, " if objective == "cost" else ""
        file = f'add it to a device file (like = "{missing}")'
        how = f"{flag}{file} or leave {objective} out"
        raise SpecError(f"{flag_of} {objective}: {missing} has no {fact}; {how}")
    return Goal(objective, lambda c: factors[objective](c) or math.nan, most_s)


def check_axes(axes: Sequence[str], where: Sequence[Cluster]) -> None:
    """Refuses what a front cannot be drawn over, and money and energy where they are not known."""
    for axis in axes:
        if axis not in AXES:
            near = nearest(axis, list(AXES))
            raise SpecError(
                f"--pareto: unknown {axis!r}; "
                + (f"did you mean {near[0]!r}?" if near else f"expected some of {', '.join(AXES)}")
            )
        if axis in OBJECTIVES:
            goal(axis, where, flag_of="--pareto")


def sizes(device: str, low: int, high: int) -> tuple[Cluster, ...]:
    """Clusters of a device from `low` to `high` devices, doubling: of the catalog's nodes with it, else eight
    to a node that share 400 Gb/s.
    """
    known = next(
        (
            name
            for name in clusters.names()
            if clusters.get(name).device.name == device and clusters.get(name).nodes == 1
        ),
        None,
    )
    out = []
    count = low
    while count <= high:
        per_node = clusters.get(known).node_devices if known else min(8, count)
        if count >= per_node and count % per_node == 0:
            out.append(
                clusters.get(
                    f"{count // per_node}x{known}"
                    if known
                    else f"{count // per_node}x{per_node}x{device}@400Gb/s/node"
                )
            )
        count *= 2
    if not out:
        raise SpecError(
            f"--gpus {low}..{high}: no whole nodes of {device} in between; its nodes have {per_node}"
        )
    return tuple(out)


def _ranked(tried: Tried, best: Tried) -> Ranked:
    lost = "" if tried is best else why(tried.prediction, best.prediction)
    lossy = ", ".join(
        word
        for word, fields in LOSSY.items()
        if all(getattr(tried.plan, name) == value for name, value in fields.items())
    )
    return Ranked(
        plan=tried.plan,
        cluster=tried.cluster,
        prediction=tried.prediction,
        value=tried.value,
        bound_s=tried.bound_s,
        lost=lost,
        lossy=lossy,
        unmeasured=evidence.of_plan(tried.plan),
    )


def _notes(found: Found, interrupted: bool) -> list[str]:
    if interrupted:
        return ["interrupted: the best so far; the certificate holds for what was found until then"]
    if found.undecided:
        return [
            (
                f"{found.undecided:,} plans could be better by up to {100 * found.gap:.2f} %;"
                " --most simulates more of them"
            )
        ]
    return []


def _nothing(space: Space, found: Found, deadline_s: float | None, steps: float | None) -> PlanError:
    """Which constraint leaves no plan, by how much, and the smallest change that would."""
    if found.by_memory < found.space:
        days = f"{(deadline_s or 0) / 86400:.1f} days"
        late = f"no plan for {space.model.name} meets the deadline of {days} ({steps:,.0f} steps)"
        return PlanError(f"{late}; allow more time, or more devices")
    assert found.nearest is not None
    plan, cluster, peak, room = found.nearest
    text = (
        f"no plan for {space.model.name} fits on {cluster.name}: the leanest ({plan}) needs"
        f" {units.show(peak, 'bytes')} of the {units.show(room, 'bytes')} of a device"
    )
    return DoesNotFit(f"{text}; {_enough(space, cluster)}")


def _enough(space: Space, cluster: Cluster) -> str:
    """The least of some changes after which a plan fits."""
    from paceline.plan.search import fits

    for times in (2, 4, 8, 16, 32, 64):
        try:
            if fits(replace(space, clusters=(cluster.scaled(times),))):
                return f"it fits on {times * cluster.device_count} devices"
        except SpecError:
            break
    shorter = next(
        (seq for i in range(1, 8) if (seq := space.seq >> i) and fits(replace(space, seq=seq))), None
    )
    return (
        f"it fits with seq={shorter}"
        if shorter
        else "neither 64 times as many devices nor shorter samples would do"
    )
