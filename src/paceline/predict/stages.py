"""What the stages of a transformer's pipeline hold: chunks of layers, and parameters of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from paceline.spec import schedules
from paceline.spec.plan import Plan, stage_layers
from paceline.spec.schedules import Schedule
from paceline.spec.transformer import Transformer


class StageLayers(NamedTuple):
    """Layers of a stage, and whether the embedding and the head are with them."""

    layers: int
    first: bool
    last: bool


#: a chunk: its number along the model, and its layers
ChunkLayers = tuple[int, int]


@dataclass(frozen=True)
class RankParts:
    """A transformer over the ranks of a plan."""

    model: Transformer
    plan: Plan

    @cached_property
    def schedule(self) -> Schedule:
        return schedules.get(self.plan.schedule)

    @cached_property
    def chunks(self) -> list[tuple[ChunkLayers, ...]]:
        """The chunks of each stage."""
        pp, each = self.plan.pp, self.schedule.chunks_per_rank(self.plan.vpp)
        held = [self.schedule.chunks_of(rank, pp, each) for rank in range(pp)]
        whole, total = self.model.layers, pp * each
        more, over = divmod(whole + 2, total)
        if total > 1 and not over and whole % total:  # the embedding and the head stand for a layer each
            layers = {chunk: more - (chunk in (0, total - 1)) for chunk in range(total)}
        else:  # the first chunks of a stage have one more
            counts = zip(stage_layers(whole, pp, each), held, strict=True)
            layers = {c: (count + each - 1 - i) // each for count, mine in counts for i, c in enumerate(mine)}
        return [tuple((chunk, layers[chunk]) for chunk in mine) for mine in held]

    @cached_property
    def stages(self) -> list[StageLayers]:
        """What each stage holds, in order."""
        end = 0 if self.schedule.v_shaped else self.plan.pp - 1
        return [
            StageLayers(sum(layers for _, layers in mine), rank == 0, rank == end)
            for rank, mine in enumerate(self.chunks)
        ]

    @property
    def ends_together(self) -> bool:
        """Whether the first stage holds both the embedding and the head."""
        return self.plan.pp == 1 or self.schedule.v_shaped

    # -- parameters of one rank --------------------------------------------------------------------

    @property
    def table(self) -> float:
        """Of the token embedding, or of the projection to the vocabulary."""
        return self.model.vocab * self.model.hidden / self.plan.tp

    @property
    def experts(self) -> float:
        """Of a layer's experts."""
        return self.model.expert_parameters / self.plan.ep

    @property
    def layer(self) -> float:
        """Of a layer."""
        return self.model.dense_parameters / self.plan.tp + self.experts

    def ends(self, first: bool, last: bool) -> float:
        """Of the embedding and the head; a tied projection is held at both ends."""
        m, tied = self.model, self.model.tied and not first
        own = first * m.embedding_parameters + last * m.head_parameters
        return own / self.plan.tp + self.table * (last and tied)

    def whole(self, stage: StageLayers) -> float:
        """Of a stage."""
        return stage.layers * self.layer + self.ends(stage.first, stage.last)

    def shared(self, stage: StageLayers, ranks: int, expert_ranks: int) -> float:
        """Of a stage whose parameters are divided among so many ranks, those of experts among others."""
        experts = stage.layers * self.experts
        return (self.whole(stage) - experts) / ranks + experts / expert_ranks

    # -- tensors -----------------------------------------------------------------------------------

    def tensors(self, kind: str) -> list[tuple[float, bool]]:
        """Parameters on one rank of the tensors of a layer, the embedding or the head, in the order in which
        a forward pass uses them, and whether they are experts'.
        """
        m, table = self.model, self.model.vocab * self.model.hidden
        dense, experts = m.layer_tensors, tuple[int, ...]()
        if kind == "layer":
            experts = m.feed_tensors(m.ffn) * (m.experts // self.plan.ep)
        elif kind == "embedding":
            dense = table, m.embedding_parameters - table
        else:
            copied = table * (m.tied and not self.ends_together)
            dense = *m.norm_tensors, m.head_parameters - sum(m.norm_tensors) + copied
        return [(count / self.plan.tp, False) for count in dense if count] + [(n, True) for n in experts]
