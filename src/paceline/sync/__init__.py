"""Ways to keep replicas in sync, as objects: compressed, overlapped, by priority, now and then, through
servers.

    way.py (in predict)    the hooks of a way, and the usual way
    compressed.py          gradients encoded, averaged every step
    overlapped.py          scattered under the backward pass, gathered under the next forward pass; or by
                           priority
    served.py              every step through parameter servers
    rarely.py              now and then, through servers without waiting, with neighbours: added to a
                           replica's own step
    accuracy.py            what each may cost in accuracy, and who measured it

Each is part of a plan like any other word (`Plan.parse("terngrad")`, `Plan.parse("ps-async servers=4")`), for
captured modules and for transformers. `register` adds a way that averages every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paceline.errors import PlanError
from paceline.predict.distributed import Step
from paceline.predict.parallel import Ranks
from paceline.predict.simulated import predict_step
from paceline.predict.step import Conditions, Timed
from paceline.predict.way import USUAL, Way
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.synchronisation import PLAIN, Relaxation
from paceline.spec.vocabulary import Mode, Sharding
from paceline.spec.workload import ITEMSIZE, Workload
from paceline.sync import rarely
from paceline.sync.compressed import Compressed
from paceline.sync.overlapped import Overlapped, Prioritised
from paceline.sync.served import Served

#: word of a plan -> the way that it names
WAYS: dict[str, Callable[[Relaxation], Way]] = {
    "allreduce": lambda relax: USUAL,
    "overlap": Overlapped,
    "priority": Prioritised,
    "ps-sync": Served,
}
#: settings of a relaxation -> the modes that have them
_SETTINGS = {
    "servers": ("ps-sync", "ps-async", "ps-bounded", "ps-backup", "easgd"),
    "staleness": ("ps-bounded",),
    "backup": ("ps-backup",),
    "island": ("local-sgd", "diloco"),
}


def way_of(plan: Plan) -> Way:
    """What of a plan's way of synchronising happens every step."""
    relax = plan.relax
    if relax.mode is Mode.PS_SYNC:
        return WAYS["ps-sync"](relax)
    if relax.mode is not Mode.REPLICAS:
        return rarely.Alone(relax)
    return Compressed(relax) if relax.compress else WAYS[relax.average](relax)


def check(plan: Plan) -> None:
    """That a way of synchronising goes with the rest of the plan."""
    relax = plan.relax
    if not plan.sharding.whole:
        raise PlanError(
            f"plan cannot run: {relax.label} averages whole replicas, but {plan.sharding} shards them; leave"
            f" {plan.sharding} out"
        )
    if relax.compress and (not relax.mode.every_step or relax.average != "allreduce"):
        other = relax.mode if relax.mode is not Mode.REPLICAS else relax.average
        raise PlanError(
            f"plan cannot run: {relax.compress} is modelled for gradients that are averaged every step, not"
            f" with {other}"
        )
    for name, modes in _SETTINGS.items():
        if getattr(relax, name) and relax.mode not in modes:
            raise PlanError(f"plan cannot run: {name}={getattr(relax, name)} does not go with {relax.label}")


def without(plan: Plan) -> Plan:
    """The plan with gradients averaged in full, every step."""
    return replace(plan, relax=PLAIN)


# -- captured modules ------------------------------------------------------------------------------


def ranks(workload: Workload, cluster: Cluster, plan: Plan, conditions: Conditions) -> Ranks:
    """A captured module on the ranks of a resolved plan, which exchange every step what its way of
    synchronising says.
    """
    check(plan)
    if plan.ranks > plan.dp:
        raise PlanError(
            f"plan cannot run: {plan.relax.label} is modelled for captured modules that are split by data"
            " only (tp 1, pp 1)"
        )
    timed = Timed.of(workload, cluster.device, conditions)
    return Ranks(workload, cluster, plan, conditions.synchronisation, timed, way_of(plan))


def captured(
    workload: Workload, cluster: Cluster, plan: Plan, conditions: Conditions, trace: bool = False
) -> DistributedPrediction:
    """A captured module under a resolved plan."""
    found = ranks(workload, cluster, plan, conditions)
    if plan.relax.mode.every_step:
        return replace(found.prediction(), timeline=found.timeline()) if trace else found.prediction()
    width = max((ITEMSIZE[p.dtype] for p in workload.parameters), default=4)
    return rarely.predict(
        rarely.Replica(
            alone=found.prediction(),
            cluster=cluster,
            plan=plan,
            library=found.library,
            replicas=plan.dp,
            parameters=float(sum(p.numel for p in workload.parameters if p.ready >= 0)),
            gradient_bytes=width,
        )
    )


# -- transformers by their sizes -------------------------------------------------------------------


def transformer(step: Step, *, trace: bool = False) -> DistributedPrediction:
    """A transformer under a resolved plan."""
    check(step.plan)
    made = averaged(step)
    found = predict_step(made, trace)
    if step.plan.relax.mode is Mode.REPLICAS:
        return replace(found, plan=str(step.plan), accuracy=way_of(step.plan).accuracy)
    return rarely.predict(_replica(step, found))


def averaged(step: Step) -> Step:
    """A step with what of its way of synchronising happens every step; the rest is added to the answer."""
    plan = step.plan
    if plan.relax.plain:
        return step
    # for layers that are scattered and gathered by bucket, what ZeRO-1 does
    if plan.relax.average == "overlap":
        sharding = Sharding.ZERO1 if plan.dp > 1 else plan.sharding
        return replace(step, plan=replace(plan, sharding=sharding, relax=PLAIN))
    return replace(
        step, way=rarely.Alone(plan.relax) if plan.relax.mode is not Mode.REPLICAS else way_of(plan)
    )


def _replica(step: Step, alone: DistributedPrediction) -> rarely.Replica:
    """A replica of a step, which has run alone."""
    p = step.plan
    if p.cp > 1:
        raise PlanError(
            f"plan cannot run: {p.relax.mode} with cp {p.cp}; context-parallel ranks add their gradients up"
            " every step"
        )
    if p.relax.island > 1:
        raise PlanError(
            "plan cannot run: islands of a transformer are its replicas; leave island out and give tp or pp"
        )
    plan = replace(p, relax=replace(p.relax, island=1)) if p.relax.mode.averages_rarely else p
    return rarely.Replica(
        alone=replace(alone, plan=str(p)),
        cluster=step.cluster,
        plan=plan,
        library="nccl",
        replicas=p.dp,
        stride=p.tp * p.cp,
        width=p.tp * p.pp,
        parameters=max(step.parameters(stage) for stage in step.held()),
        gradient_bytes=step.gradient_bytes,
    )
