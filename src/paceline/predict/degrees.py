"""Plans of captured modules: what is filled in, and what is refused with the nearest plan that can run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from paceline.errors import PlanError
from paceline.sim.cuts import places
from paceline.spec import schedules
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan, divisors, fewest_micro_batches, problems, with_defaults
from paceline.spec.vocabulary import Offload, Precision, Recompute, Sharding
from paceline.spec.workload import Workload


def resolve(plan: Plan, workload: Workload, cluster: Cluster) -> Plan:
    """The plan filled in for a captured module; PlanError, with the nearest plan that can run, where it
    contradicts itself.
    """
    filled = _fill(plan, workload, cluster)
    found = [*_fixed(plan, workload), *problems(filled, cluster.device_count, None), *_cuts(filled, workload)]
    if found:
        raise PlanError(
            f"plan cannot run: {'; '.join(found)}; nearest feasible plan:"
            f" {_nearest(plan, filled, workload, cluster)}"
        )
    return filled


def _fill(plan: Plan, workload: Workload, cluster: Cluster) -> Plan:
    """The plan with what the capture has settled and what it leaves out itself."""
    dp = plan.dp or max(1, cluster.device_count // plan.pp)
    plan = with_defaults(plan, dp, cluster.node_devices)
    usual = "interleaved" if plan.vpp > 1 else "1f1b"
    schedule = (plan.schedule or usual) if plan.pp > 1 else ""
    sharding = plan.sharding if plan.sharding is Sharding.HSDP or dp > 1 else Sharding.NONE
    return replace(
        plan,
        **_settled(workload),
        tp=1,
        cp=1,
        ep=1,
        dp=dp,
        gbs=plan.gbs or dp * workload.batch * plan.pp,
        sharding=Sharding.DDP if dp > 1 and sharding is Sharding.NONE else sharding,
        schedule=schedule,
        vpp=1 if schedules.get(schedule).v_shaped and plan.vpp == 2 else plan.vpp,
    )


def _settled(workload: Workload) -> dict[str, Any]:
    """Fields of a plan that a capture has settled."""
    return {
        "mbs": workload.batch,
        "seq": workload.seq or 0,
        "recompute": Recompute.FULL if workload.options.get("checkpointing") else Recompute.NONE,
        "offload": Offload.NONE,
        "adapters": False,
        "precision": Precision(workload.precision),
    }


def _fixed(plan: Plan, workload: Workload) -> Iterator[str]:
    """What a capture has settled otherwise than the plan says."""
    for name in ("tp", "cp", "ep"):
        if getattr(plan, name) > 1:
            yield (
                f"{name} {getattr(plan, name)}: a captured module is split by data and, between modules, into"
                " a pipeline"
            )
    if plan.mbs not in (0, workload.batch):
        yield f"mbs {plan.mbs}, but the workload was captured with batch {workload.batch}"
    if plan.seq not in (0, workload.seq):
        yield f"seq {plan.seq}, but the workload was captured with {workload.seq or 'none'}"
    if plan.recompute not in (Recompute.NONE, _settled(workload)["recompute"]):
        yield (
            f"recompute {plan.recompute}, but the workload was captured without (--checkpointing recomputes"
            " blocks)"
        )
    if plan.precision not in (Plan.precision, workload.precision, workload.precision.removeprefix("amp_")):
        yield f"precision {plan.precision}, but the workload was captured in {workload.precision}"
    for words in (["adapters"] * plan.adapters, [f"offload {plan.offload}"] * (plan.offload != "none")):
        yield from (f"{word}: not modelled for captured modules" for word in words)


def _cuts(plan: Plan, workload: Workload) -> Iterator[str]:
    """Whether a module can be cut into the chunks of a pipeline."""
    each = schedules.get(plan.schedule).chunks_per_rank(plan.vpp)
    if plan.pp > 1 and (most := len(places(workload)) + 1) < plan.pp * each:
        yield (
            f"pp {plan.pp} x {each} chunks = {plan.pp * each}, but {workload.name} can be cut into {most} at"
            " most (where one activation passes)"
        )


def _nearest(given: Plan, filled: Plan, workload: Workload, cluster: Cluster) -> Plan:
    """The feasible plan with the closest pipeline degree and chunks, then the closest batch."""
    devices = cluster.device_count
    degrees = sorted(divisors(devices), key=lambda pp: (abs(math.log(pp / filled.pp)), pp))
    orders = dict.fromkeys([(filled.schedule, filled.vpp), (filled.schedule, 1), ("1f1b", 1)])
    for pp in degrees:
        shard = math.gcd(devices // pp, filled.shard) if given.sharding is Sharding.HSDP else 0
        for schedule, vpp in orders if pp > 1 else [("", 1)]:
            wanted = replace(given, dp=devices // pp, pp=pp, schedule=schedule, vpp=vpp, shard=shard)
            plan = _batched(_fill(wanted, workload, cluster), filled.gbs)
            if not [*problems(plan, devices, None), *_cuts(plan, workload)]:
                return plan
    raise AssertionError("data parallel with one micro-batch can always run")


def _batched(plan: Plan, gbs: int) -> Plan:
    """The plan with the closest batch to the one wanted that its schedule can run."""
    rank = plan.dp * plan.mbs
    whole = rank * (plan.pp if schedules.get(plan.schedule).equal_rounds else 1)
    least = -(-fewest_micro_batches(plan) * rank // whole)
    return replace(plan, gbs=max(least, round(gbs / whole), 1) * whole)
