"""What one rank runs for one micro-batch of a transformer under tensor, sequence, context and expert parallelism.

A `Piece` is the operators of a layer, the embedding or the head in one direction, in the style of the framework,
with the collectives between them. Each collective names the operators it may hide behind; the rest of it is
exposed. Pieces are made and packed once per distinct shape and then cost microseconds on any device.

`saved` is what a piece keeps for the backward pass, in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from paceline.cost import make
from paceline.cost.chip import Chip
from paceline.cost.curves import Curves
from paceline.cost.operators import OpTimes, times
from paceline.cost.pack import Packed, pack_ops
from paceline.cost.power import slowdown
from paceline.spec.device import Device
from paceline.spec.framework import Framework
from paceline.spec.transformer import Transformer
from paceline.spec.workload import ITEMSIZE, Op

Array = NDArray[np.float64]

#: kernels that a rotary embedding takes where nothing is fused: products, rotated copy, sum, for queries and for keys
ROTARY_PASSES = 3
#: of low-rank adapters, which sit beside attention's two linear layers (LoRA, as Hugging Face and NeMo have it by default)
ADAPTER_RANK = 16
#: batches of heads must be a multiple of this for Megatron's fused softmax
FUSED_SOFTMAX_UNIT = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Everything that decides which operators a rank runs for one micro-batch."""

    model: Transformer
    framework: Framework
    mbs: int
    seq: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    #: of activations, and of the products in the layers
    dtype: str = "bf16"
    matrix: str = "bf16"
    context: str = "ring"
    #: gradients of several micro-batches add up
    accumulate: bool = True
    #: weights have gradients; without, only adapters of no size to speak of are trained
    trained: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one context-parallel rank."""
        return self.mbs * self.seq // self.cp

    @property
    def local(self) -> int:
        """Tokens that norms, dropouts and residuals of one rank see."""
        return self.tokens // self.tp if self.sp else self.tokens

    @property
    def wide_bytes(self) -> float:
        """An activation of the model's width over all tokens."""
        return float(self.tokens * self.model.hidden * ITEMSIZE[self.dtype])


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective within a piece: bytes as nccl-tests counts them, the mesh axis, and what it may hide behind."""

    op: str
    size: float
    axis: str
    #: places (in the piece) of the operators that run beside it
    behind: tuple[int, ...] = ()
    #: parts it is cut into; the first cannot hide
    parts: int = 1
    #: operators of the piece that were issued before it
    at: int = 0


@dataclass(slots=True)
class Piece:
    """Operators of one part of the model in one direction."""

    ops: list[Op] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    #: products whose gradient goes to a parameter: what a zero-bubble schedule may put off
    weight: list[int] = field(default_factory=list)
    #: attention's core: what selective recomputation runs again
    core: list[int] = field(default_factory=list)
    #: kernels that the host launches for an operator, where it stands for one per expert
    launches: dict[int, int] = field(default_factory=dict)
    #: the operator before which the host reads back how many tokens each expert got, and so waits for the device; -1: none
    sync: int = -1

    def add(self, *ops: Op) -> tuple[int, ...]:
        """Appends operators and returns their places."""
        start = len(self.ops)
        self.ops += ops
        return tuple(range(start, len(self.ops)))

    def send(self, op: str, size: float, axis: str, behind: Iterable[int] = (), parts: int = 1) -> None:
        self.collectives.append(Collective(op, size, axis, tuple(behind), parts, len(self.ops)))


PIECES = ("layer.forward", "layer.backward", "embedding.forward", "embedding.backward", "head.forward", "head.backward")


@dataclass(frozen=True)
class Blocks:
    """All pieces of a shape, packed together."""

    shape: Shape
    pieces: dict[str, Piece]
    packed: Packed
    starts: dict[str, int]


@lru_cache(maxsize=4096)
def blocks(shape: Shape) -> Blocks:
    """The pieces of a shape, made on first use."""
    pieces = {name: Piece() for name in PIECES}
    for part, build in (("layer", _layer), ("embedding", _embedding), ("head", _head)):
        tape = _Tape(shape, pieces[f"{part}.forward"])
        build(tape)
        tape.run_back(pieces[f"{part}.backward"])
    if shape.framework.exchange_overlap and shape.accumulate:  # of two micro-batches, one computes
        for piece in pieces.values():
            _beside(piece)
    starts, total = {}, 0
    for name, piece in pieces.items():
        starts[name] = total
        total += len(piece.ops)
    return Blocks(shape, pieces, pack_ops(op for piece in pieces.values() for op in piece.ops), starts)


@dataclass(frozen=True, slots=True)
class PieceTime:
    """Seconds of a piece on the device: all of it, its weight gradients, and each operator's."""

    seconds: float
    weight_s: float
    each: Array
    piece: Piece


def piece_times(found: Blocks, device: Device, chip: Chip, curves: Curves) -> tuple[dict[str, PieceTime], OpTimes]:
    """Device time of every piece, and of every packed operator, at the clock that a long run sustains."""
    costs = times(found.packed, chip, curves)
    packed, framework = found.packed, found.shape.framework
    fused = packed.kinds.map(lambda kind: float(kind == "attention")) > 0
    if framework.attention_flops_per_cycle:  # an older kernel than the one the curves were fitted to
        limit = packed.flops / (framework.attention_flops_per_cycle * chip.sm_hz)
        costs = replace(costs, seconds=np.where(fused, np.maximum(costs.seconds, limit), costs.seconds))
    if framework.fp8_rate < 1:
        slower = packed.dtypes.map(lambda dtype: 1 / framework.fp8_rate if dtype == "fp8" else 1.0)
        costs = replace(costs, seconds=costs.seconds * slower)
    # the board's limit acts within milliseconds, so what matters is what products draw while they run
    products = packed.flops > 0
    flops = packed.dtypes.take(products).total(packed.flops[products])
    slow = slowdown(device, flops, float(packed.moved[products].sum()), float(costs.seconds[products].sum()))
    costs = replace(costs, seconds=costs.seconds * np.where(products, slow, 1.0))
    out = {}
    for name, piece in found.pieces.items():
        part = slice(found.starts[name], found.starts[name] + len(piece.ops))
        each = costs.seconds[part]
        out[name] = PieceTime(float(each.sum()), float(each[piece.weight].sum()), each, piece)
    return out, costs


# -- the tape --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Tape:
    """Forward operators as they run; what undoes each is kept and run in reverse, as autograd does."""

    s: Shape
    forward: Piece
    steps: list[Callable[[Piece], None]] = field(default_factory=list)

    def run(self, forward: Iterable[Op], backward: Iterable[Op]) -> tuple[int, ...]:
        """Operators and those of their gradient."""
        undo = tuple(backward)
        self.steps.append(lambda piece: _ignore(piece.add(*undo)))
        return self.forward.add(*forward)

    def run_back(self, piece: Piece) -> None:
        for step in reversed(self.steps):
            step(piece)


def _ignore(_: object) -> None:
    pass


def _linear(
    t: _Tape, tokens: int, inputs: int, outputs: int, parallel: str = "", *, batch: int = 1, matrix: str | None = None, bias: bool | None = None,
    cast: bool = True,
) -> None:
    """A linear layer, whole or split by columns or rows over the tensor-parallel ranks, with its collectives."""
    s = t.s
    dtype, size = matrix or s.matrix, ITEMSIZE[s.dtype]
    biased, overlap = s.model.bias if bias is None else bias, s.framework.tp_overlap
    cast = cast and dtype in ("fp8", "fp4")
    if cast:
        t.forward.add(_cast(s, batch * tokens * inputs))
    places = t.forward.add(make.gemm(batch, tokens, outputs, inputs, dtype, bias=biased and s.framework.fusion == "none"))
    if parallel == "column":
        _gather(s, t.forward, places if overlap == "full" else ())
    elif parallel == "row":
        _reduce(s, t.forward, places if overlap == "full" else ())

    def back(piece: Piece) -> None:
        if cast:
            piece.add(_cast(s, batch * tokens * outputs))
        data = piece.add(make.gemm(batch, tokens, inputs, outputs, dtype, "tn"))
        weight: tuple[int, ...] = ()
        if s.trained:
            weight = piece.add(*_weight_gradient(s, make.gemm(batch, outputs, inputs, tokens, dtype, "nn"), batch * inputs * outputs))
        piece.weight += weight
        if biased and s.trained:
            whole = [batch * tokens * outputs * size]
            piece.add(make.make_op("aten.sum", "reduce", s.dtype, whole, [outputs * size], (outputs, tokens), tags=("outer",)))
        if parallel == "column":  # the saved input is gathered again for the weight gradient, and the input's gradient reduced
            _gather(s, piece, data if overlap != "none" else ())
            _reduce(s, piece, weight if overlap != "none" else ())
        elif parallel == "row":
            _gather(s, piece, data if overlap == "full" else ())

    t.steps.append(back)


def _weight_gradient(s: Shape, product: Op, weights: int) -> list[Op]:
    """The product, and adding it to the gradients of earlier micro-batches: within it, or by a kernel of its own."""
    size = ITEMSIZE[s.dtype]
    if s.framework.fused_accumulation:
        more = weights * (4 - size) + (weights * 4 if s.accumulate else 0)
        return [replace(product, writes=(*product.writes, replace(product.writes[0], bytes=more)))]
    if not s.accumulate:
        return [product]
    held = 4 if s.framework.fp32_gradients else size
    return [product, make.make_op("aten.add_", "elementwise", s.dtype, [weights * size, weights * held], [weights * held], (weights,))]


def _cast(s: Shape, elements: int) -> Op:
    """To fp8, as it is and transposed, in one kernel."""
    return make.make_op("te.cast_transpose", "cast", s.dtype, [elements * ITEMSIZE[s.dtype]], [elements, elements], (elements,))


def _gather(s: Shape, piece: Piece, behind: Iterable[int] = ()) -> None:
    """Sequence parallel: all tokens are brought together before a column-parallel product."""
    if s.tp > 1 and s.sp:
        piece.send("all_gather", s.wide_bytes, "tp", behind, s.tp)


def _reduce(s: Shape, piece: Piece, behind: Iterable[int] = ()) -> None:
    """After a row-parallel product: partial sums become whole ones, or whole parts."""
    if s.tp > 1:
        piece.send("reduce_scatter" if s.sp else "all_reduce", s.wide_bytes, "tp", behind, s.tp if s.sp else 1)


def _moved(name: str, kind: str, dtype: str, elements: int, tags: tuple[str, ...] = ()) -> Op:
    """A kernel that reads and writes every element once."""
    size = elements * ITEMSIZE[dtype]
    return make.make_op(name, kind, dtype, [size], [size], (elements,), tags=tags)


def _dropout(s: Shape, elements: int, residual: bool = False) -> tuple[Op, Op]:
    """Dropout, with the residual's sum where it is fused to it, and its gradient."""
    size = elements * ITEMSIZE[s.dtype]
    return (
        make.make_op("aten.native_dropout", "elementwise", s.dtype, [size] * (2 if residual else 1), [size, elements], (elements,), tags=("random",)),
        make.make_op("aten.native_dropout_backward", "elementwise", s.dtype, [size, elements], [size], (elements,)),
    )


# -- parts of a layer ------------------------------------------------------------------------------


def _layer(t: _Tape) -> None:
    """Attention and feed-forward with their norms, residuals and collectives."""
    s, m = t.s, t.s.model
    _norm(t)
    if m.kv_rank:
        _latent(t)
    else:
        _linear(t, s.tokens, m.hidden, (m.q_size + 2 * m.kv_size) // s.tp, "column")
        _adapter(t, m.hidden, (m.q_size + 2 * m.kv_size) // s.tp)
    _rotary(t)
    _core(t)
    _linear(t, s.tokens, m.q_size // s.tp, m.hidden, "row")
    _adapter(t, m.q_size // s.tp, m.hidden)
    _residual(t)
    _norm(t)
    if m.experts:
        _experts(t)
    else:
        _feed(t, s.tokens, m.ffn)
    _residual(t)


def _adapter(t: _Tape, inputs: int, outputs: int) -> None:
    """A low-rank branch beside a linear layer, where only such are trained: dropout, down, up, scaled, added."""
    s, rank = t.s, ADAPTER_RANK
    if s.trained:
        return
    drop, undrop = _dropout(s, s.tokens * inputs)
    join = make.pointwise(s.tokens * outputs, s.dtype, 2)
    down, up = make.gemm(1, s.tokens, rank, inputs, s.dtype), make.gemm(1, s.tokens, outputs, rank, s.dtype)
    scale = make.pointwise(s.tokens * outputs, s.dtype)
    undo = [
        scale, make.gemm(1, s.tokens, rank, outputs, s.dtype, "tn"), make.gemm(1, outputs, rank, s.tokens, s.dtype, "nn"),
        make.gemm(1, s.tokens, inputs, rank, s.dtype, "tn"), make.gemm(1, rank, inputs, s.tokens, s.dtype, "nn"), undrop,
        make.pointwise(s.tokens * inputs, s.dtype, 2),
    ]
    t.run([down, up, join], [op for op in undo if op is not undrop and op is not scale])


def _latent(t: _Tape) -> None:
    """Queries, keys and values through narrower widths; the way down is not split over ranks, the way up by heads."""
    s, m = t.s, t.s.model
    _linear(t, s.local, m.hidden, m.q_rank + m.kv_rank + m.rotary_dim)
    t.run([make.norm(s.local, m.q_rank + m.kv_rank, s.dtype, rms=True)], [make.norm(s.local, m.q_rank + m.kv_rank, s.dtype, True, True)])
    _linear(t, s.tokens, m.q_rank, m.heads * (m.head_dim + m.rotary_dim) // s.tp)
    _linear(t, s.tokens, m.kv_rank, 2 * m.q_size // s.tp)
    _gather(s, t.forward)
    t.steps.append(lambda piece: _reduce(s, piece))


def _norm(t: _Tape) -> None:
    s, rms = t.s, t.s.model.norm == "rms"
    t.run([make.norm(s.local, s.model.hidden, s.dtype, rms=rms)], [make.norm(s.local, s.model.hidden, s.dtype, True, rms)])


def _residual(t: _Tape) -> None:
    """Dropout and the sum with the residual; in the backward pass the gradients of both branches meet."""
    s = t.s
    elements = s.local * s.model.hidden
    meet = make.pointwise(elements, s.dtype, 2)
    if not s.framework.dropout:
        t.run([make.pointwise(elements, s.dtype, 2)], [meet])
        return
    drop, undo = _dropout(s, elements, residual=s.framework.fusion != "none")
    t.run([drop] if s.framework.fusion != "none" else [drop, make.pointwise(elements, s.dtype, 2)], [undo, meet])


def _rotary(t: _Tape) -> None:
    s = t.s
    if s.model.positions != "rotary":
        return
    passes = ROTARY_PASSES if s.framework.fusion == "none" else 1
    for width in (s.model.q_size // s.tp, max(s.model.kv_size // s.tp, s.model.head_dim)):
        ops = [make.pointwise(s.tokens * width, s.dtype, min(2, passes), 1)] * passes
        t.run(ops, ops)


def _core(t: _Tape) -> None:
    """Attention between queries, keys and values of this rank's heads."""
    s, m = t.s, t.s.model
    heads, queries = max(1, m.heads // s.tp), s.seq // s.cp
    if s.framework.attention != "fused":
        _unfused_core(t, s.mbs * heads, queries)
        return
    # with context parallelism each rank's queries meet half of all keys on average: work is balanced over the ranks
    keys, causal = (s.seq, m.causal) if s.cp == 1 else (s.seq // 2 if m.causal else s.seq, False)
    if s.context == "all-to-all" and s.cp > 1:
        heads, queries, keys, causal = max(1, heads // s.cp), s.seq, s.seq, m.causal
    if s.framework.unpadded:  # gathers, and scatters into zeros
        moved = _moved("index", "gather", s.dtype, s.framework.unpadded * s.tokens * m.q_size // s.tp)
        t.run([moved], [moved, moved])
    shape = (s.mbs, heads, queries, keys, m.head_dim + m.rotary_dim // 2, s.dtype, causal)  # wider keys, narrower values
    places = t.run([make.attention(*shape)], ())
    t.forward.core += places

    def back(piece: Piece) -> None:
        undo = piece.add(make.attention(*shape, backward=True))
        _context(s, piece, undo, backward=True)

    _context(s, t.forward, places)
    t.steps.append(back)


def _unfused_core(t: _Tape, batch: int, queries: int) -> None:
    """Products with the scores in memory between them, round a softmax that masks and scales."""
    s, size = t.s, t.s.model.head_dim
    scores = batch * queries * s.seq
    ahead = [make.gemm(batch, queries, s.seq, size, s.dtype), make.softmax(batch * queries, s.seq, s.dtype)]
    undo = [make.softmax(batch * queries, s.seq, s.dtype, True), make.gemm(batch, queries, size, s.seq, s.dtype, "tn"),
            make.gemm(batch, s.seq, size, queries, s.dtype, "nn")]
    if s.framework.unfused_mask or batch % FUSED_SOFTMAX_UNIT:  # scaled and masked by kernels of their own
        apart = [make.pointwise(scores, s.dtype)] * 2
        ahead[1:1] = apart
        undo[1:1] = apart
    if s.framework.dropout:
        drop, undrop = _dropout(s, scores)
        ahead.append(drop)
        undo.insert(0, undrop)
    ahead.append(make.gemm(batch, queries, size, s.seq, s.dtype, "tn"))
    undo[:0] = [make.gemm(batch, queries, s.seq, size, s.dtype), make.gemm(batch, s.seq, size, queries, s.dtype, "nn")]
    t.forward.core += t.run(ahead, undo)
    together = _moved("aten.copy_", "copy", s.dtype, s.tokens * s.model.q_size // s.tp, ("strided",))  # heads beside each other again
    t.run([together], [together])


def _context(s: Shape, piece: Piece, behind: tuple[int, ...], backward: bool = False) -> None:
    """Keys and values go round the ring while attention works on those at hand, or heads are exchanged for tokens."""
    if s.cp == 1:
        return
    size = ITEMSIZE[s.dtype]
    kv = 2.0 * s.tokens * max(s.model.kv_size // s.tp, s.model.head_dim) * size
    if s.context == "ring":
        piece.send("all_gather", kv * s.cp, "cp", behind, s.cp)
        if backward:
            piece.send("reduce_scatter", kv * s.cp, "cp", behind, s.cp)
        return
    q = float(s.tokens * s.model.q_size // s.tp * size)
    piece.send("all_to_all", q + kv, "cp")
    piece.send("all_to_all", q, "cp")


def _activation(t: _Tape, elements: int) -> None:
    """GELU with its bias, or the gate of SwiGLU."""
    dtype, math = t.s.dtype, ("math",)
    if not t.s.model.gated:
        t.run([make.pointwise(elements, dtype, 1, 1, math)], [make.pointwise(elements, dtype, 2, 1, math)])
    elif t.s.framework.fusion == "none":
        product = make.pointwise(elements, dtype, 2)
        t.run([make.pointwise(elements, dtype, 1, 1, math), product], [product, product, make.pointwise(elements, dtype, 2, 1, math)])
    else:
        t.run([make.pointwise(elements, dtype, 2, 1, math)], [make.pointwise(elements, dtype, 3, 2, math)])


def _feed(t: _Tape, tokens: int, ffn: int) -> None:
    width = ffn // t.s.tp
    _linear(t, tokens, t.s.model.hidden, width * (2 if t.s.model.gated else 1), "column")
    _activation(t, tokens * width)
    _linear(t, tokens, width, t.s.model.hidden, "row")


def _experts(t: _Tape) -> None:
    """Tokens go to their experts' ranks and back; each rank's experts are evenly loaded.

    Where only some layers have experts, this is one of those and its share of the others: tokens are split between the two.
    """
    s, m = t.s, t.s.model
    tokens = s.tokens // m.moe_every
    here, size = tokens // s.tp if s.sp else tokens, ITEMSIZE[s.dtype]
    routed, local = here * m.top_k, max(1, m.experts // s.ep // m.moe_every)
    if m.moe_every > 1:
        _feed(t, s.tokens - tokens, m.dense_ffn)
    if m.shared_ffn:
        _feed(t, tokens, m.shared_ffn)
    _linear(t, here, m.hidden, m.experts, matrix=s.dtype, bias=False)
    t.run([make.softmax(here, m.experts, s.dtype)], [make.softmax(here, m.experts, s.dtype, True)])
    # sorted by expert; after an all-to-all, copies of one expert come from every rank and are put together once more
    sort = [_moved("permute", "gather", s.dtype, routed * m.hidden)] * (1 if s.framework.dispatch == "once" or s.ep == 1 or local == 1 else 2)
    fused, per_expert = s.framework.experts == "fused", max(1, routed // local)
    t.run(sort, sort)
    if not fused:
        t.forward.sync = len(t.forward.ops)
    _exchange(t, float(routed * m.hidden * size))
    _expert_linear(t, per_expert, m.hidden, m.ffn * (2 if m.gated else 1), local)
    if not fused:
        _activation(t, routed * m.ffn)
    _expert_linear(t, per_expert, m.ffn, m.hidden, local)
    _exchange(t, float(routed * m.hidden * size))
    t.run(sort, sort)


def _expert_linear(t: _Tape, tokens: int, inputs: int, outputs: int, local: int) -> None:
    """A linear layer of every expert of a rank: kernels of their own, or grouped ones that leave no other pass over the tokens."""
    s = t.s
    fused = s.framework.experts == "fused"
    first, undone = len(t.forward.ops), len(t.steps)
    _linear(t, tokens, inputs, outputs, batch=local, bias=False, cast=not fused)
    if s.model.bias and not fused:
        t.run(*_expert_bias(s, local * tokens * outputs))
    if fused:
        return
    t.forward.launches |= dict.fromkeys(range(first, len(t.forward.ops)), local)
    steps = t.steps[undone:]
    del t.steps[undone:]

    def back(piece: Piece) -> None:
        start = len(piece.ops)
        for step in reversed(steps):
            step(piece)
        piece.launches |= dict.fromkeys(range(start, len(piece.ops)), local)

    t.steps.append(back)


def _expert_bias(s: Shape, elements: int) -> tuple[list[Op], list[Op]]:
    """Each expert's bias weighted by its tokens' probabilities, which are fp32: product, sum, all put together, and cast back."""
    narrow, wide = elements * ITEMSIZE[s.dtype], elements * 4
    ahead = [([], [wide]), ([narrow, wide], [wide]), ([wide], [wide]), ([wide], [narrow])]
    undo = [([narrow], [wide]), ([wide], [narrow]), ([wide], [wide]), ([wide], []), ([wide], [])]
    first, second = (
        [make.make_op("bias", "elementwise", "fp32", reads, writes, (elements,)) for reads, writes in passes] for passes in (ahead, undo))
    return first, second


def _exchange(t: _Tape, size: float) -> None:
    if t.s.ep > 1:
        t.forward.send("all_to_all", size, "ep")
        t.steps.append(lambda piece: piece.send("all_to_all", size, "ep"))


def _beside(piece: Piece) -> None:
    """Lets experts' exchanges run beside another micro-batch: of as much computation as the longest run that hides nothing else."""
    taken = sorted({place for collective in piece.collectives for place in collective.behind})
    stops = [-1, *taken, len(piece.ops)]
    start, end = max(zip(stops, stops[1:], strict=False), key=lambda pair: pair[1] - pair[0])
    room = tuple(range(start + 1, end))
    piece.collectives = [replace(c, behind=room, parts=1) if c.axis == "ep" else c for c in piece.collectives]


# -- the ends --------------------------------------------------------------------------------------


def _embedding(t: _Tape) -> None:
    """Look-up in this rank's part of the vocabulary, positions, dropout."""
    s, m = t.s, t.s.model
    elements = s.tokens * m.hidden
    t.run([_moved("aten.embedding", "gather", s.dtype, elements)], [_moved("aten.embedding_backward", "scatter", s.dtype, elements, ("sorted",))])
    _reduce(s, t.forward)
    t.steps.append(lambda piece: _gather(s, piece))
    if m.positions == "learned":
        t.run([make.pointwise(elements, s.dtype, 2)], [_moved("aten.sum", "elementwise", s.dtype, elements)])
    if s.framework.dropout:
        drop, undo = _dropout(s, s.local * m.hidden)
        t.run([drop], [undo])


def _head(t: _Tape) -> None:
    """Last norm, projection to this rank's part of the vocabulary, loss over all parts."""
    s, m = t.s, t.s.model
    _norm(t)
    vocab = m.padded_vocab(s.tp) // s.tp if s.tp > 1 else m.vocab
    _linear(t, s.tokens, m.hidden, vocab, "column", matrix=s.dtype, bias=not m.causal)
    logits = s.tokens * vocab
    if s.framework.fused_loss or s.framework.fusion == "compile":
        t.run([make.make_op("loss", "elementwise", "fp32", [logits * 2], [logits * 2], (logits,))],
              [make.make_op("loss_backward", "elementwise", "fp32", [logits * 2], [logits * 2], (logits,))])
    else:  # to fp32, maximum, difference, exponential, sum, quotient; and back again
        widen, narrow = (make.make_op("aten._to_copy", "cast", s.dtype, [logits * a], [logits * b], (logits,)) for a, b in ((2, 4), (4, 2)))
        along = make.make_op("aten.sum", "reduce", "fp32", [logits * 4], [s.tokens * 4], (s.tokens, vocab), tags=("inner",))
        once = make.pointwise(logits, "fp32")
        t.run([widen, along, once, make.pointwise(logits, "fp32", tags=("math",)), along, once], [once, narrow])
    if s.tp > 1:
        for _ in range(3):  # maximum, sum, target
            t.forward.send("all_reduce", 4.0 * s.tokens, "tp")


# -- memory ----------------------------------------------------------------------------------------


def saved_bytes(s: Shape, recompute: str) -> float:
    """What one layer keeps of one micro-batch for its backward pass."""
    m, size = s.model, ITEMSIZE[s.dtype]
    wide = float(s.local * m.hidden)
    if recompute == "full":
        return wide * size
    if recompute == "selective" and s.framework.selective == "ops":  # the input, attention's output and every second product
        products = s.tokens * (m.q_size + 2 * m.kv_size + m.ffn * (2 if m.gated else 1)) / s.tp + 2 * wide
        return size * (wide + s.tokens * m.q_size / s.tp + products / 2)
    masks = 2 * wide if s.framework.dropout else 0.0
    # what goes into the products: outputs of both norms, attention's output, the activation's output
    inside = 1 if s.framework.fp8_saved and s.matrix == "fp8" else size
    whole = float(s.tokens * m.hidden) if s.framework.state == "torch" else wide  # gathered, and kept so
    norms = (2 if s.framework.fusion != "compile" else 1) * wide * size + (2 if s.trained else 1) * whole * inside  # adapters sit at attention
    heads = s.tokens / s.tp * ((m.q_size + 2 * m.kv_size) * size + m.q_size * inside)  # queries, keys, values, attention's output
    if m.kv_rank:  # the narrow widths before and after their norms, and what positions add to queries and keys
        heads += size * (2 * s.local * (m.q_rank + m.kv_rank + m.rotary_dim) + 2 * s.tokens * m.heads * m.rotary_dim / s.tp)
    scores = s.mbs * m.heads / s.tp * (s.seq / s.cp) * s.seq
    core = 0.0 if s.framework.attention == "fused" or recompute == "selective" else scores * (2 * size + 1 if s.framework.dropout else size)
    lse = 4.0 * s.mbs * m.heads / s.tp * s.seq / s.cp if s.framework.attention == "fused" else 0.0
    passes = (2 if m.gated else 1) + (1 if m.gated and s.framework.fusion == "none" else 0)
    tokens = s.tokens * m.ffn / s.tp if not m.experts else s.local * m.top_k * m.ffn + s.tokens * m.shared_ffn / s.tp
    routed = s.local * m.top_k * m.hidden * (size + inside) if m.experts else 0.0
    return norms + masks + heads + core + lse + tokens * (passes * size + (inside if s.trained else 0)) + routed


def backward_bytes(s: Shape) -> float:
    """Gradients of activations that are live at once in a layer's backward pass: of the feed-forward's inside, and of three as wide as the model."""
    m, size = s.model, ITEMSIZE[s.dtype]
    inside = s.local * m.top_k * m.ffn if m.experts else s.tokens * m.ffn / s.tp
    outside = s.local * m.top_k * m.hidden if m.experts else 0.0
    return size * (inside * (3 if m.gated else 2) + outside + s.local * m.hidden) + 2 * s.wide_bytes


def head_bytes(s: Shape) -> float:
    """Logits and their gradient, while the loss is computed."""
    vocab = s.model.padded_vocab(s.tp) / s.tp if s.tp > 1 else s.model.vocab
    each = s.framework.loss_bytes or ((2 + 4) if s.framework.fused_loss else (2 + 4 + 4))
    return s.tokens * vocab * (s.framework.split_loss_bytes or each if s.tp > 1 else each)


# -- optimizer -------------------------------------------------------------------------------------


def adam_ops(parameters: int, dtype: str, framework: Framework) -> list[Op]:
    """Mixed-precision Adam over a rank's share: gradients unscaled, their norm, the update, and the copy in low precision."""
    n, low = parameters, ITEMSIZE[dtype]
    held = 4 if framework.fp32_gradients else low
    # to fp32, checked, norm taken, clipped: each a pass over the gradients
    gradients = make.make_op("gradients", "elementwise", "fp32", [n * held, n * 4, n * 4], [n * 4, n * 4], (n,))
    update = make.make_op("adam", "optimizer", "fp32", [4 * n] * 4, [4 * n] * 3, (1, n, max(1, n // (65536 * 320))), tags=("fused",))
    copy = make.make_op("copy", "cast", dtype, [4 * n], [low * n], (n,))
    return [gradients, update, copy]
