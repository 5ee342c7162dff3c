"""Resources that bound a step, as knobs: how much faster the step gets with a little, or infinitely, more of
each.

    elasticity   per cent of step time saved by one per cent more: a central difference of the predictor
                 itself, in logarithms
    saved        seconds saved if the resource had no limit; and what would bound the step most then

Steps are made of rates and of latencies that no rate changes. If every rate and every latency were better by
1 %, the step would be shorter by 1 %: elasticities add up to one less the share of the fixed latencies, which
is what `fixed` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.spec.vocabulary import Mode, Offload
from paceline.spec.whatif import Bottleneck, Resources
from paceline.whatif.edits import Edit, apply
from paceline.whatif.subject import Subject

#: modes in which replicas need no server
_APART = (Mode.REPLICAS, Mode.LOCAL_SGD, Mode.DILOCO, Mode.GOSSIP)

#: by how much a resource is changed each way
STEP = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A resource as a field that can be edited; of a few, less is better."""

    path: str
    less: bool = False

    def turned(self, subject: Subject, factor: float) -> Subject:
        """The subject with `factor` times as much of it."""
        return apply(subject, [Edit(path=self.path, value=f"x{1 / factor if self.less else factor!r}")])

    @property
    def relief(self) -> Edit:
        """The edit after which it limits nothing."""
        return Edit(path=self.path, value="0" if self.less else "inf")


def knobs(subject: Subject) -> dict[str, Knob]:
    """Every resource of a subject by name."""
    cluster, plan = subject.cluster, subject.plan
    out = {
        "arithmetic": Knob(path="device.arithmetic"),
        "device memory bandwidth": Knob(path="device.memory.bandwidth"),
    }
    out["host"] = Knob(path="host.speed")
    for i, tier in enumerate(cluster.tiers):
        if cluster.device_count > (cluster.domain(i - 1) if i else 1):
            out[f"{tier.name} bandwidth"] = Knob(path=f"network.{tier.name}.bandwidth")
    if cluster.straggler_cv:
        out["stragglers"] = Knob(path="stragglers.cv", less=True)
    if cluster.device.host_bandwidth_Bps and (plan.offload != Offload.NONE or plan.relax.mode not in _APART):
        out["link to the host"] = Knob(path="device.link.host")
    return out


def elasticity(subject: Subject, knob: Knob, step: float = STEP) -> float:
    """- d log(step time) / d log(resource), by a central difference of the simulation."""
    slower, faster = (knob.turned(subject, factor).predict().step_s for factor in (1 / (1 + step), 1 + step))
    return math.log(slower / faster) / (2 * math.log1p(step))


def resources(subject: Subject, names: Sequence[str] = ()) -> Resources:
    """What each resource costs a step, those that cost most first."""
    found = knobs(subject)
    chosen = {name: found[name] for name in names} if names else found
    step = subject.predict().step_s
    out = []
    for name, knob in chosen.items():
        free = apply(subject, [knob.relief])
        after = free.predict().step_s
        out.append(
            Bottleneck(
                name=name,
                edit=str(knob.relief),
                elasticity=elasticity(subject, knob),
                saved_s=step - after,
                step_s=after,
                then=_next(free, {other: each for other, each in found.items() if other != name}),
            )
        )
    return Resources(step_s=step, bottlenecks=tuple(sorted(out, key=lambda b: (-b.saved_s, -b.elasticity))))


def _next(subject: Subject, others: Mapping[str, Knob]) -> str:
    """The resource that would save most."""
    return (
        min(others, key=lambda name: apply(subject, [others[name].relief]).predict().step_s) if others else ""
    )
