"""Plans of captured modules: what is filled in, and what is refused with the nearest plan that can run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paceline.sim.cuts import places
from paceline.spec import schedules
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan, checked, fill, problems
from paceline.spec.vocabulary import Offload, Precision, Recompute, Sharding
from paceline.spec.workload import Workload


def resolve(plan: Plan, workload: Workload, cluster: Cluster) -> Plan:
    """The plan filled in for a captured module; PlanError, with the nearest plan that can run, where it
    contradicts itself.
    """
    devices, settled = cluster.device_count, _settled(plan, workload, cluster)
    filled = replace(fill(settled, devices, cluster.node_devices, None), seq=settled.seq)

    def wrong(other: Plan) -> Iterator[str]:
        yield from _fixed(other, workload)
        yield from problems(other, devices, None)
        yield from _cuts(other, workload)

    given = replace(plan, gbs=filled.gbs)  # a batch that the plan leaves out is kept, too
    return checked(given, filled, devices, wrong, contradictions=_fixed(plan, workload))


def _settled(plan: Plan, workload: Workload, cluster: Cluster) -> Plan:
    """The plan with what the capture has settled, and with a micro-batch for each stage."""
    dp = plan.dp or max(1, cluster.device_count // plan.pp)
    return replace(
        plan,
        tp=1,
        cp=1,
        ep=1,
        mbs=workload.batch,
        gbs=plan.gbs or dp * workload.batch * plan.pp,
        seq=workload.seq or 0,
        sharding=plan.sharding if plan.sharding is Sharding.HSDP or dp > 1 else Sharding.NONE,
        recompute=_recomputed(workload),
        offload=Offload.NONE,
        adapters=False,
        precision=Precision(workload.precision),
    )


def _recomputed(workload: Workload) -> Recompute:
    return Recompute.FULL if workload.options.get("checkpointing") else Recompute.NONE


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
    if plan.recompute not in (Recompute.NONE, _recomputed(workload)):
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
