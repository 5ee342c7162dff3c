"""Plans that send gradients less, later, or without waiting: compressed, overlapped, by priority, now and then, through servers.

Each is a plan like any other (`Plan.parse("terngrad")`, `Plan.parse("ps-async servers=4")`), for captured modules and for
transformers, and says what it may cost in accuracy.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.errors import PlanError
from paceline.predict.distributed import Step
from paceline.predict.parallel import Ranks
from paceline.predict.relaxed import modes
from paceline.predict.relaxed import transformer as transformers
from paceline.predict.relaxed.captured import Relaxed
from paceline.predict.step import Conditions, Timed
from paceline.sim.overlap import Transfer
from paceline.spec.cluster import Cluster, Group
from paceline.spec.plan import Plan
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.synchronisation import PLAIN
from paceline.spec.workload import ITEMSIZE, Workload

#: modes whose replicas average every step, so that the simulation of a step holds all there is
EVERY_STEP = ("replicas", "ps-sync")


def check(plan: Plan) -> None:
    """That a relaxation goes with the rest of the plan."""
    relax = plan.relax
    if plan.sharding not in ("none", "ddp"):
        raise PlanError(f"plan cannot run: {relax.label} averages whole replicas, but {plan.sharding} shards them; leave {plan.sharding} out")
    if relax.compress and (relax.mode not in EVERY_STEP or relax.average != "allreduce"):
        other = relax.mode if relax.mode != "replicas" else relax.average
        raise PlanError(f"plan cannot run: {relax.compress} is modelled for gradients that are averaged every step, not with {other}")
    for name, means in (("servers", "ps-"), ("staleness", "ps-bounded"), ("backup", "ps-backup"), ("island", "local-sgd diloco")):
        if getattr(relax, name) and not any(relax.mode.startswith(word) for word in (*means.split(), "easgd"[: 5 * (name == "servers")]) if word):
            raise PlanError(f"plan cannot run: {name}={getattr(relax, name)} does not go with {relax.label}")


def captured(
    workload: Workload, cluster: Cluster, plan: Plan, conditions: Conditions, trace: bool = False,
) -> DistributedPrediction:
    """A captured module under a resolved plan."""
    check(plan)
    if plan.ranks > plan.dp:
        raise PlanError(f"plan cannot run: {plan.relax.label} is modelled for captured modules that are split by data only (tp 1, pp 1)")
    style = conditions.synchronisation
    timed = Timed.of(workload, cluster.device, conditions)
    if plan.relax.mode in EVERY_STEP:
        relaxed = Relaxed(workload, cluster, plan, style, timed)
        return replace(relaxed.prediction(), timeline=relaxed.timeline()) if trace else relaxed.prediction()
    ranks = Alone(workload, cluster, plan, style, timed)
    width = max((ITEMSIZE[p.dtype] for p in workload.parameters), default=4)
    return modes.predict(modes.Replica(
        alone=ranks.prediction(), cluster=cluster, plan=plan, library=ranks.library, replicas=plan.dp,
        parameters=float(sum(p.numel for p in workload.parameters if p.ready >= 0)), gradient_bytes=width,
    ))


def transformer(step: Step, *, simulate: bool, trace: bool = False) -> DistributedPrediction:
    """A transformer under a resolved plan, simulated or in closed form."""
    check(step.plan)
    return transformers.predict(step, simulate=simulate, trace=trace)


class Alone(Ranks):
    """Ranks that communicate within their island only."""

    @property
    def island(self) -> int:
        periodic = self.plan.relax.mode in ("local-sgd", "diloco")
        return modes.island(self.plan, self.cluster, self.plan.dp) if periodic else 1

    def group(self, axis: str) -> Group:
        return self.cluster.group(self.island) if axis == "dp" else super().group(axis)

    def transfers(self) -> list[Transfer]:
        return super().transfers() if self.island > 1 else []


def without(plan: Plan) -> Plan:
    """The plan with gradients averaged in full, every step."""
    return replace(plan, relax=PLAIN)
