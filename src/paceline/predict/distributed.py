"""Predict one training step of a transformer under a parallel plan, in closed form.

    micro-batch   a stage's layers forward and backward, each with what of its collectives no operator hides
    pipeline      m micro-batches at the pace of the slowest stage, and one passage through all of them
                  (the bubble)
    data          gradients reduced, parameters gathered: beside computation where the framework does it,
                  else after it
    step          pipeline + exposed data-parallel communication + optimizer

A layer's time and what a rank holds are in `predict/layer.py`, gradients and parameters in
`predict/gradients.py`.
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
from paceline.predict.layer import NOTHING, Held
from paceline.predict.step import power_evidence
from paceline.predict.stragglers import straggling
from paceline.sim.schedules import bubble_s, span_s
from paceline.sim.timeline import Timeline
from paceline.spec import schedules
from paceline.spec.cluster import Cluster
from paceline.spec.device import Device
from paceline.spec.framework import Framework
from paceline.spec.plan import Plan, resolve
from paceline.spec.prediction import DistributedPrediction, Evidence, Memory, Part, Stage
from paceline.spec.transformer import Transformer

#: what the exposed part of a mesh axis' collectives is called
TITLES = {
    "tp": "tensor-parallel collectives",
    "cp": "context-parallel exchange",
    "ep": "expert exchange",
    "host": "activation offload",
}


def predict(
    model: Transformer,
    cluster: Cluster,
    plan: Plan,
    *,
    framework: Framework | None = None,
    host_speed: float = 1.0,
    curves: Curves | None = None,
) -> DistributedPrediction:
    """Step time with interval, where it goes, and the memory of every stage."""
    step = Step.of(model, cluster, resolve(plan, cluster.device_count, model), framework, curves, host_speed)
    if not plan.relax.plain:
        from paceline import sync  # it builds on this module

        return sync.transformer(step, simulate=False)
    return step.prediction()


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

    def stages(self) -> list[StageTime]:
        """Every distinct stage of the pipeline, in order."""
        again = self.recomputed()
        forward, backward = (
            self.copied(self.run("layer.forward")),
            self.copied(self.run("layer.backward"), again),
        )
        outer = {
            name: self.run(name)
            for name in ("embedding.forward", "embedding.backward", "head.forward", "head.backward")
        }
        weight = self.pieces["layer.backward"].weight_s
        gather, scatter = self.gathers()
        out = []
        for i, mine in enumerate(self.chunks()):
            layers, (first, last) = sum(count for _, count in mine), self.ends(i)
            f, b = NOTHING.plus(forward, layers), NOTHING.plus(backward, layers)
            for there, part in ((first, "embedding"), (last, "head")):
                if there:
                    f, b = f.plus(outer[f"{part}.forward"]), b.plus(outer[f"{part}.backward"])
            whole = backward.plus(again)
            out.append(
                StageTime(
                    layers,
                    first,
                    last,
                    f,
                    b,
                    NOTHING.plus(again, layers),
                    _hidden(gather, forward.device_s, layers, self.framework.contention),
                    _hidden(
                        scatter + (gather if self.plan.reshard else 0.0),
                        whole.device_s,
                        layers,
                        self.framework.contention,
                    ),
                    weight * layers,
                )
            )
        return out

    # -- the step ----------------------------------------------------------------------------------

    def pipeline(self, stages: list[StageTime]) -> tuple[float, float, float]:
        """Seconds of all micro-batches at the slowest stage's pace, of the bubble, and of exposed
        transfers.
        """
        p = self.plan
        spent = [stage.forward_s + stage.backward_s for stage in stages]
        slowest = max(spent)
        steady = p.micro_batches * (slowest + self.framework.micro_batch_s)
        if p.pp == 1:
            return steady, 0.0, 0.0
        hop, overlap = self.total(self.hop), self.framework.p2p_overlap
        if p.schedule in ("1f1b", "gpipe"):
            alone, sent = (
                span_s(
                    p.schedule,
                    p.micro_batches,
                    [stage.forward_s for stage in stages],
                    [stage.backward_s for stage in stages],
                    seconds,
                    overlap,
                )
                for seconds in (0.0, hop)
            )
            bubble, transfers = alone - p.micro_batches * slowest, sent - alone
        else:
            each = schedules.get(p.schedule).chunks_per_rank(p.vpp)
            others, last = (
                [stage for stage in stages if not stage.last],
                next(stage for stage in stages if stage.last),
            )
            forward, backward, weight = (
                sum(getattr(stage, name) for stage in others) / len(others) / each
                for name in ("forward_s", "backward_s", "weight_s")
            )
            head = last.forward_s - forward * each, last.backward_s - backward * each
            bubble, sent = (
                bubble_s(
                    p.schedule,
                    p.pp,
                    p.micro_batches,
                    each,
                    (forward, backward, weight),
                    head,
                    seconds,
                    overlap,
                )
                for seconds in (0.0, hop)
            )
            transfers = sent - bubble
        return steady, bubble, transfers

    def memory(self, stage: Held, index: int) -> Memory:
        """Bytes of one device of a stage, by kind, when most is live."""
        return bounded(memory.stage_memory(self, stage, index), COUNTED_MEMORY)

    # -- the answer --------------------------------------------------------------------------------

    def prediction(self) -> DistributedPrediction:
        p = self.plan
        stages = self.stages()
        steady, bubble, transfers = self.pipeline(stages)
        reduce_s, gather_s = self.data_parallel(stages)
        if schedules.get(p.schedule).v_shaped and self.replicated and self.framework.dp_overlap:
            # of a rank's two chunks one is done long before the other; its gradients fill the bubble
            reduce_s -= min(bubble, reduce_s) / 2
        update = self.optimizer(stages)
        slow = max(stages, key=lambda stage: stage.forward_s + stage.backward_s)
        parts: dict[str, float] = {}
        backward = slow.backward.plus(slow.recompute)
        for name, run, gathers in (
            ("forward", slow.forward, slow.gather_forward_s),
            ("backward", backward, slow.gather_backward_s),
        ):
            parts[name] = run.compute_s - (slow.recompute.compute_s if name == "backward" else 0.0)
            if name == "backward":
                parts["recomputation"] = slow.recompute.compute_s
            for axis, seconds in run.exposed.items():
                parts[TITLES[axis]] = parts.get(TITLES[axis], 0.0) + seconds
            parts["host"] = parts.get("host", 0.0) + max(
                0.0, run.beside(gathers) - run.compute_s - sum(run.exposed.values()) - gathers
            )
        parts["parameter gathers"] = slow.gather_forward_s + slow.gather_backward_s
        parts["host"] = parts.get("host", 0.0) + self.framework.micro_batch_s
        parts = {name: seconds * p.micro_batches for name, seconds in parts.items()}
        parts |= {
            "pipeline bubble": bubble,
            "pipeline transfers": transfers,
            "gradient reduction": reduce_s,
            "optimizer": update,
        }
        parts["parameter gathers"] += gather_s
        parts["host"] += self.framework.step_s
        return self.answer(parts, stages, bubble, steady)

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
        recomputed = self.recomputed().flops * m.layers * p.micro_batches * p.tp * p.cp * p.dp
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


def _hidden(communication: float, compute: float, layers: int, contention: float) -> float:
    """Seconds that a collective per layer, one layer ahead of computation, adds to `layers` of them."""
    if not communication or not layers:
        return 0.0
    return communication + (layers - 1) * max(communication - compute, contention * communication)


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
