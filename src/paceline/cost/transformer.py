"""What one rank runs for one micro-batch of a transformer under tensor, sequence, context and expert
parallelism.

A `Piece` is the operators of a layer, the embedding or the head in one direction, in the style of the
framework, with the collectives between them (`cost/tape.py`). Each collective names the operators it may hide
behind; the rest of it is exposed. Pieces are made and packed once per distinct shape and then cost
microseconds on any device.

`saved` is what a piece keeps for the backward pass, in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from paceline.cost import make
from paceline.cost.experts import beside, run_experts
from paceline.cost.pack import PackedOps, pack_ops
from paceline.cost.tape import LayerCollective as LayerCollective
from paceline.cost.tape import Shape as Shape
from paceline.cost.tape import (
    Tape,
    TapePiece,
    dropout_ops,
    feed,
    gather_parts,
    linear,
    moved_op,
    reduce_parts,
)
from paceline.spec.framework import Framework
from paceline.spec.vocabulary import (
    AttentionKernel,
    ContextExchange,
    Fusion,
    NormKind,
    Positions,
    Precision,
    Recompute,
    Selective,
    StateKeeper,
)
from paceline.spec.workload import ITEMSIZE, Op

Array = NDArray[np.float64]

#: kernels that a rotary embedding takes where nothing is fused: products, rotated copy, sum, for queries and
#: for keys
ROTARY_PASSES = 3
#: of low-rank adapters, which sit beside attention's two linear layers (LoRA, as Hugging Face and NeMo have
#: it by default)
ADAPTER_RANK = 16
#: batches of heads must be a multiple of this for Megatron's fused softmax
FUSED_SOFTMAX_UNIT = 4
PIECES = (
    "layer.forward",
    "layer.backward",
    "embedding.forward",
    "embedding.backward",
    "head.forward",
    "head.backward",
)


@dataclass(frozen=True)
class PackedPieces:
    """All pieces of a shape, packed together."""

    shape: Shape
    pieces: dict[str, TapePiece]
    packed: PackedOps
    starts: dict[str, int]


@lru_cache(maxsize=4096)
def blocks(shape: Shape) -> PackedPieces:
    """The pieces of a shape, made on first use."""
    pieces = {name: TapePiece() for name in PIECES}
    for part, build in (("layer", _layer), ("embedding", _embedding), ("head", _head)):
        tape = Tape(shape, pieces[f"{part}.forward"])
        build(tape)
        tape.run_back(pieces[f"{part}.backward"])
    if shape.framework.exchange_overlap and shape.accumulate:  # of two micro-batches, one computes
        for piece in pieces.values():
            beside(piece)
    starts, total = {}, 0
    for name, piece in pieces.items():
        starts[name] = total
        total += len(piece.ops)
    return PackedPieces(shape, pieces, pack_ops(op for piece in pieces.values() for op in piece.ops), starts)


# -- parts of a layer ------------------------------------------------------------------------------


def _layer(t: Tape) -> None:
    """Attention and feed-forward with their norms, residuals and collectives."""
    s, m = t.s, t.s.model
    _norm(t)
    if m.kv_rank:
        _latent(t)
    else:
        linear(t, s.tokens, m.hidden, (m.q_size + 2 * m.kv_size) // s.degrees.tp, "column")
        _adapter(t, m.hidden, (m.q_size + 2 * m.kv_size) // s.degrees.tp)
    _rotary(t)
    _core(t)
    linear(t, s.tokens, m.q_size // s.degrees.tp, m.hidden, "row")
    _adapter(t, m.q_size // s.degrees.tp, m.hidden)
    _residual(t)
    _norm(t)
    if m.experts:
        run_experts(t)
    else:
        feed(t, s.tokens, m.ffn)
    _residual(t)


def _adapter(t: Tape, inputs: int, outputs: int) -> None:
    """A low-rank branch beside a linear layer, where only such are trained: down, up, added."""
    s, rank = t.s, ADAPTER_RANK
    if s.trained:
        return
    ahead = [
        make.gemm(1, s.tokens, rank, inputs, s.dtype),
        make.gemm(1, s.tokens, outputs, rank, s.dtype),
        make.pointwise(s.tokens * outputs, s.dtype, 2),
    ]
    undo = [
        make.gemm(1, s.tokens, rank, outputs, s.dtype, "tn"),
        make.gemm(1, outputs, rank, s.tokens, s.dtype, "nn"),
        make.gemm(1, s.tokens, inputs, rank, s.dtype, "tn"),
        make.gemm(1, rank, inputs, s.tokens, s.dtype, "nn"),
        make.pointwise(s.tokens * inputs, s.dtype, 2),
    ]
    t.run(ahead, undo)


def _latent(t: Tape) -> None:
    """Queries, keys and values through narrower widths; the way down is not split over ranks, the way up by
    heads.
    """
    s, m = t.s, t.s.model
    linear(t, s.local, m.hidden, m.q_rank + m.kv_rank + m.rotary_dim)
    t.run(
        [make.norm(s.local, m.q_rank + m.kv_rank, s.dtype, rms=True)],
        [make.norm(s.local, m.q_rank + m.kv_rank, s.dtype, True, True)],
    )
    linear(t, s.tokens, m.q_rank, m.heads * (m.head_dim + m.rotary_dim) // s.degrees.tp)
    linear(t, s.tokens, m.kv_rank, 2 * m.q_size // s.degrees.tp)
    gather_parts(s, t.forward)
    t.steps.append(lambda piece: reduce_parts(s, piece))


def _norm(t: Tape) -> None:
    s, rms = t.s, t.s.model.norm == NormKind.RMS
    t.run(
        [make.norm(s.local, s.model.hidden, s.dtype, rms=rms)],
        [make.norm(s.local, s.model.hidden, s.dtype, True, rms)],
    )


def _residual(t: Tape) -> None:
    """Dropout and the sum with the residual; in the backward pass the gradients of both branches meet."""
    s = t.s
    elements = s.local * s.model.hidden
    meet = make.pointwise(elements, s.dtype, 2)
    if not s.framework.dropout:
        t.run([make.pointwise(elements, s.dtype, 2)], [meet])
        return
    drop, undo = dropout_ops(s, elements, residual=s.framework.fusion != Fusion.NONE)
    t.run(
        [drop] if s.framework.fusion != Fusion.NONE else [drop, make.pointwise(elements, s.dtype, 2)],
        [undo, meet],
    )


def _rotary(t: Tape) -> None:
    s = t.s
    if s.model.positions != Positions.ROTARY:
        return
    passes = ROTARY_PASSES if s.framework.fusion == Fusion.NONE else 1
    for width in (s.model.q_size // s.degrees.tp, max(s.model.kv_size // s.degrees.tp, s.model.head_dim)):
        ops = [make.pointwise(s.tokens * width, s.dtype, min(2, passes), 1)] * passes
        t.run(ops, ops)


def _core(t: Tape) -> None:
    """Attention between queries, keys and values of this rank's heads."""
    s, m = t.s, t.s.model
    heads, queries = max(1, m.heads // s.degrees.tp), s.seq // s.degrees.cp
    if s.framework.attention != AttentionKernel.FUSED:
        _unfused_core(t, s.mbs * heads, queries)
        return
    # with context parallelism each rank's queries meet half of all keys on average: work is balanced over the
    # ranks
    keys, causal = s.seq, m.causal
    if s.degrees.cp > 1:
        keys, causal = (s.seq // 2 if m.causal else s.seq), False
    if s.context == ContextExchange.ALL_TO_ALL and s.degrees.cp > 1:
        heads, queries, keys, causal = max(1, heads // s.degrees.cp), s.seq, s.seq, m.causal
    if s.framework.unpadded:  # gathers, and scatters into zeros
        moved = moved_op(
            "index", "gather", s.dtype, s.framework.unpadded * s.tokens * m.q_size // s.degrees.tp
        )
        t.run([moved], [moved, moved])
    # wider keys, narrower values
    shape = (s.mbs, heads, queries, keys, m.head_dim + m.rotary_dim // 2, s.dtype, causal)
    places = t.run([make.attention(*shape)], ())
    t.forward.core += places

    def back(piece: TapePiece) -> None:
        undo = piece.add(make.attention(*shape, backward=True))
        _context(s, piece, undo, backward=True)

    _context(s, t.forward, places)
    t.steps.append(back)


def _unfused_core(t: Tape, batch: int, queries: int) -> None:
    """Products with the scores in memory between them, round a softmax that masks and scales."""
    s, size = t.s, t.s.model.head_dim
    scores = batch * queries * s.seq
    ahead = [make.gemm(batch, queries, s.seq, size, s.dtype), make.softmax(batch * queries, s.seq, s.dtype)]
    undo = [
        make.softmax(batch * queries, s.seq, s.dtype, True),
        make.gemm(batch, queries, size, s.seq, s.dtype, "tn"),
        make.gemm(batch, s.seq, size, queries, s.dtype, "nn"),
    ]
    if s.framework.unfused_mask or batch % FUSED_SOFTMAX_UNIT:  # scaled and masked by kernels of their own
        apart = [make.pointwise(scores, s.dtype)] * 2
        ahead[1:1] = apart
        undo[1:1] = apart
    if s.framework.dropout:
        drop, undrop = dropout_ops(s, scores)
        ahead.append(drop)
        undo.insert(0, undrop)
    ahead.append(make.gemm(batch, queries, size, s.seq, s.dtype, "tn"))
    undo[:0] = [
        make.gemm(batch, queries, s.seq, size, s.dtype),
        make.gemm(batch, s.seq, size, queries, s.dtype, "nn"),
    ]
    t.forward.core += t.run(ahead, undo)
    # heads beside each other again
    together = moved_op(
        "aten.copy_", "copy", s.dtype, s.tokens * s.model.q_size // s.degrees.tp, ("strided",)
    )
    t.run([together], [together])


def _context(s: Shape, piece: TapePiece, behind: tuple[int, ...], backward: bool = False) -> None:
    """Keys and values go round the ring while attention works on those at hand, or heads are exchanged for
    tokens.
    """
    if s.degrees.cp == 1:
        return
    size = ITEMSIZE[s.dtype]
    kv = 2.0 * s.tokens * max(s.model.kv_size // s.degrees.tp, s.model.head_dim) * size
    if s.context == ContextExchange.RING:
        piece.send("all_gather", kv * s.degrees.cp, "cp", behind, s.degrees.cp)
        if backward:
            piece.send("reduce_scatter", kv * s.degrees.cp, "cp", behind, s.degrees.cp)
        return
    q = float(s.tokens * s.model.q_size // s.degrees.tp * size)
    piece.send("all_to_all", q + kv, "cp")
    piece.send("all_to_all", q, "cp")


# -- the ends --------------------------------------------------------------------------------------


def _embedding(t: Tape) -> None:
    """Look-up in this rank's part of the vocabulary, positions, dropout."""
    s, m = t.s, t.s.model
    elements = s.tokens * m.hidden
    t.run(
        [moved_op("aten.embedding", "gather", s.dtype, elements)],
        [moved_op("aten.embedding_backward", "scatter", s.dtype, elements, ("sorted",))],
    )
    reduce_parts(s, t.forward)
    t.steps.append(lambda piece: gather_parts(s, piece))
    if m.positions == Positions.LEARNED:
        t.run(
            [make.pointwise(elements, s.dtype, 2)], [moved_op("aten.sum", "elementwise", s.dtype, elements)]
        )
    if s.framework.dropout:
        drop, undo = dropout_ops(s, s.local * m.hidden)
        t.run([drop], [undo])


def _head(t: Tape) -> None:
    """Last norm, projection to this rank's part of the vocabulary, loss over all parts."""
    s, m = t.s, t.s.model
    _norm(t)
    vocab = m.padded_vocab(s.degrees.tp) // s.degrees.tp if s.degrees.tp > 1 else m.vocab
    linear(t, s.tokens, m.hidden, vocab, "column", matrix=s.dtype, bias=not m.causal)
    logits = s.tokens * vocab
    if s.framework.fused_loss or s.framework.fusion == Fusion.COMPILE:
        t.run(
            [make.make_op("loss", "elementwise", "fp32", [logits * 2], [logits * 2], (logits,))],
            [make.make_op("loss_backward", "elementwise", "fp32", [logits * 2], [logits * 2], (logits,))],
        )
    else:  # to fp32, maximum, difference, exponential, sum, quotient; and back again
        widen, narrow = (
            make.make_op("aten._to_copy", "cast", s.dtype, [logits * a], [logits * b], (logits,))
            for a, b in ((2, 4), (4, 2))
        )
        along = make.make_op(
            "aten.sum", "reduce", "fp32", [logits * 4], [s.tokens * 4], (s.tokens, vocab), tags=("inner",)
        )
        once = make.pointwise(logits, "fp32")
        t.run(
            [widen, along, once, make.pointwise(logits, "fp32", tags=("math",)), along, once], [once, narrow]
        )
    if s.degrees.tp > 1:
        for _ in range(3):  # maximum, sum, target
            t.forward.send("all_reduce", 4.0 * s.tokens, "tp")


# -- memory ----------------------------------------------------------------------------------------


def saved_bytes(s: Shape, recompute: str) -> float:
    """What one layer keeps of one micro-batch for its backward pass."""
    m, size = s.model, ITEMSIZE[s.dtype]
    wide = float(s.local * m.hidden)
    if recompute == Recompute.FULL:
        return wide * size
    # the input, attention's output and every second product
    if recompute == Recompute.SELECTIVE and s.framework.selective == Selective.OPS:
        products = (
            s.tokens * (m.q_size + 2 * m.kv_size + m.ffn * (2 if m.gated else 1)) / s.degrees.tp + 2 * wide
        )
        return size * (wide + s.tokens * m.q_size / s.degrees.tp + products / 2)
    masks = 2 * wide if s.framework.dropout else 0.0
    # what goes into the products: outputs of both norms, attention's output, the activation's output
    inside = 1 if s.framework.fp8_saved and s.matrix == Precision.FP8 else size
    gathered = s.framework.state is StateKeeper.TORCH  # and kept so
    whole = float(s.tokens * m.hidden) if gathered else wide
    # adapters sit at attention
    norms = (2 if s.framework.fusion != Fusion.COMPILE else 1) * wide * size + (
        2 if s.trained else 1
    ) * whole * inside
    # queries, keys, values, attention's output
    heads = s.tokens / s.degrees.tp * ((m.q_size + 2 * m.kv_size) * size + m.q_size * inside)
    # the narrow widths before and after their norms, and what positions add to queries and keys
    if m.kv_rank:
        heads += size * (
            2 * s.local * (m.q_rank + m.kv_rank + m.rotary_dim)
            + 2 * s.tokens * m.heads * m.rotary_dim / s.degrees.tp
        )
    scores = s.mbs * m.heads / s.degrees.tp * (s.seq / s.degrees.cp) * s.seq
    score_bytes = 2 * size + 1 if s.framework.dropout else size
    kept = s.framework.attention is not AttentionKernel.FUSED and recompute != Recompute.SELECTIVE
    core = scores * score_bytes if kept else 0.0
    flash = s.framework.attention is AttentionKernel.FUSED
    lse = 4.0 * s.mbs * m.heads / s.degrees.tp * s.seq / s.degrees.cp if flash else 0.0
    passes = (2 if m.gated else 1) + (1 if m.gated and s.framework.fusion == Fusion.NONE else 0)
    tokens = (
        s.tokens * m.ffn / s.degrees.tp
        if not m.experts
        else s.local * m.top_k * m.ffn + s.tokens * m.shared_ffn / s.degrees.tp
    )
    routed = s.local * m.top_k * m.hidden * (size + inside) if m.experts else 0.0
    return (
        norms + masks + heads + core + lse + tokens * (passes * size + (inside if s.trained else 0)) + routed
    )


def backward_bytes(s: Shape) -> float:
    """Gradients of activations that are live at once in a layer's backward pass: of the feed-forward's
    inside, and of three as wide as the model.
    """
    m, size = s.model, ITEMSIZE[s.dtype]
    inside = s.local * m.top_k * m.ffn if m.experts else s.tokens * m.ffn / s.degrees.tp
    outside = s.local * m.top_k * m.hidden if m.experts else 0.0
    return size * (inside * (3 if m.gated else 2) + outside + s.local * m.hidden) + 2 * s.wide_bytes


def head_bytes(s: Shape) -> float:
    """Logits and their gradient, while the loss is computed."""
    vocab = s.model.padded_vocab(s.degrees.tp) / s.degrees.tp if s.degrees.tp > 1 else s.model.vocab
    each = s.framework.loss_bytes or ((2 + 4) if s.framework.fused_loss else (2 + 4 + 4))
    return s.tokens * vocab * (s.framework.split_loss_bytes or each if s.degrees.tp > 1 else each)


# -- optimizer -------------------------------------------------------------------------------------


def adam_ops(parameters: int, dtype: str, framework: Framework) -> list[Op]:
    """Mixed-precision Adam over a rank's share: gradients unscaled, their norm, the update, and the copy in
    low precision.
    """
    n, low = parameters, ITEMSIZE[dtype]
    held = 4 if framework.fp32_gradients else low
    # to fp32, checked, norm taken, clipped: each a pass over the gradients
    gradients = make.make_op(
        "gradients", "elementwise", "fp32", [n * held, n * 4, n * 4], [n * 4, n * 4], (n,)
    )
    update = make.make_op(
        "adam",
        "optimizer",
        "fp32",
        [4 * n] * 4,
        [4 * n] * 3,
        (1, n, max(1, n // (65536 * 320))),
        tags=("fused",),
    )
    copy = make.make_op("copy", "cast", dtype, [4 * n], [low * n], (n,))
    return [gradients, update, copy]
