"""Pipeline parallelism by plan for the catalog's decoders, with the schedules of
torch.distributed.pipelining.

    runner = Pipeline(model, optimizer_of, plan, loss)
    runner.step(ids, labels)    # a whole step: passes of all micro-batches, average over replicas, update

Stages hold the blocks that `spec.plan.stage_layers` gives them; each may be split further, by tensor
parallelism, and shared out over its replicas by FSDP2. Where embedding and output share a weight, its two
copies (first and last stage) add their gradients, so that they stay one weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.errors import PlanError, RunError
from paceline.spec import schedules, trained
from paceline.spec.plan import Plan, stage_layers
from paceline.train import _torch
from paceline.train.comm import agree
from paceline.train.launch import local_ranks
from paceline.train.memory import compiled, offload, recompute
from paceline.train.precision import autocast, multiply_in
from paceline.train.sharded import axes, mesh_of, spread, tensor
from paceline.train.whole import Split, leave


class ModelStage(nn.Module):
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
    """The stages of one rank, and a step over all of them; `optimizer` makes one for the parameters of this
    rank.

    All ranks must start from the same model (same seed). The plan says pp, vpp, mbs, gbs and the schedule.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], Optimizer],
        plan: Plan | str,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        plan = Plan.parse(plan) if isinstance(plan, str) else plan
        if not plan.mbs or not plan.gbs:
            raise PlanError("a pipeline needs mbs and gbs: samples of a micro-batch, and of a step")
        for name in ("embed", "blocks", "norm", "head"):
            if not hasattr(model, name):
                raise PlanError(
                    f"pp={plan.pp} runs the catalog's decoders (embed, blocks, norm, head);"
                    f" {type(model).__name__} has no {name}"
                )
        plan = trained.resolved(plan, dist.get_world_size(), agree(local_ranks(dist.get_world_size())))
        self.plan, self._order = plan, schedules.get(plan.schedule)
        #: of the whole model
        self._chunks = plan.pp * self._order.chunks_per_rank(plan.vpp)
        if not self._order.trains:
            runs = [name for name, order in schedules.SCHEDULES.items() if order.trains]
            raise PlanError(f"pipelines run under {', '.join(runs)}; got {plan.schedule!r}")
        #: optimizer state at least is shared out; gradients go with it
        self.shares = not plan.sharding.whole
        multiply_in(plan.precision)
        device = next(model.parameters()).device
        self._mesh: DeviceMesh | None = (mesh := mesh_of(plan, device))
        self.replica, place, _ = self._arranged(mesh)
        chunks = self._chunks
        counts = stage_layers(len(model.blocks), chunks)  # type: ignore[arg-type]
        starts = [sum(counts[:i]) for i in range(chunks)]
        mine = [i for i in range(chunks) if self._owner(i) == place]
        everything = list(model.blocks)  # type: ignore[arg-type]
        self.first, self.last = 0 in mine, chunks - 1 in mine
        self.tied = getattr(model.head, "weight", None) is model.embed.weight  # type: ignore[union-attr]
        if self.tied and self._order.v_shaped and self.shares:
            raise PlanError(
                f"{plan.sharding} with {plan.schedule} cannot share out a weight that embedding and output"
                " have in common; use another schedule, or ddp"
            )
        self.stages = [
            ModelStage(model, everything[starts[i] : starts[i] + counts[i]], i == 0, i == chunks - 1)
            for i in mine
        ]
        self._splits = [self._prepare(stage, mesh) for stage in self.stages]
        group = axes(mesh, "pipe").get_group()
        made = [
            pipelining.PipelineStage(stage, i, chunks, device, group=group)
            for stage, i in zip(self.stages, mine, strict=True)
        ]
        self._schedule = self._scheduled(made, loss)
        self.parameters = _distinct(self.stages)
        self.optimizer = optimizer(self.parameters)

    def _arranged(self, mesh: DeviceMesh) -> tuple[int, int, int]:
        """This rank's replica, stage and place among tensor-parallel ones; makes the groups that exchange
        gradients.
        """
        plan, ranks = self.plan, mesh.mesh.reshape(-1, self.plan.pp, self.plan.tp)
        self.dp = len(ranks)
        replica, place, lane = ((ranks == dist.get_rank()).nonzero()[0]).tolist()
        ends = sorted({0, self._owner(self._chunks - 1)})
        # every rank takes part in making every group
        peers = {
            (p, t): dist.new_group(ranks[:, p, t].tolist()) for p in range(plan.pp) for t in range(plan.tp)
        }
        outer = {
            (r, t): dist.new_group(ranks[r, ends, t].tolist()) for r in range(self.dp) for t in range(plan.tp)
        }
        self._peers, self._ends = peers[place, lane], outer[replica, lane]
        return replica, place, lane

    def _scheduled(self, stages: list[Any], loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
        """The schedule over this rank's stages: torch's class for it, or torch's runtime on its actions."""
        plan, order = self.plan, self._order
        count = plan.gbs // (self.dp * plan.mbs)
        if not order.torch:
            orders = [map(str, order.actions(rank, plan.pp, count, plan.vpp)) for rank in range(plan.pp)]
            return _torch.ordered_pipeline(stages, count, loss, orders)
        kind: Any = getattr(pipelining, f"Schedule{order.torch}")
        several = plan.vpp > 1 or order.v_shaped
        return kind(stages if several else stages[0], count, loss_fn=loss)

    def _prepare(self, stage: ModelStage, mesh: DeviceMesh) -> Split:
        """What else the plan says, stage by stage; what undoes it."""
        plan = self.plan
        blocks = list(stage.blocks)
        recompute(stage, plan.recompute, blocks)
        offload(stage, plan.offload)
        compiled(stage, plan.framework)
        split = Split(stage)
        if plan.tp > 1:
            tensor(stage, axes(mesh, "tensor"), plan)
        if self.shares:
            spread(stage, blocks, mesh, plan)
        else:
            autocast(stage, plan.precision)
        return split

    def _owner(self, stage: int) -> int:
        turn, place = divmod(stage, self.plan.pp)
        return self.plan.pp - 1 - place if self._order.v_shaped and turn % 2 else place

    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        """One step on this replica's samples (`gbs / dp` of them); the mean loss on the last stage, None
        elsewhere.
        """
        if self._mesh is None:
            raise RunError("this pipeline was closed; make another one")
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        self._schedule.step(
            *((inputs,) if self.first else ()), **({"target": targets, "losses": losses} if self.last else {})
        )
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._share()
        self.optimizer.step()
        return float(torch.stack(losses).mean()) if self.last else None

    def close(self) -> None:
        """Gives process groups and hooks back; all ranks do together. `stages` and `optimizer` have whole
        parameters then, as plain tensors.
        """
        if self._mesh is None:
            return
        mesh, self._mesh, self._schedule = self._mesh, None, None
        for stage, split in zip(self.stages, self._splits, strict=True):
            split.undo(stage, self.optimizer)
        self.parameters = _distinct(self.stages)
        groups, self._peers, self._ends = (self._peers, self._ends), None, None
        leave(mesh, groups)

    def _share(self) -> None:
        """Copies of a tied weight add up; replicas average."""
        both = self.first and self.last
        if self.tied and not both and (self.first or self.last):
            stage = self.stages[0] if self.first else self.stages[-1]
            weight = stage.embed.weight if self.first else stage.head.weight
            dist.all_reduce(_local(weight.grad), group=self._ends)
        if self.dp > 1 and not self.shares:  # FSDP2 has averaged already
            for parameter in self.parameters:
                gradient = _local(parameter.grad)
                dist.all_reduce(gradient, group=self._peers)
                gradient.div_(self.dp)


def _distinct(stages: Iterable[ModelStage]) -> list[nn.Parameter]:
    """Each parameter once."""
    return list({id(p): p for stage in stages for p in stage.parameters()}.values())


def _local(gradient: Tensor | None) -> Tensor:
    """This rank's part of a gradient."""
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
