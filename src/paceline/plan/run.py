"""Plan a transformer: from what the user asks for to the answer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

from paceline import units
from paceline.catalog import clusters
from paceline.errors import DoesNotFit, PlanError, SpecError
from paceline.plan.answer import distinct
from paceline.plan.ranges import ranges
from paceline.plan.request import Goal, Request, goal
from paceline.plan.search import fits, search
from paceline.plan.space import Limits, Space
from paceline.plan.table import Table
from paceline.plan.trials import MOST, Trials
from paceline.plan.workers import reached
from paceline.predict.memory import available_bytes
from paceline.spec.cluster import Cluster
from paceline.spec.planned import Planned, Range
from paceline.spec.transformer import Transformer

#: tokens of a step where no batch is given, as large language models are trained with
TOKENS = 4 * 2**20


def plan_transformer(model: Transformer, asked: Request) -> Planned:
    """The best plan of a transformer on one of some clusters, with its certificate.

    Ctrl-C ends the search with the best so far; before there is one it raises `Interrupted` with what was
    reached.
    """
    begun = time.monotonic()
    space = _space(model, asked)
    steps = asked.tokens / (space.gbs * space.seq) if asked.tokens else None
    aim = _aim(asked, steps)
    found = search(space, aim, most=asked.most or MOST, processes=asked.processes, progress=asked.progress)
    if not found.tried:
        raise _nothing(space, found, asked.deadline_s or 0.0, steps or 0.0)
    shown, stays = distinct(found.tried), tuple[Range, ...]()
    try:
        stays = () if found.interrupted else ranges(model, shown)
    except KeyboardInterrupt:
        found.interrupted = True
    found.begun = begun
    return found.planned(
        asked,
        shown,
        model=model.name,
        sizes=model,
        gbs=space.gbs,
        seq=space.seq,
        steps=steps,
        ranges=stays,
        notes=tuple(_notes(space, asked, found)),
    )


def _aim(asked: Request, steps: float | None) -> Goal:
    """What is to be small, and how long a step may take."""
    if asked.deadline_s is None:
        return goal(asked.objective, asked.where)
    if steps is None:
        raise SpecError("--deadline needs --tokens: without them there is no end to be met")
    return goal(asked.objective, asked.where, asked.deadline_s / steps)


def _space(model: Transformer, asked: Request) -> Space:
    """The plans to choose from; PlanError where there are none."""
    limits = Limits.of(asked.fix, asked.forbid, asked.allow)
    seq = limits.settled("seq", asked.seq, "--seq") or model.seq
    gbs = limits.settled("gbs", asked.gbs, "--gbs") or max(1, 2 ** round(math.log2(TOKENS / seq)))
    space = Space(model, tuple(asked.where), gbs, seq, limits)
    with reached("the space of plans was being put together"):
        if not len(space):
            raise PlanError(space.why_empty())
    return space


def sizes(device: str, low: int, high: int) -> tuple[Cluster, ...]:
    """Clusters of a device from `low` to `high` devices, doubling: of the catalog's nodes with it, else eight
    to a node that share 400 Gb/s.
    """
    single = (one for one in map(clusters.get, clusters.names()) if one.nodes == 1)
    node = next((one for one in single if one.device.name == device), None)
    out = []
    for count in (low << doubled for doubled in range((high // low).bit_length())):
        per_node = node.node_devices if node else min(8, count)
        name = node.name if node else f"{per_node}x{device}@400Gb/s/node"
        if count % per_node == 0:
            out.append(clusters.get(f"{count // per_node}x{name}"))
    if not out:
        raise SpecError(
            f"--gpus {low}..{high}: no whole nodes of {device} in between; its nodes have {per_node}"
        )
    return tuple(out)


def _notes(space: Space, asked: Request, found: Trials) -> Iterator[str]:
    """What to say beside the answer."""
    if not asked.gbs and "gbs" not in space.limits.fixed:
        tokens = space.gbs * space.seq
        yield f"no global batch was given: {space.gbs} samples, {tokens:,} tokens a step"
    if found.interrupted:
        yield "interrupted: the best so far; the certificate holds for what was found until then"
    elif found.undecided:
        yield (
            f"{found.undecided:,} plans could be better by up to {100 * found.gap:.2f} %;"
            " --most simulates more of them"
        )


def _nothing(space: Space, found: Trials, deadline_s: float, steps: float) -> PlanError:
    """Which constraint leaves no plan, by how much, and the smallest change that would."""
    if found.by_memory < found.space or found.nearest is None:
        days = f"{deadline_s / 86400:.1f} days"
        late = f"no plan for {space.model.name} meets the deadline of {days} ({steps:,.0f} steps)"
        return PlanError(f"{late}; allow more time, or more devices")
    cluster, plan, spare = found.nearest
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
