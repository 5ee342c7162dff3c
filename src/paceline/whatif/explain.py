"""Explain: what bounds a step, what would relieve it, and how much concurrency there is to use."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.cost.energy import power
from paceline.spec.plan import Plan, resolve
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.transformer import Transformer
from paceline.spec.vocabulary import BoundBy
from paceline.spec.whatif import Anatomy, Explanation, Form
from paceline.spec.workload import Workload
from paceline.whatif.anatomy import anatomy
from paceline.whatif.resources import resources
from paceline.whatif.subject import Subject

#: which collectives belong to a form of parallelism
_AXES = {
    "data": ("dp", "shard", "replicas", "expert-dp"),
    "tensor": ("tp",),
    "pipeline": ("pp", "ends"),
    "context": ("cp",),
    "expert": ("ep",),
}


def explain(subject: Subject) -> Explanation:
    """Bottlenecks, elasticities, roofline, collectives, concurrency and power of a step."""
    found = subject.predict()
    inside = anatomy(subject, found)
    busy = (
        sum(part.seconds for part in found.breakdown if part.bound_by in (BoundBy.COMPUTE, BoundBy.MEMORY))
        / found.step_s
    )
    moved = inside.moved_bytes / found.step_s
    drawn = power(subject.cluster.device, inside.achieved, busy, found.precision, moved)
    return Explanation(
        prediction=found,
        resources=resources(subject),
        anatomy=inside,
        forms=tuple(_forms(subject, found, inside)),
        watts=drawn.watts if drawn is not None else None,
        watts_source=drawn.source if drawn is not None else "",
    )


def _forms(subject: Subject, found: DistributedPrediction, inside: Anatomy) -> Iterator[Form]:
    """How far each form of parallelism goes, how far it is used, and what limits it."""
    plan = (
        subject.plan
        if isinstance(subject.model, Workload)
        else resolve(subject.plan, subject.cluster, subject.model)
    )
    used = {"tensor": plan.tp, "pipeline": plan.pp, "context": plan.cp, "expert": plan.ep}
    ranks = found.devices // plan.replica_ranks
    yield _form(
        "data",
        ranks,
        found.batch,
        inside,
        "a replica needs at least one sample; batches above the critical size need more samples in all",
    )
    if isinstance(subject.model, Transformer):
        yield from _split(subject.model, plan, used, found, inside)
    elif plan.pp > 1:
        yield _form(
            "pipeline",
            plan.pp,
            found.stages[0].layers * plan.pp,
            inside,
            _bubble(plan.pp, found.micro_batches),
        )
    whole = sum(layer.work * layer.count for layer in inside.layers)
    deep = sum(layer.depth * layer.count for layer in inside.layers)
    lanes = (subject.cluster.device.sm_count or 1) * 128
    within = (
        f"average parallelism of a micro-batch on a device, work / depth = {whole:.2g} / {deep:.2g}; about"
        f" {lanes:,} lanes use it"
    )
    yield Form(name="operator", used=lanes, most=whole / max(1.0, deep), sent_bytes=0.0, limit=within)


def _split(
    model: Transformer, plan: Plan, used: dict[str, int], found: DistributedPrediction, inside: Anatomy
) -> Iterator[Form]:
    yield _form(
        "tensor",
        used["tensor"],
        model.heads,
        inside,
        f"{model.heads} heads; two collectives a layer and pass, of whole activations",
    )
    yield _form(
        "pipeline", used["pipeline"], model.layers, inside, _bubble(plan.pp, found.micro_batches, plan.vpp)
    )
    yield _form(
        "context",
        used["context"],
        found.seq,
        inside,
        "tokens of a sequence; keys and values go round once a layer",
    )
    if model.experts:
        yield _form(
            "expert",
            used["expert"],
            model.experts,
            inside,
            f"{model.experts} experts; tokens go to {model.top_k} of them and back",
        )


def _form(name: str, used: int, most: float, inside: Anatomy, limit: str) -> Form:
    return Form(
        name=name,
        used=used,
        most=float(most),
        sent_bytes=sum(s.bytes for s in inside.sent if s.axis in _AXES[name]),
        limit=limit,
    )


def _bubble(stages: int, micro_batches: int, chunks: int = 1) -> str:
    share = (stages - 1) / (micro_batches * chunks + stages - 1)
    return (
        f"(p - 1) / (v m + p - 1) of the time is a bubble: {100 * share:.1f} % with {micro_batches}"
        " micro-batches"
    )
