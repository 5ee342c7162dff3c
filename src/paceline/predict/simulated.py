"""Predict one training step of a model on many devices under a plan, by simulating it: of a transformer from
its sizes, of any other model from what was captured.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.catalog import frameworks
from paceline.errors import PlanError
from paceline.predict import degrees, replicas
from paceline.predict.answer import answer
from paceline.predict.captured import Module
from paceline.predict.distributed import TransformerStep
from paceline.predict.program import Simulation
from paceline.predict.step import Conditions, Timed, as_run
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan, resolve
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.transformer import Transformer
from paceline.spec.vocabulary import Sharding
from paceline.spec.workload import Workload
from paceline.sync import way_of
from paceline.sync.rarely import Replica
from paceline.sync.served import HOSTED

#: a model on the ranks of a resolved plan, with its operators timed
Asked = TransformerStep | Module


def predict(
    model: Transformer | Workload,
    cluster: Cluster,
    plan: Plan,
    conditions: Conditions = Conditions(),  # noqa: B008
    *,
    trace: bool = False,
) -> DistributedPrediction:
    """Step time with interval, where it goes, and the memory of a rank of each stage; with `trace`, the
    timeline too.
    """
    if cluster.mix:  # all wait for the slowest
        kinds = [cluster.device, *(device for device, _ in cluster.mix)]
        alike = [replace(cluster, device=device, mix=()) for device in kinds]
        found = [predict(model, each, plan, conditions, trace=trace) for each in alike]
        return max(found, key=lambda prediction: prediction.step_s)
    made = asked(model, cluster, plan, conditions, trace=trace)
    every_step = predict_step(made, trace)
    if made.plan.relax.mode.every_step:
        return every_step
    parameters, gradient_bytes = made.replica_size
    replica = Replica(alone=every_step, mesh=made.mesh, parameters=parameters, gradient_bytes=gradient_bytes)
    return replicas.predict(replica)


def asked(
    model: Transformer | Workload,
    cluster: Cluster,
    plan: Plan,
    conditions: Conditions = Conditions(),  # noqa: B008
    *,
    trace: bool = False,
) -> Asked:
    """A model on the ranks of a plan, which is filled in first; PlanError where it cannot run."""
    if isinstance(model, Transformer):
        chosen = alone_on_islands(resolve(plan, cluster, model))
        where = conditions.framework, conditions.curves, conditions.host_speed
        return replace(TransformerStep.of(model, cluster, chosen, *where), way=way_of(chosen))
    workload = as_run(model, cluster.device)
    chosen = degrees.resolve(plan, workload, cluster)
    if conditions.framework is None:
        named = frameworks.running(chosen.framework or frameworks.USUAL, "modules")
        conditions = replace(conditions, framework=named)
    style = conditions.synchronisation
    hosted = style.server and chosen.sharding is not Sharding.NONE and chosen.relax.plain
    way = HOSTED if hosted else way_of(chosen)
    timed = Timed.of(workload, cluster.device, conditions)
    return Module(workload, cluster, chosen, timed, style, way, detailed=trace)


def predict_step(made: Asked, trace: bool = False) -> DistributedPrediction:
    """What happens every step, of a model whose operators are timed."""
    return answer(made, simulation(made), trace)


def simulation(made: Asked) -> Simulation:
    """A step as a program."""
    return Simulation(made.work(), made.plan)


def alone_on_islands(plan: Plan) -> Plan:
    """A transformer's plan where each replica is an island of its own; PlanError where its way of
    synchronising is not modelled with the rest.
    """
    if plan.relax.mode.every_step:
        return plan
    if plan.cp > 1:
        raise PlanError(
            f"plan cannot run: {plan.relax.mode} with cp {plan.cp}; context-parallel ranks add their"
            " gradients up every step"
        )
    if plan.relax.island > 1:
        raise PlanError(
            "plan cannot run: islands of a transformer are its replicas; leave island out and give tp or pp"
        )
    return replace(plan, relax=replace(plan.relax, island=1)) if plan.relax.mode.averages_rarely else plan
