"""Pipeline parallelism by plan for the catalog's decoders, with the schedules of torch.distributed.pipelining.

    runner = Pipeline(model, optimizer_of, plan, loss)
    runner.step(ids, labels)          # a whole step: passes of all micro-batches, average over replicas, update

Stages hold the blocks that `spec.plan.stage_layers` gives them. Where embedding and output share a weight, its two copies (first and last
stage) add their gradients, so that they stay one weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.optim import Optimizer

from paceline.errors import PlanError
from paceline.spec.plan import Plan, stage_layers

SCHEDULES = {
    "": "Schedule1F1B", "gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B", "looped-bfs": "ScheduleLoopedBFS",
    "zb-v": "ScheduleZBVZeroBubble", "dualpipev": "ScheduleDualPipeV",
}
#: schedules in which a rank holds the first and the last stage of a V
_BENT = ("zb-v", "dualpipev")


class Stage(nn.Module):
    """Some blocks of a decoder, with the embedding before the first and norm and output after the last."""

    embed: nn.Embedding
    positions: nn.Embedding
    norm: nn.Module
    head: nn.Linear

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module], first: bool, last: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        for name, wanted in (("embed", first), ("positions", first), ("norm", last), ("head", last)):
            if wanted and hasattr(model, name):
                setattr(self, name, getattr(model, name))
        self.first, self.last = first, last
        self.rotary = tuple(getattr(model, name) for name in ("cos", "sin") if hasattr(model, name))

    def forward(self, x: Tensor) -> Tensor:
        """Token ids or activations in, activations or logits out."""
        if self.first:
            places = torch.arange(x.shape[1], device=x.device)
            x = self.embed(x) + (self.positions(places) if "positions" in self._modules else 0)
        for block in self.blocks:
            x = block(x, *self.rotary)
        if not self.last:
            return x
        logits: Tensor = self.head(self.norm(x))
        return logits


class Pipeline:
    """The stages of one rank, and a step over all of them; `optimizer` makes one for the parameters of this rank.

    All ranks must start from the same model (same seed). The plan says pp, vpp, mbs, gbs and the schedule.
    """

    def __init__(
        self, model: nn.Module, optimizer: Callable[[list[nn.Parameter]], Optimizer], plan: Plan | str, loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        plan = Plan.parse(plan) if isinstance(plan, str) else plan
        if not plan.mbs or not plan.gbs:
            raise PlanError("a pipeline needs mbs and gbs: samples of a micro-batch, and of a step")
        for name in ("embed", "blocks", "norm", "head"):
            if not hasattr(model, name):
                raise PlanError(f"pp={plan.pp} runs the catalog's decoders (embed, blocks, norm, head); {type(model).__name__} has no {name}")
        if plan.tp > 1 or plan.cp > 1:
            raise PlanError(f"pp={plan.pp} together with tp={plan.tp}, cp={plan.cp} is not run here; use pp with dp")
        world = dist.get_world_size()
        self.dp = plan.dp or world // plan.pp
        if self.dp * plan.pp != world or plan.schedule not in SCHEDULES:
            allowed = ", ".join(filter(None, SCHEDULES))
            raise PlanError(f"dp {self.dp} x pp {plan.pp} must be the {world} ranks started, and schedule one of {allowed}; got {plan.schedule!r}")
        self.plan, rank = plan, dist.get_rank()
        replica, place = divmod(rank, plan.pp)
        groups = [dist.new_group(list(range(r * plan.pp, (r + 1) * plan.pp))) for r in range(self.dp)]
        peers = [dist.new_group(list(range(p, world, plan.pp))) for p in range(plan.pp)]
        ends = [dist.new_group(sorted({r * plan.pp, self._owner(plan.pp * plan.vpp - 1) + r * plan.pp})) for r in range(self.dp)]
        self._group, self._peers, self._ends = groups[replica], peers[place], ends[replica]
        chunks = plan.pp * plan.vpp
        counts = stage_layers(len(model.blocks), plan.pp * plan.vpp)  # type: ignore[arg-type]
        starts = [sum(counts[:i]) for i in range(chunks)]
        mine = [i for i in range(chunks) if self._owner(i) == place]
        everything = list(model.blocks)  # type: ignore[arg-type]
        self.stages = [Stage(model, everything[starts[i] : starts[i] + counts[i]], i == 0, i == chunks - 1) for i in mine]
        self.tied = getattr(model.head, "weight", None) is model.embed.weight  # type: ignore[union-attr]
        device = next(model.parameters()).device
        made = [pipelining.PipelineStage(stage, i, chunks, device, group=self._group) for stage, i in zip(self.stages, mine, strict=True)]
        kind: Any = getattr(pipelining, SCHEDULES[plan.schedule])
        several = plan.vpp > 1 or plan.schedule in _BENT
        self._schedule = kind(made if several else made[0], plan.gbs // (self.dp * plan.mbs), loss_fn=loss)
        self.first, self.last = 0 in mine, chunks - 1 in mine
        self.parameters = list({id(p): p for stage in self.stages for p in stage.parameters()}.values())
        self.optimizer = optimizer(self.parameters)

    def _owner(self, stage: int) -> int:
        turn, place = divmod(stage, self.plan.pp)
        return self.plan.pp - 1 - place if self.plan.schedule in _BENT and turn % 2 else place

    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        """One step on this replica's samples (`gbs / dp` of them); the mean loss on the last stage, None elsewhere."""
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        self._schedule.step(*((inputs,) if self.first else ()), **({"target": targets, "losses": losses} if self.last else {}))
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._share()
        self.optimizer.step()
        return float(torch.stack(losses).mean()) if self.last else None

    def _share(self) -> None:
        """Copies of a tied weight add up; replicas average."""
        both = self.first and self.last
        if self.tied and not both and (self.first or self.last):
            stage = self.stages[0] if self.first else self.stages[-1]
            weight = stage.embed.weight if self.first else stage.head.weight
            dist.all_reduce(weight.grad, group=self._ends)
        if self.dp > 1:
            for parameter in self.parameters:
                dist.all_reduce(parameter.grad, group=self._peers)
                assert parameter.grad is not None
                parameter.grad.div_(self.dp)
