"""Plans of captured modules: what is filled in, and what is refused with the nearest plan that can run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

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
    devices = cluster.device_count
    dp = plan.dp or max(1, devices // plan.pp)
    plan = with_defaults(plan, dp, cluster.node_devices)
    schedule = (plan.schedule or ("interleaved" if plan.vpp > 1 else "1f1b")) if plan.pp > 1 else ""
    whole = dp * workload.batch
    sharding = plan.sharding
    if dp == 1 and sharding is not Sharding.HSDP:
        sharding = Sharding.NONE
    elif sharding is Sharding.NONE:
        sharding = Sharding.DDP
    return replace(
        plan,
        dp=dp,
        tp=1,
        cp=1,
        ep=1,
        mbs=workload.batch,
        gbs=plan.gbs or whole * (plan.pp if plan.pp > 1 else 1),
        seq=workload.seq or 0,
        sharding=sharding,
        schedule=schedule,
        vpp=1 if schedules.get(schedule).v_shaped and plan.vpp == 2 else plan.vpp,
        recompute=Recompute.FULL if workload.options.get("checkpointing") else Recompute.NONE,
        offload=Offload.NONE,
        adapters=False,
        precision=Precision(workload.precision),
    )


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
    if plan.recompute is not Recompute.NONE and not (
        plan.recompute is Recompute.FULL and workload.options.get("checkpointing")
    ):
        yield (
            f"recompute {plan.recompute}, but the workload was captured without (--checkpointing recomputes"
            " blocks)"
        )
    if plan.precision not in (Plan.precision, workload.precision, workload.precision.removeprefix("amp_")):
        yield f"precision {plan.precision}, but the workload was captured in {workload.precision}"
    if plan.offload is not Offload.NONE or plan.adapters:
        yield (
            f"{'offload ' + plan.offload if plan.offload != 'none' else 'adapters'}: not modelled for"
            " captured modules"
        )


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
    devices, most = cluster.device_count, len(places(workload)) + 1 if filled.pp > 1 else 1
    tried = dict.fromkeys([(filled.schedule, filled.vpp), (filled.schedule, 1), ("1f1b", 1)])
    for pp in sorted(
        (d for d in divisors(devices) if d <= most), key=lambda d: (abs(math.log(d / filled.pp)), d)
    ):
        for schedule, vpp in tried if pp > 1 else (("", 1),):
            dp = devices // pp
            sharding = Sharding.NONE
            if dp > 1:
                sharding = Sharding.DDP if given.sharding is Sharding.NONE else given.sharding
            plan = replace(
                filled,
                dp=dp,
                pp=pp,
                schedule=schedule,
                vpp=vpp,
                shard=math.gcd(dp, filled.shard) if filled.sharding is Sharding.HSDP else 0,
                sharding=sharding,
            )
            whole = dp * filled.mbs * (pp if schedules.get(schedule).equal_rounds else 1)
            least = -(-fewest_micro_batches(plan) * dp * filled.mbs // whole)
            plan = replace(plan, gbs=max(least, round(filled.gbs / whole), 1) * whole)
            if not [*problems(plan, devices, None), *_cuts(plan, workload)]:
                return plan
    raise AssertionError("data parallel with one micro-batch can always run")
