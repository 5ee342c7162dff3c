"""Predict one training step of a transformer under a parallel plan, by simulating it."""

from __future__ import annotations

from paceline.cost.curves import Curves
from paceline.predict.answer import answer
from paceline.predict.distributed import Step
from paceline.predict.program import Simulation
from paceline.predict.sizes import from_sizes
from paceline.spec.cluster import Cluster
from paceline.spec.framework import Framework
from paceline.spec.plan import Plan, resolve
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.transformer import Transformer


def predict(
    model: Transformer,
    cluster: Cluster,
    plan: Plan,
    *,
    framework: Framework | None = None,
    host_speed: float = 1.0,
    curves: Curves | None = None,
    trace: bool = False,
) -> DistributedPrediction:
    """Step time with interval, where it goes, and the memory of every stage; with `trace`, the timeline
    too.
    """
    step = Step.of(model, cluster, resolve(plan, cluster, model), framework, curves, host_speed)
    if not plan.relax.plain:
        from paceline import sync  # it builds on this module

        return sync.transformer(step, trace=trace)
    return predict_step(step, trace)


def predict_step(step: Step, trace: bool = False) -> DistributedPrediction:
    """The prediction for a step whose operators are timed."""
    return answer(step, simulation(step), trace)


def simulation(step: Step) -> Simulation:
    """A step as a program."""
    return Simulation(from_sizes(step), step.plan)
