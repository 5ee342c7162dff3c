"""Auto-tuning from a little truth: the best plans are run on the cluster at hand, and what that teaches ranks
all of them again.

    # processes of this machine
    paceline plan my_net.py:build --cluster 2xthis-machine.toml --gbs 64 --measure 3
    # an emulated network
    paceline plan my_net.py:build --cluster 2x1xthis-machine.toml@100Mb/s --gbs 64 --measure 3

Two factors come out of it. The one of computation is what a step without communication takes over its
prediction; the one of communication is what brings the steps with it nearest to their predictions then. Plans
that were run are ranked by their own time.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from paceline.api import sizes
from paceline.catalog import clusters
from paceline.errors import PacelineError, RunError, SpecError
from paceline.plan.answer import best_measured, distinct, why
from paceline.plan.general import Captured, captured_for, limits, plan_module
from paceline.plan.request import Progress, Request, silent
from paceline.predict import simulated
from paceline.predict.step import predict
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan
from paceline.spec.planned import Planned, Question, Ranked
from paceline.spec.vocabulary import DeviceKind, Sharding
from paceline.train.launch import run
from paceline.units import parse

#: steps that are timed at once, how often, and steps before that
STEPS, ROUNDS, WARM = 3, 3, 2
#: ranks that this machine is asked to run at most
MOST_RANKS = 16
#: bandwidth over what was assumed, at least and at most; places that are tried between, and sections about
#: the best of them
LEAST, BEST, PLACES, SECTIONS = 1 / 512, 8.0, 12, 12
#: corrections of the factor of computation
REPEATS = 4
#: where no bandwidth changes predictions by more than this, communication hides and says nothing about itself
SILENT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlans:
    """Seconds of a step by plan, of a micro-batch without communication by its size and recomputation, and
    what could not run.
    """

    steps: Mapping[Plan, float]
    alone: Mapping[tuple[int, str], float]
    refused: Mapping[Plan, str]


def tune(question: Question, count: int, *, progress: Progress | None = None) -> Planned:
    """The answer to a question about a captured model, with the best `count` plans run and everything ranked
    again.
    """
    where, options = _here(question, count), dict(question.options)
    rate = options.pop("price_per_s", None)
    where = where if rate is None else where.priced(parse(rate, "price_rate"))
    names = ("objective", "fix", "forbid", "allow", "pareto")
    words = {name: options.pop(name) for name in names if name in options}
    top, _ = options.pop("top", 10), options.pop("most", None)
    if options.pop("tokens", None) or options.pop("deadline_s", None):
        raise SpecError(
            f"tokens and a deadline are for models known by their sizes, not for {question.model}"
        )
    asked = Request(
        where=(where,), gbs=question.gbs, seq=question.seq, top=10**6, progress=progress or silent, **words
    )
    captured = captured_for(question.model, limits(asked), asked, options)
    how = captured.settings

    def planned(cluster: Cluster) -> Planned:
        return plan_module(captured, replace(asked, where=(cluster,)))

    begun = time.monotonic()
    first = planned(where)
    if first.interrupted:
        return replace(first, top=first.top[:top])
    before = {ranked.plan: ranked.prediction.step_s for ranked in first.top}
    truth = measure(question.model, how, [ranked.plan for ranked in distinct(first.top)[:count]], where)
    compute, network = factors(captured, where, truth)
    again = planned(calibrated(where, compute, network))
    found = [one for one in distinct(again.top) if one.plan not in truth.refused]
    ranked = _ranked(found, truth, before)
    ahead = [one.plan for one in itertools.takewhile(lambda one: one.measured_s is None, ranked)][:count]
    if ahead:  # what the calibration puts before everything that ran is run too
        truth = _both(truth, measure(question.model, how, ahead, where))
        ranked = _ranked(found, truth, before)
    shown = [replace(ranked[0], lost=""), *(replace(one, lost=_lost(one, ranked[0])) for one in ranked[1:])]
    notes = [
        (
            f"{len(truth.steps)} plans were run: computation takes {compute:.2f} and communication"
            f" {1 / network:.2f} times what was predicted first"
        )
    ]
    notes += [f"not run: {plan}: {reason}" for plan, reason in truth.refused.items()]
    return replace(
        again,
        top=tuple(shown[:top]),
        measured=best_measured(shown),
        notes=(*again.notes, *notes),
        elapsed_s=time.monotonic() - begun,
        calibration={"compute": compute, "communication": 1 / network},
    )


def _here(question: Question, count: int) -> Cluster:
    """The cluster, where it can be had on this machine."""
    if sizes(question.model) is not None or question.model.endswith(".json"):
        raise SpecError(
            f"--measure runs modules with data-parallel plans, and {question.model} is known by its sizes;"
            " give FILE.py:FUNCTION"
        )
    if not question.cluster:
        raise SpecError("--measure needs the cluster that is at hand: --cluster 2xthis-machine.toml")
    if count < 1:
        raise SpecError(f"--measure takes how many plans to run, at least 1; got {count}")
    where = clusters.get(question.cluster)
    if where.device.kind != DeviceKind.CPU:
        raise SpecError(
            f"--measure runs on this machine's processors, and {where.name} has {where.device.name};"
            " `paceline calibrate -o this-machine.toml`, then --cluster 2xthis-machine.toml, or"
            " 2x1xthis-machine.toml@100Mb/s for an emulated network"
        )
    if not 2 <= where.device_count <= MOST_RANKS:
        raise SpecError(
            f"--measure runs 2 to {MOST_RANKS} ranks on this machine; {where.name} has {where.device_count}"
        )
    return where


# -- the truth -------------------------------------------------------------------------------------


def measure(
    model: str, options: Mapping[str, Any], plans: Sequence[Plan], where: Cluster, *, timeout_s: float = 900.0
) -> MeasuredPlans:
    """Runs some plans: in processes of this machine, or where the cluster has several nodes in an emulated
    one with its network.
    """
    world = where.device_count
    arguments = {"model": model, "options": dict(options), "plans": [str(plan) for plan in plans]}
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world))}
    with ExitStack() as stack:
        hosts = None
        if where.nodes > 1:
            from paceline.bench.emulate import EmulatedCluster

            outer = where.tiers[-1]
            hosts = stack.enter_context(
                EmulatedCluster(hosts=where.nodes, link_Bps=outer.node_bandwidth_Bps or outer.bandwidth_Bps)
            )
        ranks = run(
            "paceline.bench.tune:worker",
            world=world,
            arguments=arguments,
            on=hosts,
            ranks_per_host=where.node_devices,
            environment=threads,
            timeout_s=timeout_s,
        )
    seconds = {
        key: statistics.median(
            max(times) for times in zip(*(rank["rounds"][key] for rank in ranks), strict=True)
        )
        for key in ranks[0]["rounds"]
    }
    refused = {plan: ranks[0]["refused"][str(plan)] for plan in plans if str(plan) in ranks[0]["refused"]}
    steps = {plan: seconds[str(plan)] for plan in plans if plan not in refused}
    if not steps:
        raise RunError(
            f"--measure: none of the best {len(plans)} plans could be run; the first:"
            f" {next(iter(refused.values()))}"
        )
    return MeasuredPlans(
        steps=steps, alone={(p.mbs, p.recompute): seconds[_alone(p)] for p in steps}, refused=refused
    )


def worker(model: str, options: Mapping[str, Any], plans: Sequence[str]) -> dict[str, Any]:
    """What a rank runs: in rounds, so that what disturbs the machine disturbs all plans; seconds of a step by
    plan and round.
    """
    import torch.distributed as dist

    found = [Plan.parse(text) for text in plans]
    rounds: dict[str, list[float]] = {}
    refused: dict[str, str] = {}
    for turn in range(ROUNDS):
        done: set[str] = set()
        for plan in found if turn % 2 == 0 else reversed(found):
            for key, alone in ((_alone(plan), True), (str(plan), False)):
                if key in refused or key in done:
                    continue
                try:
                    rounds.setdefault(key, []).append(_time(model, options, plan, alone))
                except PacelineError as error:  # all ranks are refused alike
                    refused[key] = str(error)
                done.add(key)
                dist.barrier()
    return {"rounds": rounds, "refused": refused}


def _alone(plan: Plan) -> str:
    """The name of a micro-batch that does not communicate."""
    return f"alone mbs={plan.mbs} recompute={plan.recompute}"


def _time(model: str, options: Mapping[str, Any], plan: Plan, alone: bool) -> float:
    """Seconds of a step of a plan; or, `alone`, of a step of one micro-batch on each rank by itself."""
    import torch
    import torch.distributed as dist

    import paceline.train as pt
    from paceline.bench.real import build
    from paceline.train.memory import recompute

    plan = replace(plan, dp=plan.dp or dist.get_world_size())
    torch.manual_seed(0)
    module, forward, optimizer = build(model, plan.mbs, options)
    wrapped = module
    if alone:
        recompute(module, plan.recompute)
    # torch's own, which is what such plans are predicted as
    elif plan.sharding is Sharding.DDP and plan.relax.plain:
        wrapped, optimizer = pt.parallelize(
            recompute(module, plan.recompute), optimizer, plan="ddp", bucket_cap_mb=plan.bucket_bytes / 2**20
        )
    else:
        wrapped, optimizer = pt.parallelize(module, optimizer, plan=plan)
    held, finish = _waits(wrapped)

    def step() -> None:
        optimizer.zero_grad()
        for i in range(1 if alone else plan.micro_batches):
            with ExitStack() as stack:
                if i < plan.micro_batches - 1 and not alone:
                    stack.enter_context(held())
                forward(wrapped).backward()
        optimizer.step()

    try:
        for _ in range(WARM):
            step()
        finish()
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(STEPS):
            step()
        finish()
        dist.barrier()
        return (time.perf_counter() - begun) / STEPS
    finally:
        pt.close(module)


def _waits(module: Any) -> tuple[Callable[[], Any], Callable[[], None]]:
    """How gradients of a module add up without being sent, and how to wait for what a step leaves under
    way.
    """
    from contextlib import nullcontext

    import paceline.train as pt

    try:
        strategy = pt.of(module)
    except SpecError:  # one rank by itself
        return nullcontext, lambda: None
    return strategy.no_sync, strategy.synchronize


# -- what it teaches -------------------------------------------------------------------------------


def calibrated(where: Cluster, compute: float, network: float) -> Cluster:
    """A cluster whose operators take `compute` times as long, and whose links have `network` times the
    bandwidth.
    """
    said = where.device.calibration
    scales = {
        key: compute * value
        for key, value in {"scale.": 1.0, "host": 1.0, **said}.items()
        if key == "host" or key.startswith("scale.")
    }
    tiers = tuple(tier.sped_up(network) for tier in where.tiers)
    return replace(where, device=replace(where.device, calibration={**said, **scales}), tiers=tiers)


def factors(captured: Captured, where: Cluster, truth: MeasuredPlans) -> tuple[float, float]:
    """Computation over its prediction, and the bandwidth over that assumed with which measured steps are met
    best.
    """
    plans: dict[tuple[int, str], Plan] = {(plan.mbs, plan.recompute): plan for plan in truth.steps}
    compute = 1.0
    for _ in range(REPEATS):  # a little of a step does not scale with it
        device = calibrated(where, compute, 1.0).device
        apart = [
            math.log(seconds / predict(captured.get(plans[key]), device).step_s)
            for key, seconds in truth.alone.items()
        ]
        compute *= math.exp(statistics.fmean(apart))

    def steps(network: float) -> list[float]:
        cluster = calibrated(where, compute, network)
        return [simulated.predict(captured.get(plan), cluster, plan).step_s for plan in truth.steps]

    def error(logarithm: float) -> float:
        found = steps(math.exp(logarithm))
        # absolute, not squared: a plan that runs in another way than it is predicted is not to move the
        # factor of all
        return sum(abs(math.log(a / b)) for a, b in zip(found, truth.steps.values(), strict=True))

    slow, fast = steps(LEAST), steps(BEST)
    if all(abs(a / b - 1) < SILENT for a, b in zip(slow, fast, strict=True)):
        return compute, 1.0
    return compute, math.exp(least(error, math.log(LEAST), math.log(BEST)))


def least(of: Callable[[float], float], low: float, high: float) -> float:
    """Where a function is least: about the best of some places, by golden sections."""
    places = [low + i * (high - low) / PLACES for i in range(PLACES + 1)]
    found = [of(place) for place in places]
    middle = found.index(min(found))
    low, high = places[max(0, middle - 1)], places[min(PLACES, middle + 1)]
    share = (math.sqrt(5) - 1) / 2
    inner = [high - share * (high - low), low + share * (high - low)]
    values = [of(x) for x in inner]
    for _ in range(SECTIONS):
        if values[0] <= values[1]:
            high, inner = inner[1], [inner[1] - share * (inner[1] - low), inner[0]]
            values = [of(inner[0]), values[0]]
        else:
            low, inner = inner[0], [inner[1], inner[0] + share * (high - inner[0])]
            values = [values[1], of(inner[1])]
    return inner[0] if values[0] <= values[1] else inner[1]


def _both(one: MeasuredPlans, other: MeasuredPlans) -> MeasuredPlans:
    return MeasuredPlans(
        steps={**one.steps, **other.steps},
        alone={**one.alone, **other.alone},
        refused={**one.refused, **other.refused},
    )


def _ranked(found: Sequence[Ranked], truth: MeasuredPlans, before: Mapping[Plan, float]) -> list[Ranked]:
    """Plans that ran are worth what was measured; of the others it is taken that they are as far off, on
    average, as those were.
    """
    apart = [
        math.log(truth.steps[one.plan] / one.prediction.step_s) for one in found if one.plan in truth.steps
    ]
    usual = math.exp(statistics.fmean(apart)) if apart else 1.0
    out = []
    for one in found:
        measured = truth.steps.get(one.plan)
        factor = usual if measured is None else measured / one.prediction.step_s
        known = one.unmeasured if measured is None else ()
        out.append(
            replace(
                one,
                measured_s=measured,
                unmeasured=known,
                first_s=before.get(one.plan),
                value=one.value * factor,
            )
        )
    return sorted(out, key=lambda one: one.value)


def _lost(one: Ranked, best: Ranked) -> str:
    if one.measured_s is not None and best.measured_s is not None:
        return f"measured {100 * (one.value / best.value - 1):+.1f} %"
    return why(one.prediction, best.prediction)
