"""One training step of a transformer under a parallel plan: its operators timed, and the answer about it.

A layer's time and what a rank holds are in `predict/layer.py`, gradients and parameters in
`predict/gradients.py`; `predict/simulated.py` puts them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.catalog import frameworks
from paceline.cost import money
from paceline.cost.chip import chip
from paceline.cost.collectives import sigma
from paceline.cost.curves import Curves, curves_for
from paceline.cost.operators import power_sigma
from paceline.cost.transformer import Shape, blocks, piece_times
from paceline.errors import PlanError
from paceline.predict import memory, remedy
from paceline.predict.gradients import Gradients, StageTime
from paceline.predict.interval import COUNTED_MEMORY, Errors, around, bounded, transformer_errors
from paceline.predict.layer import Held
from paceline.predict.step import power_evidence
from paceline.predict.stragglers import straggling
from paceline.sim.timeline import Timeline
from paceline.spec.cluster import Cluster
from paceline.spec.device import Device
from paceline.spec.framework import Framework
from paceline.spec.plan import Plan
from paceline.spec.prediction import DistributedPrediction, Evidence, Memory, Part, Stage
from paceline.spec.transformer import Transformer

#: what the exposed part of a mesh axis' collectives is called
TITLES = {
    "tp": "tensor-parallel collectives",
    "cp": "context-parallel exchange",
    "ep": "expert exchange",
    "host": "activation offload",
}


def default_framework(plan: Plan, device: Device) -> str:
    """TPUs run JAX; of the rest, sharded parameters are torch's way, everything else Megatron's."""
    if device.kind == "tpu":
        return "jax"
    return "torch-compile" if plan.sharding in ("fsdp", "hsdp") else "megatron-core"


@dataclass(frozen=True)
class Step(Gradients):
    """A resolved plan on a cluster, with everything timed that it is made of."""

    @staticmethod
    def of(
        model: Transformer,
        cluster: Cluster,
        plan: Plan,
        framework: Framework | None,
        curves: Curves | None,
        host_speed: float = 1.0,
    ) -> Step:
        usual = frameworks.running(plan.framework or default_framework(plan, cluster.device), "transformers")
        style = (framework or usual).sped_up(host_speed)
        if plan.precision in ("fp8", "fp4") and plan.precision not in cluster.device.peak_flops:
            raise PlanError(
                f"{cluster.device.name} has no matrix units for {plan.precision}; use bf16, or a device that"
                " has them"
            )
        shape = Step.shape_of(model, plan, style)
        found, target = blocks(shape), chip(cluster.device)
        constants = curves or curves_for(cluster.device)
        pieces, costs = piece_times(found, cluster.device, target, constants)
        named = framework is not None or bool(plan.framework)
        return Step(model, cluster, plan, style, shape, target, constants, found, pieces, costs, named)

    @staticmethod
    def shape_of(model: Transformer, plan: Plan, framework: Framework) -> Shape:
        """What a rank runs for one micro-batch of a plan."""
        dtype = "bf16" if plan.precision in ("fp8", "fp4") else plan.precision
        return Shape(
            model=model,
            framework=framework,
            mbs=plan.mbs,
            seq=plan.seq,
            tp=plan.tp,
            cp=plan.cp,
            ep=plan.ep,
            sp=plan.sp,
            dtype=dtype,
            matrix=plan.precision,
            context=plan.context,
            accumulate=plan.micro_batches > 1,
            trained=not plan.adapters,
        )

    def replanned(self, plan: Plan) -> Step:
        """The step under another resolved plan, for its memory alone: its operators are still those of the
        first.
        """
        device = self.cluster.device
        usual = not plan.framework and self.framework.name == default_framework(self.plan, device)
        style = frameworks.get(default_framework(plan, device)) if usual else self.framework
        return replace(self, plan=plan, framework=style, shape=Step.shape_of(self.model, plan, style))

    def memory(self, stage: Held, index: int) -> Memory:
        """Bytes of one device of a stage, by kind, when most is live."""
        return bounded(memory.stage_memory(self, stage, index), COUNTED_MEMORY)

    def answer(
        self,
        parts: dict[str, float],
        stages: Sequence[StageTime],
        bubble: float,
        steady: float,
        timeline: Timeline | None = None,
    ) -> DistributedPrediction:
        """The prediction for a step whose time goes to `parts`, without the wait for the slowest of `steady`
        seconds of computation.
        """
        p, m, device = self.plan, self.model, self.cluster.device
        parts = self.way.finish(self, parts, stages)
        parts["stragglers"] = steady * self.straggling
        step = sum(parts.values())
        exposed = sum(
            parts.get(t, 0.0)
            for t in (*TITLES.values(), "parameter gathers", "pipeline transfers", "gradient reduction")
        )
        low, high = around(step, self.sigma(step, exposed, bubble))
        tokens = p.gbs * p.seq
        flops = m.flops(tokens, p.seq, trained=not p.adapters)
        peak = self.chip.peaks[p.precision] * p.ranks
        recomputed = self.recomputed_flops * m.layers * p.micro_batches * p.tp * p.cp * p.dp
        shown = tuple(
            Stage(layers=s.layers, forward_s=s.forward_s, backward_s=s.backward_s, memory=self.memory(s, i))
            for i, s in enumerate(stages)
        )
        fullest = max((s.memory for s in shown), key=lambda found: found.peak_bytes)
        return DistributedPrediction(
            model=m.name,
            cluster=self.cluster.name,
            device=device.name,
            plan=str(p),
            devices=p.ranks,
            batch=p.gbs,
            seq=p.seq,
            precision=p.precision,
            unit="tokens",
            step_s=step,
            step_s_low=low,
            step_s_high=high,
            throughput=tokens / step,
            mfu=flops / step / peak,
            hfu=(flops + recomputed) / step / peak,
            flops=flops,
            parameters=m.parameters,
            micro_batches=p.micro_batches,
            exposed_s=exposed,
            bubble_s=bubble,
            bound_by=_bound(parts, exposed, bubble),
            breakdown=_breakdown(parts, step),
            stages=shown,
            fit=remedy.fit(self, fullest),
            provenance=(*self.provenance(device), *self.way.size_evidence(parts)),
            energy_j=device.tdp_w * step * p.ranks if device.tdp_w else None,
            price=money.basis(device),
            cost_per_unit=device.price_per_s * step * p.ranks / tokens if device.price_per_s else None,
            timeline=timeline,
        )

    @property
    def straggling(self) -> float:
        """By what share of its computation a step is longer because all wait for the slowest rank."""
        return straggling(self.cluster)

    @property
    def errors(self) -> Errors:
        """The spreads that concern this step."""
        return transformer_errors(
            self.cluster.device,
            self.curves,
            self.framework,
            named=self.named,
            precision=self.plan.precision,
            experts=bool(self.model.experts),
        )

    def sigma(self, step: float, exposed: float, bubble: float) -> float:
        """Standard deviation of the logarithm: operators by their groups, communication by its networks."""
        spent = self.found.packed.groups.total(self.costs.seconds)
        total = sum(spent.values()) or 1.0
        shares = {group: seconds / total for group, seconds in spent.items()}
        limit = power_sigma(self.costs.seconds, self.found.packed, self.cluster.device)
        groups = [group for axis in ("tp", "cp", "dp", "pp") if (group := self.group(axis)).size > 1]
        network = max((float(sigma(1e8, group, self.cluster)) for group in groups), default=0.0)
        return self.errors.step_sigma(shares, exposed / step, network, bubble / step, limit)

    def provenance(self, device: Device) -> Iterator[Evidence]:
        for path in ("memory.bandwidth", f"peak.{self.plan.precision}"):
            if path in device.facts:
                yield Evidence(
                    what=f"{device.name} {path}",
                    kind=device.facts[path].kind,
                    source=device.facts[path].source,
                )
        for path, fact in self.cluster.facts.items():
            if path.startswith("tier.") and path.endswith("bandwidth"):
                yield Evidence(what=f"{self.cluster.name} {path}", kind=fact.kind, source=fact.source)
        yield Evidence(
            what=f"operator curves: {self.curves.name}", kind="fitted", source=self.curves.source, share=1.0
        )
        yield from power_evidence(device)
        yield Evidence(
            what=f"kernels and overlap of {self.framework.title}",
            kind=self.framework.kind,
            source=self.framework.source,
        )
        yield from self.errors.evidence()


def _bound(parts: Mapping[str, float], exposed: float, bubble: float) -> str:
    groups = {
        "compute": sum(
            parts.get(name, 0.0) for name in ("forward", "backward", "recomputation", "optimizer")
        ),
        "communication": exposed,
        "bubble": bubble,
        "host": parts.get("host", 0.0),
    }
    return max(groups, key=lambda name: groups[name])


def _breakdown(parts: Mapping[str, float], step: float) -> tuple[Part, ...]:
    kinds = {
        "pipeline bubble": "bubble",
        "host": "host",
        "stragglers": "bubble",
        "forward": "compute",
        "backward": "compute",
        "recomputation": "compute",
        "optimizer": "memory",
    }
    listed = [
        Part(
            name=name,
            seconds=seconds,
            share=seconds / step,
            count=1,
            bound_by=kinds.get(name, "communication"),
            flops=0.0,
        )
        for name, seconds in parts.items()
        if seconds > 0
    ]
    return tuple(sorted(listed, key=lambda part: -part.seconds))
