"""One training step of a transformer on the ranks of a parallel plan.

predict/stages.py     what each stage of the pipeline holds
predict/pieces.py     seconds of its layers, and of what they exchange
predict/gradients.py  what data-parallel ranks, and stages, exchange
predict/sizes.py      what the ranks do with all of it
predict/memory.py     what they hold
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from paceline.catalog import frameworks
from paceline.cost.curves import Curves
from paceline.cost.operators import power_sigma, times
from paceline.cost.pack import PackedOps, pack_ops
from paceline.cost.pieces import TimedPieces
from paceline.cost.tape import Shape
from paceline.cost.transformer import adam_ops
from paceline.errors import PlanError
from paceline.predict import memory, remedy, sizes
from paceline.predict.answer import StepFacts
from paceline.predict.evidence import device_evidence, network_evidence
from paceline.predict.gradients import Exchanges
from paceline.predict.interval import SPREADS, Errors, bounded, network_sigma, transformer_errors
from paceline.predict.pieces import PieceTasks
from paceline.predict.stages import RankParts, StageLayers
from paceline.sim.mesh import Mesh
from paceline.sim.work import StepWork
from paceline.spec.cluster import Cluster, Group
from paceline.spec.device import Device
from paceline.spec.framework import Framework
from paceline.spec.plan import Plan
from paceline.spec.prediction import Evidence, Fit, Memory
from paceline.spec.transformer import Transformer
from paceline.spec.vocabulary import Offload, Precision
from paceline.sync.way import USUAL, Way


def default_framework(plan: Plan, device: Device) -> str:
    """TPUs run JAX; of the rest, sharded parameters are torch's way, everything else Megatron's."""
    if device.kind == "tpu":
        return "jax"
    return "torch-compile" if plan.sharding.shards_parameters else "megatron-core"


@dataclass(frozen=True)
class TransformerStep:
    """A transformer on the ranks of a resolved plan, with its operators timed."""

    model: Transformer
    cluster: Cluster
    plan: Plan
    framework: Framework
    timed: TimedPieces
    #: the user named the framework, rather than taking what is usual
    named: bool = False
    way: Way = USUAL

    @staticmethod
    def of(
        model: Transformer,
        cluster: Cluster,
        plan: Plan,
        framework: Framework | None,
        curves: Curves | None,
        host_speed: float = 1.0,
    ) -> TransformerStep:
        device = cluster.device
        usual = frameworks.running(plan.framework or default_framework(plan, device), "transformers")
        style = (framework or usual).sped_up(host_speed)
        if plan.precision.scaled and plan.precision not in device.peak_flops:
            raise PlanError(
                f"{device.name} has no matrix units for {plan.precision}; use bf16, or a device that has them"
            )
        timed = TimedPieces.of(shape_of(model, plan, style), device, curves)
        named = framework is not None or bool(plan.framework)
        return TransformerStep(model, cluster, plan, style, timed, named)

    def replanned(self, plan: Plan) -> TransformerStep:
        """The step under another resolved plan, for its memory alone: its operators are still those of the
        first.
        """
        device = self.cluster.device
        usual = not plan.framework and self.framework.name == default_framework(self.plan, device)
        style = frameworks.get(default_framework(plan, device)) if usual else self.framework
        return replace(self, plan=plan, framework=style)

    # -- its parts ---------------------------------------------------------------------------------

    @cached_property
    def shape(self) -> Shape:
        return shape_of(self.model, self.plan, self.framework)

    @cached_property
    def mesh(self) -> Mesh:
        """Where the ranks sit, and what they send."""
        return Mesh(self.plan, self.cluster, self.way.island(self.plan, self.cluster), self._sent_bytes)

    @cached_property
    def parts(self) -> RankParts:
        """What the stages hold."""
        return RankParts(self.model, self.plan)

    @cached_property
    def tasks(self) -> PieceTasks:
        """Layers and ends as tasks."""
        return PieceTasks(self.timed, self.mesh, self.framework, self.shape)

    @cached_property
    def sent(self) -> Exchanges:
        """What the ranks exchange around their layers."""
        return Exchanges(self.parts, self.mesh, self.framework, self.shape)

    def work(self) -> StepWork:
        """What the ranks do."""
        return sizes.Sizes(self).work()

    def _sent_bytes(self, op: str, size: float, axis: str, group: Group) -> float:
        """Bytes of a collective as the framework sends them."""
        if axis == "ep" and self.framework.dispatch == "once":
            return size * self.copies(group) / self.model.top_k
        if axis == "shard" and self.framework.flat_gathers and group.size > self.cluster.node_devices:
            return size * self.cluster.node_devices
        return size

    def copies(self, group: Group) -> float:
        """Domains of the outermost link that a token's experts are in, on average: each gets one copy and
        passes it on inside.
        """
        m = self.model
        domains = next(fan for i in reversed(range(len(self.cluster.tiers))) if (fan := group.fan(i)) > 1)
        found = domains * (1 - (1 - 1 / domains) ** m.top_k)
        return min(found, m.top_groups) if m.top_groups and domains < group.size else found

    # -- the update --------------------------------------------------------------------------------

    @cached_property
    def update_s(self) -> float:
        """Seconds of the update, on the stage with the most parameters."""
        return self.update(max(map(self.updated, self.parts.stages)))

    def updated(self, stage: StageLayers) -> float:
        """Parameters of a stage that one rank updates; fewer ranks hold the same experts than hold the same
        of everything else.
        """
        if self.plan.sharding.whole:
            return self.parts.whole(stage) * self.way.update_share(self.mesh.replicas)
        return self.parts.shared(stage, self.mesh.shards, self.mesh.group("expert-dp").size)

    def update(self, parameters: float) -> float:
        """Seconds of the update of a rank's share of a stage's parameters."""
        count = int(parameters)
        if self.plan.adapters or not count:
            return 0.0
        ops = _adam(count, self.shape.dtype, self.framework)
        seconds = float(times(ops, self.timed.chip, self.timed.curves).seconds.sum())
        if self.plan.offload is not Offload.OPTIMIZER:
            return seconds
        moved = count * (self.sent.gradient_bytes + self.sent.parameter_bytes)
        return max(seconds, moved / self.tasks.host_Bps)

    # -- the answer --------------------------------------------------------------------------------

    def facts(self) -> StepFacts:
        """What an answer says of the step besides its time."""
        p, m = self.plan, self.model
        tokens = p.gbs * p.seq
        flops = m.flops(tokens, p.seq, trained=not p.adapters)
        runs = m.layers * p.micro_batches * p.ranks / p.pp
        return StepFacts(
            model=m.name,
            unit="tokens",
            units=tokens,
            parameters=m.parameters,
            flops=flops,
            executed_flops=flops + runs * self.timed.recomputed_flops(p.recompute),
            peak_flops=self.timed.chip.peaks[p.precision] * p.ranks,
        )

    def layers(self, rank: int) -> int:
        """Of a stage."""
        return self.parts.stages[rank].layers

    def memory(self, rank: int) -> Memory:
        """Bytes of one device of a stage, by kind, when most is live."""
        return bounded(memory.stage_memory(self, self.parts.stages[rank], rank), SPREADS["memory"]["counted"])

    def fit(self, fullest: Memory) -> Fit:
        """Whether the fullest stage fits, and what would help."""
        return remedy.fit(self, fullest)

    @property
    def replica_size(self) -> tuple[float, float]:
        """Parameters of the device that holds most, and bytes of one element of a gradient."""
        return max(map(self.parts.whole, self.parts.stages)), self.sent.gradient_bytes

    @cached_property
    def errors(self) -> Errors:
        """The spreads that concern this step."""
        return transformer_errors(
            self.cluster.device,
            self.timed.curves,
            self.framework,
            named=self.named,
            precision=self.plan.precision,
            experts=bool(self.model.experts),
        )

    def sigma(self, step: float, exposed: float, bubble: float) -> float:
        """Standard deviation of the logarithm: operators by their groups, communication by its networks."""
        packed, seconds = self.timed.packed, self.timed.costs.seconds
        limit = power_sigma(seconds, packed, self.cluster.device)
        network = network_sigma(self.mesh, 1e8, ("tp", "cp", "dp", "pp"))
        spent = packed.groups.total(seconds)
        return self.errors.sigma(spent, limit, exposed=exposed / step, network=network, bubble=bubble / step)

    def provenance(self) -> Iterator[Evidence]:
        """What the times rest on."""
        timed, precisions = self.timed, (self.plan.precision,)
        yield from device_evidence(self.cluster.device, timed.chip, precisions, timed.curves)
        yield from network_evidence(self.cluster)
        what, style = f"kernels and overlap of {self.framework.title}", self.framework
        yield Evidence(what=what, kind=style.kind, source=style.source)
        yield from self.errors.evidence()


def shape_of(model: Transformer, plan: Plan, framework: Framework) -> Shape:
    """What a rank runs for one micro-batch of a plan."""
    return Shape(
        model=model,
        framework=framework,
        mbs=plan.mbs,
        seq=plan.seq,
        degrees=plan.degrees.inner,
        sp=plan.sp,
        dtype=Precision.BF16 if plan.precision.scaled else plan.precision,
        matrix=plan.precision,
        context=plan.context,
        accumulate=plan.micro_batches > 1,
        trained=not plan.adapters,
    )


@lru_cache(maxsize=1024)
def _adam(parameters: int, dtype: str, framework: Framework) -> PackedOps:
    return pack_ops(adam_ops(parameters, dtype, framework))
