"""Mixtures of experts: tokens go to the ranks of their experts and back, and what runs there.

The framework decides most of it: how tokens travel (`dispatch`), whether experts run apart or in grouped
products (`experts`), and whether exchanges run beside another micro-batch (`exchange_overlap`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from paceline.cost import make
from paceline.cost.tape import Shape, Tape, TapePiece, activation, feed, linear, moved_op
from paceline.spec.vocabulary import Dispatch, ExpertKernels
from paceline.spec.workload import ITEMSIZE, Op


def run_experts(t: Tape) -> None:
    """Tokens go to their experts' ranks and back; each rank's experts are evenly loaded.

    Where only some layers have experts, this is one of those and its share of the others: tokens are split
    between the two.
    """
    s, m = t.s, t.s.model
    tokens = s.tokens // m.moe_every
    here, size = tokens // s.degrees.tp if s.sp else tokens, ITEMSIZE[s.dtype]
    routed, local = here * m.top_k, max(1, m.experts // s.degrees.ep // m.moe_every)
    if m.moe_every > 1:
        feed(t, s.tokens - tokens, m.dense_ffn)
    if m.shared_ffn:
        feed(t, tokens, m.shared_ffn)
    linear(t, here, m.hidden, m.experts, matrix=s.dtype, bias=False)
    t.run([make.softmax(here, m.experts, s.dtype)], [make.softmax(here, m.experts, s.dtype, True)])
    # sorted by expert; after an all-to-all, copies of one expert come from every rank and are put together
    # once more
    sort = [moved_op("permute", "gather", s.dtype, routed * m.hidden)] * (
        1 if s.framework.dispatch == Dispatch.ONCE or s.degrees.ep == 1 or local == 1 else 2
    )
    fused, per_expert = s.framework.experts == ExpertKernels.FUSED, max(1, routed // local)
    t.run(sort, sort)
    if not fused:
        t.forward.sync = len(t.forward.ops)
    _exchange(t, float(routed * m.hidden * size))
    _expert_linear(t, per_expert, m.hidden, m.ffn * (2 if m.gated else 1), local)
    if not fused:
        activation(t, routed * m.ffn)
    _expert_linear(t, per_expert, m.ffn, m.hidden, local)
    _exchange(t, float(routed * m.hidden * size))
    t.run(sort, sort)


def _expert_linear(t: Tape, tokens: int, inputs: int, outputs: int, local: int) -> None:
    """A linear layer of every expert of a rank: kernels of their own, or grouped ones that leave no other
    pass over the tokens.
    """
    s = t.s
    fused = s.framework.experts == ExpertKernels.FUSED
    first, undone = len(t.forward.ops), len(t.steps)
    linear(t, tokens, inputs, outputs, batch=local, bias=False, cast=not fused)
    if s.model.bias and not fused:
        t.run(*_expert_bias(s, local * tokens * outputs))
    if fused:
        return
    t.forward.launches |= dict.fromkeys(range(first, len(t.forward.ops)), local)
    steps = t.steps[undone:]
    del t.steps[undone:]

    def back(piece: TapePiece) -> None:
        start = len(piece.ops)
        for step in reversed(steps):
            step(piece)
        piece.launches |= dict.fromkeys(range(start, len(piece.ops)), local)

    t.steps.append(back)


def _expert_bias(s: Shape, elements: int) -> tuple[list[Op], list[Op]]:
    """Each expert's bias weighted by its tokens' probabilities, which are fp32: product, sum, all put
    together, and cast back.
    """
    narrow, wide = elements * ITEMSIZE[s.dtype], elements * 4
    ahead = [([], [wide]), ([narrow, wide], [wide]), ([wide], [wide]), ([wide], [narrow])]
    undo = [([narrow], [wide]), ([wide], [narrow]), ([wide], [wide]), ([wide], []), ([wide], [])]
    first, second = (
        [make.make_op("bias", "elementwise", "fp32", reads, writes, (elements,)) for reads, writes in passes]
        for passes in (ahead, undo)
    )
    return first, second


def _exchange(t: Tape, size: float) -> None:
    if t.s.degrees.ep > 1:
        t.forward.send("all_to_all", size, "ep")
        t.steps.append(lambda piece: piece.send("all_to_all", size, "ep"))


def beside(piece: TapePiece) -> None:
    """Lets experts' exchanges run beside another micro-batch: of as much computation as the longest run that
    hides nothing else.
    """
    taken = sorted({place for collective in piece.collectives for place in collective.behind})
    stops = [-1, *taken, len(piece.ops)]
    start, end = max(pairwise(stops), key=lambda pair: pair[1] - pair[0])
    room = tuple(range(start + 1, end))
    piece.collectives = [replace(c, behind=room, parts=1) if c.axis == "ep" else c for c in piece.collectives]
