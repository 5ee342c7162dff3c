"""One training step of a transformer under a parallel plan: its operators timed, and the answer about it.

A layer's time and what a rank holds are in `predict/layer.py`, gradients and parameters in
`predict/gradients.py`; `predict/simulated.py` puts them together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.catalog import frameworks
from paceline.cost.chip import chip
from paceline.cost.collectives import sigma
from paceline.cost.curves import Curves, curves_for
from paceline.cost.operators import power_sigma
from paceline.cost.transformer import Shape, blocks, piece_times
from paceline.errors import PlanError
from paceline.predict import memory, remedy
from paceline.predict.answer import Passes, StepFacts, network_evidence
from paceline.predict.gradients import Gradients
from paceline.predict.interval import COUNTED_MEMORY, Errors, bounded, transformer_errors
from paceline.predict.layer import Held
from paceline.predict.step import power_evidence
from paceline.spec.cluster import Cluster
from paceline.spec.device import Device
from paceline.spec.framework import Framework
from paceline.spec.plan import Plan
from paceline.spec.prediction import Evidence, Memory, Stage
from paceline.spec.transformer import Transformer


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

    # -- the answer --------------------------------------------------------------------------------

    def facts(self, passes: Passes) -> StepFacts:
        """What an answer says of the step besides its time."""
        p, m = self.plan, self.model
        tokens = p.gbs * p.seq
        flops = m.flops(tokens, p.seq, trained=not p.adapters)
        stages = tuple(
            Stage(layers=held.layers, forward_s=forward_s, backward_s=backward_s, memory=self.memory(held, i))
            for i, (held, (forward_s, backward_s)) in enumerate(zip(self.held(), passes, strict=True))
        )
        fullest = max((stage.memory for stage in stages), key=lambda found: found.peak_bytes)
        again = self.recomputed_flops * m.layers * p.micro_batches * p.tp * p.cp * p.dp
        return StepFacts(
            model=m.name,
            cluster=self.cluster,
            plan=p,
            seq=p.seq,
            precision=p.precision,
            unit="tokens",
            units=tokens,
            parameters=m.parameters,
            flops=flops,
            executed_flops=flops + again,
            peak_flops=self.chip.peaks[p.precision] * p.ranks,
            stages=stages,
            fit=remedy.fit(self, fullest),
            provenance=self.provenance(),
        )

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
        groups = [group for axis in ("tp", "cp", "dp", "pp") if (group := self.mesh.group(axis)).size > 1]
        network = max((float(sigma(1e8, group, self.cluster)) for group in groups), default=0.0)
        return self.errors.step_sigma(shares, exposed / step, network, bubble / step, limit)

    def provenance(self) -> Iterator[Evidence]:
        """What the times rest on."""
        device = self.cluster.device
        for path in ("memory.bandwidth", f"peak.{self.plan.precision}"):
            if path in device.facts:
                yield Evidence(
                    what=f"{device.name} {path}",
                    kind=device.facts[path].kind,
                    source=device.facts[path].source,
                )
        yield from network_evidence(self.cluster)
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
