"""Plan a transformer: from what the user asks for to the answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from paceline import units
from paceline.catalog import clusters
from paceline.errors import DoesNotFit, PlanError, SpecError, meant
from paceline.plan.answer import AXES, Found, distinct
from paceline.plan.ranges import ranges
from paceline.plan.search import Goal, fits, search
from paceline.plan.space import Limits, Space
from paceline.plan.table import Table
from paceline.plan.trials import MOST, Progress
from paceline.plan.workers import reached
from paceline.predict.memory import available_bytes
from paceline.spec.cluster import Cluster
from paceline.spec.planned import Planned, Range
from paceline.spec.transformer import Transformer

#: tokens of a step where no batch is given, as large language models are trained with
TOKENS = 4 * 2**20
#: what a second of a step is worth on a cluster; not a number where a device has no price or power
OBJECTIVES: dict[str, Callable[[Cluster], float]] = {
    "time": lambda c: 1.0,
    "cost": lambda c: c.device_count * (c.device.price_per_s or math.nan),
    "energy": lambda c: c.device_count * (c.device.tdp_w or math.nan),
}
#: objective -> what a device lacks for it, and how else to give it
_LACKS = {"cost": ("price", "give --price, such as --price 2.5USD/h, "), "energy": ("power", "")}


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
    given = limits.settled("gbs", gbs, "--gbs")
    batch = given or max(1, 2 ** round(math.log2(TOKENS / seq)))
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
    shown, stays = distinct(found.tried), tuple[Range, ...]()
    try:
        stays = () if found.interrupted else ranges(model, shown)
    except KeyboardInterrupt:
        found = replace(found, interrupted=True)
    return replace(found, elapsed_s=time.monotonic() - begun).planned(
        shown,
        top,
        pareto,
        model=model.name,
        sizes=model,
        objective=objective,
        gbs=batch,
        seq=seq,
        steps=steps,
        ranges=stays,
        notes=tuple(_notes(None if given else batch, seq, found)),
    )


def goal(
    objective: str, where: Sequence[Cluster], most_s: float = math.inf, *, flag_of: str = "objective"
) -> Goal:
    """What is to be small; SpecError, naming the flag, where a device has no price or power to count by."""
    if objective not in OBJECTIVES:
        raise SpecError(f"unknown objective {objective!r}; {meant(objective, OBJECTIVES)}")
    factor = OBJECTIVES[objective]
    missing = next((c.device.name for c in where if math.isnan(factor(c))), None)
    if missing:
        fact, flag = _LACKS[objective]
        how = f'{flag}add it to a device file (like = "{missing}") or leave {objective} out'
        raise SpecError(f"{flag_of} {objective}: {missing} has no {fact}; {how}")
    return Goal(objective, factor, most_s)


def check_axes(axes: Sequence[str], where: Sequence[Cluster]) -> None:
    """Refuses what a front cannot be drawn over, and money and energy where they are not known."""
    for axis in axes:
        if axis not in AXES:
            raise SpecError(f"--pareto: unknown {axis!r}; {meant(axis, AXES)}")
        if axis in OBJECTIVES:
            goal(axis, where, flag_of="--pareto")


def sizes(device: str, low: int, high: int) -> tuple[Cluster, ...]:
    """Clusters of a device from `low` to `high` devices, doubling: of the catalog's nodes with it, else eight
    to a node that share 400 Gb/s.
    """
    single = (one for one in map(clusters.get, clusters.names()) if one.nodes == 1)
    node = next((one for one in single if one.device.name == device), None)
    out = []
    for count in (low << doubled for doubled in range((high // low).bit_length())):
        per_node = node.node_devices if node else min(8, count)
        nodes, rest = divmod(count, per_node)
        if nodes and not rest:
            name = node.name if node else f"{per_node}x{device}@400Gb/s/node"
            out.append(clusters.get(f"{nodes}x{name}"))
    if not out:
        raise SpecError(
            f"--gpus {low}..{high}: no whole nodes of {device} in between; its nodes have {per_node}"
        )
    return tuple(out)


def _notes(batch: int | None, seq: int, found: Found) -> Iterator[str]:
    """What to say beside the answer; `batch` where none was given."""
    if batch:
        yield f"no global batch was given: {batch} samples, {batch * seq:,} tokens a step"
    if found.interrupted:
        yield "interrupted: the best so far; the certificate holds for what was found until then"
    elif found.undecided:
        yield (
            f"{found.undecided:,} plans could be better by up to {100 * found.gap:.2f} %;"
            " --most simulates more of them"
        )


def _nothing(space: Space, found: Found, deadline_s: float | None, steps: float | None) -> PlanError:
    """Which constraint leaves no plan, by how much, and the smallest change that would."""
    if found.by_memory < found.space:
        days = f"{(deadline_s or 0) / 86400:.1f} days"
        late = f"no plan for {space.model.name} meets the deadline of {days} ({steps:,.0f} steps)"
        return PlanError(f"{late}; allow more time, or more devices")
    assert found.nearest is not None
    plan, cluster, spare = found.nearest
    room = available_bytes(Table(space.model, cluster).sized(plan))
    text = (
        f"no plan for {space.model.name} fits on {cluster.name}: the leanest ({plan}) needs"
        f" {units.show(room - spare, 'bytes')} of the {units.show(room, 'bytes')} of a device"
    )
    return DoesNotFit(f"{text}; {_enough(space, cluster)}")


def _enough(space: Space, cluster: Cluster) -> str:
    """The least of some changes after which a plan fits."""
    for times in (2, 4, 8, 16, 32, 64):
        try:
            if fits(replace(space, clusters=(cluster.scaled(times),))):
                return f"it fits on {times * cluster.device_count} devices"
        except SpecError:
            break
    for shorter in (space.seq >> halved for halved in range(1, 8)):
        if shorter and fits(replace(space, seq=shorter)):
            return f"it fits with seq={shorter}"
    return "neither 64 times as many devices nor shorter samples would do"
