"""Transformers whose data-parallel replicas send less, later, or without waiting; the rest of the plan as it is.

Overlap as Lee et al. 2018 do it is, for layers whose gradients are scattered and parameters gathered by bucket, what ZeRO-1 does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property

from paceline.cost.compression import assign, decode_s, encode_s, exchanges
from paceline.errors import PlanError
from paceline.predict.distributed import Step
from paceline.predict.gradients import Exchange, StageTime
from paceline.predict.relaxed import modes
from paceline.predict.relaxed.accuracy import accuracy
from paceline.predict.simulated import REDUCTION, Simulation
from paceline.sim.timeline import Timeline
from paceline.spec.plan import Plan
from paceline.spec.prediction import DistributedPrediction, Evidence
from paceline.spec.synchronisation import PLAIN

CODING = "encoding and decoding"


def predict(step: Step, *, simulate: bool, trace: bool = False) -> DistributedPrediction:
    """The answer for a step of a relaxed plan."""
    relax = step.plan.relax
    found = _answer(averaged(step), simulate, trace)
    if relax.mode == "replicas":
        return replace(found, plan=str(step.plan), accuracy=accuracy(relax))
    return modes.predict(replica(step, found))


def averaged(step: Step) -> Step:
    """A step that does what of its relaxation happens every step: the rest of it happens to the answer."""
    relax = step.plan.relax
    if relax.plain:
        return step
    if relax.average == "overlap":
        return _as(Step, step, plan=replace(step.plan, sharding="zero1" if step.plan.dp > 1 else step.plan.sharding, relax=PLAIN))
    return _as(Averaged if relax.mode == "replicas" else Alone, step)


def replica(step: Step, alone: DistributedPrediction) -> modes.Replica:
    """A replica of a step, which has run alone."""
    p = step.plan
    if p.cp > 1:
        raise PlanError(f"plan cannot run: {p.relax.mode} with cp {p.cp}; context-parallel ranks add their gradients up every step")
    if p.relax.island > 1:
        raise PlanError("plan cannot run: islands of a transformer are its replicas; leave island out and give tp or pp")
    plan = replace(p, relax=replace(p.relax, island=1)) if p.relax.mode in ("local-sgd", "diloco") else p
    return modes.Replica(
        alone=replace(alone, plan=str(p)), cluster=step.cluster, plan=plan, library="nccl", replicas=p.dp, stride=p.tp * p.cp, width=p.tp * p.pp,
        parameters=max(step.parameters(stage) for stage in step.stages()), gradient_bytes=step.gradient_bytes,
    )


def _answer(step: Step, simulate: bool, trace: bool) -> DistributedPrediction:
    return Simulation(step).prediction(trace) if simulate else step.prediction()


def _as(kind: type[Step], step: Step, plan: Plan | None = None) -> Step:
    """The same step, as another kind."""
    values = {field.name: getattr(step, field.name) for field in fields(Step)}
    return kind(**{**values, "plan": plan or step.plan})


class Alone(Step):
    """Replicas that do not communicate with each other."""

    @property
    def replicated(self) -> bool:
        return False


class Averaged(Step):
    """Replicas that average every step: compressed, or by priority."""

    @cached_property
    def _coded(self) -> tuple[dict[str, float], float]:
        """Bytes per parameter that each collective takes, and seconds to encode and decode one; averages over a layer."""
        scheme, ranks, hidden = self.plan.relax.scheme, self.group("dp").size, self.model.hidden
        counts = [int(count) for count, _ in self.tensors("layer")]
        shapes = [(count // hidden, hidden) if count > hidden and count % hidden == 0 else (count,) for count in counts]
        chosen = assign(replace(scheme, keep_last=False), [(str(i), shape) for i, shape in enumerate(shapes)])
        sizes: dict[str, float] = defaultdict(float)
        spent = 0.0
        for i, shape in enumerate(shapes):
            for exchange in exchanges(chosen[str(i)], shape):
                sizes[exchange.collective] += exchange.bytes * (ranks if exchange.collective == "all_gather" else 1)
            if chosen[str(i)].name != "fp32":
                spent += encode_s(chosen[str(i)], shape, self.chip, self.cluster.device)
                spent += decode_s(chosen[str(i)], shape, ranks, self.chip, self.cluster.device)
        total = sum(counts)
        return {op: size / total for op, size in sizes.items()}, spent / total

    def exchanges(self, dense: float, experts: float) -> tuple[list[Exchange], list[Exchange]]:
        """What reduces the gradients of so many parameters, encoded."""
        if not self.plan.relax.compress:
            return super().exchanges(dense, experts)
        counts = [(axis, count) for axis, count in (("dp", dense), ("expert-dp", experts)) if count]
        return [(op, size * count, axis) for axis, count in counts for op, size in self._coded[0].items()], []

    def answer(
        self, parts: dict[str, float], stages: Sequence[StageTime], bubble: float, steady: float,
        timeline: Timeline | None = None,
    ) -> DistributedPrediction:
        """With the time of encoders; or less of the reduction, where the next forward pass hides some."""
        relax = self.plan.relax
        if relax.compress and self.replicated:
            parts[CODING] = self._coded[1] * max(self.parameters(stage) for stage in stages)
        elif relax.average == "priority" and parts.get(REDUCTION):
            room = max(stage.forward_s for stage in stages) * (1 - self.framework.contention)
            first = self.total(self.exchanges(self.layer_parameters(), 0.0)[0])
            parts[REDUCTION] = max(min(first, parts[REDUCTION]), parts[REDUCTION] - room)
        found = super().answer(parts, list(stages), bubble, steady, timeline)
        if CODING not in parts:
            return found
        what = f"{CODING} {1e3 * parts[CODING]:.3g} ms, {relax.scheme.title}"
        source = "copies of the gradient that encoders were measured to take, or their work counted"
        return replace(found, provenance=(*found.provenance, Evidence(what=what, kind="derived", source=source)))
