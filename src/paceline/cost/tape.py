"""What a rank runs for one micro-batch, as it is written down: operators, the collectives between them, and
what undoes each.

A `Piece` is one direction of a part of the model; a `Tape` fills the forward one and then, in reverse, the
backward one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from paceline.cost import make
from paceline.spec.framework import Framework
from paceline.spec.plan import Degrees
from paceline.spec.transformer import Transformer
from paceline.spec.vocabulary import Fusion, Precision, TensorOverlap
from paceline.spec.workload import ITEMSIZE, Op


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Everything that decides which operators a rank runs for one micro-batch."""

    model: Transformer
    framework: Framework
    mbs: int
    seq: int
    #: of the mesh's axes that split a layer
    degrees: Degrees = field(default_factory=Degrees)
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
        return self.mbs * self.seq // self.degrees.cp

    @property
    def local(self) -> int:
        """Tokens that norms, dropouts and residuals of one rank see."""
        return self.tokens // self.degrees.tp if self.sp else self.tokens

    @property
    def wide_bytes(self) -> float:
        """An activation of the model's width over all tokens."""
        return float(self.tokens * self.model.hidden * ITEMSIZE[self.dtype])


@dataclass(frozen=True, slots=True)
class LayerCollective:
    """A collective within a piece: bytes as nccl-tests counts them, the mesh axis, and what it may hide
    behind.
    """

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
class TapePiece:
    """Operators of one part of the model in one direction."""

    ops: list[Op] = field(default_factory=list)
    collectives: list[LayerCollective] = field(default_factory=list)
    #: products whose gradient goes to a parameter: what a zero-bubble schedule may put off
    weight: list[int] = field(default_factory=list)
    #: attention's core: what selective recomputation runs again
    core: list[int] = field(default_factory=list)
    #: kernels that the host launches for an operator, where it stands for one per expert
    launches: dict[int, int] = field(default_factory=dict)
    #: the operator before which the host reads back how many tokens each expert got, and so waits for the
    #: device; -1: none
    sync: int = -1

    def add(self, *ops: Op) -> tuple[int, ...]:
        """Appends operators and returns their places."""
        start = len(self.ops)
        self.ops += ops
        return tuple(range(start, len(self.ops)))

    def send(self, op: str, size: float, axis: str, behind: Iterable[int] = (), parts: int = 1) -> None:
        self.collectives.append(LayerCollective(op, size, axis, tuple(behind), parts, len(self.ops)))


@dataclass(slots=True)
class Tape:
    """Forward operators as they run; what undoes each is kept and run in reverse, as autograd does."""

    s: Shape
    forward: TapePiece
    steps: list[Callable[[TapePiece], None]] = field(default_factory=list)

    def run(self, forward: Iterable[Op], backward: Iterable[Op]) -> tuple[int, ...]:
        """Operators and those of their gradient."""
        undo = tuple(backward)
        self.steps.append(lambda piece: _ignore(piece.add(*undo)))
        return self.forward.add(*forward)

    def run_back(self, piece: TapePiece) -> None:
        for step in reversed(self.steps):
            step(piece)


def _ignore(_: object) -> None:
    pass


def linear(
    t: Tape,
    tokens: int,
    inputs: int,
    outputs: int,
    parallel: str = "",
    *,
    batch: int = 1,
    matrix: str | None = None,
    bias: bool | None = None,
    cast: bool = True,
) -> None:
    """A linear layer, whole or split by columns or rows over the tensor-parallel ranks, with its
    collectives.
    """
    s = t.s
    dtype, size = matrix or s.matrix, ITEMSIZE[s.dtype]
    biased, overlap = s.model.bias if bias is None else bias, s.framework.tp_overlap
    cast = cast and dtype in (Precision.FP8, Precision.FP4)
    if cast:
        t.forward.add(cast_op(s, batch * tokens * inputs))
    places = t.forward.add(
        make.gemm(batch, tokens, outputs, inputs, dtype, bias=biased and s.framework.fusion == Fusion.NONE)
    )
    if parallel == "column":
        gather_parts(s, t.forward, places if overlap == TensorOverlap.FULL else ())
    elif parallel == "row":
        reduce_parts(s, t.forward, places if overlap == TensorOverlap.FULL else ())

    def back(piece: TapePiece) -> None:
        if cast:
            piece.add(cast_op(s, batch * tokens * outputs))
        data = piece.add(make.gemm(batch, tokens, inputs, outputs, dtype, "tn"))
        weight: tuple[int, ...] = ()
        if s.trained:
            weight = piece.add(
                *_weight_gradient(
                    s, make.gemm(batch, outputs, inputs, tokens, dtype, "nn"), batch * inputs * outputs
                )
            )
        piece.weight += weight
        if biased and s.trained:
            whole = [batch * tokens * outputs * size]
            piece.add(
                make.make_op(
                    "aten.sum", "reduce", s.dtype, whole, [outputs * size], (outputs, tokens), tags=("outer",)
                )
            )
        # a part of the input that was kept is gathered again for the weight gradient; the input's gradient is
        # reduced
        if parallel == "column":
            if s.framework.regathers:
                gather_parts(s, piece, data if overlap != TensorOverlap.NONE else ())
            reduce_parts(s, piece, weight if overlap != TensorOverlap.NONE else ())
        elif parallel == "row":
            gather_parts(s, piece, data if overlap == TensorOverlap.FULL else ())

    t.steps.append(back)


def _weight_gradient(s: Shape, product: Op, weights: int) -> list[Op]:
    """The product, and adding it to the gradients of earlier micro-batches: within it, or by a kernel of its
    own.
    """
    size = ITEMSIZE[s.dtype]
    if s.framework.fused_accumulation:
        more = weights * (4 - size) + (weights * 4 if s.accumulate else 0)
        return [replace(product, writes=(*product.writes, replace(product.writes[0], bytes=more)))]
    if not s.accumulate:
        return [product]
    held = 4 if s.framework.fp32_gradients else size
    return [
        product,
        make.make_op(
            "aten.add_",
            "elementwise",
            s.dtype,
            [weights * size, weights * held],
            [weights * held],
            (weights,),
        ),
    ]


def cast_op(s: Shape, elements: int) -> Op:
    """To fp8, as it is and transposed, in one kernel."""
    return make.make_op(
        "te.cast_transpose",
        "cast",
        s.dtype,
        [elements * ITEMSIZE[s.dtype]],
        [elements, elements],
        (elements,),
    )


def gather_parts(s: Shape, piece: TapePiece, behind: Iterable[int] = ()) -> None:
    """Sequence parallel: all tokens are brought together before a column-parallel product."""
    if s.degrees.tp > 1 and s.sp:
        piece.send("all_gather", s.wide_bytes, "tp", behind, s.degrees.tp)


def reduce_parts(s: Shape, piece: TapePiece, behind: Iterable[int] = ()) -> None:
    """After a row-parallel product: partial sums become whole ones, or whole parts."""
    if s.degrees.tp > 1:
        op, parts = ("reduce_scatter", s.degrees.tp) if s.sp else ("all_reduce", 1)
        piece.send(op, s.wide_bytes, "tp", behind, parts)


def moved_op(name: str, kind: str, dtype: str, elements: int, tags: tuple[str, ...] = ()) -> Op:
    """A kernel that reads and writes every element once."""
    size = elements * ITEMSIZE[dtype]
    return make.make_op(name, kind, dtype, [size], [size], (elements,), tags=tags)


def dropout_ops(s: Shape, elements: int, residual: bool = False) -> tuple[Op, Op]:
    """Dropout, with the residual's sum where it is fused to it, and its gradient."""
    size = elements * ITEMSIZE[s.dtype]
    return (
        make.make_op(
            "aten.native_dropout",
            "elementwise",
            s.dtype,
            [size] * (2 if residual else 1),
            [size, elements],
            (elements,),
            tags=("random",),
        ),
        make.make_op(
            "aten.native_dropout_backward", "elementwise", s.dtype, [size, elements], [size], (elements,)
        ),
    )


def activation(t: Tape, elements: int) -> None:
    """GELU with its bias, or the gate of SwiGLU."""
    dtype, math = t.s.dtype, ("math",)
    if not t.s.model.gated:
        t.run([make.pointwise(elements, dtype, 1, 1, math)], [make.pointwise(elements, dtype, 2, 1, math)])
    elif t.s.framework.fusion == Fusion.NONE:
        product = make.pointwise(elements, dtype, 2)
        t.run(
            [make.pointwise(elements, dtype, 1, 1, math), product],
            [product, product, make.pointwise(elements, dtype, 2, 1, math)],
        )
    else:
        t.run([make.pointwise(elements, dtype, 2, 1, math)], [make.pointwise(elements, dtype, 3, 2, math)])


def feed(t: Tape, tokens: int, ffn: int) -> None:
    width = ffn // t.s.degrees.tp
    linear(t, tokens, t.s.model.hidden, width * (2 if t.s.model.gated else 1), "column")
    activation(t, tokens * width)
    linear(t, tokens, width, t.s.model.hidden, "row")
