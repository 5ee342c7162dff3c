"""The optimizer step, from the list of parameters: kernels, traffic and state.

`sgd` (momentum), `sgd-plain`, `adam`, `adamw`; an ending chooses the implementation: `-fused` (one
multi-tensor kernel), `-foreach` (one multi-tensor kernel per arithmetic step), `-single` (one
kernel per tensor and arithmetic step). Without one: what torch does on a GPU by default for SGD
(foreach), and fused for Adam, which is what people who care about speed switch on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import UnknownName
from paceline.spec import checks
from paceline.spec.workload import ITEMSIZE, Access, Op, Segment

#: multi-tensor kernels take the tensors apart into chunks of so many elements,
CHUNK = 65536
#: at most so many chunks in one launch,
MAX_CHUNKS = 320
#: and at most so many tensors in one launch, by the number of lists they walk together
MAX_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}


@dataclass(frozen=True, slots=True)
class OptimizerRule:
    """Arithmetic steps as (lists read, lists written) per element, and tensors of state per parameter."""

    states: int
    fused: tuple[int, int]
    foreach: tuple[tuple[int, int], ...]
    default: str
    #: foreach forms that need temporaries the size of all parameters
    temporaries: int = 0


RULES: dict[str, OptimizerRule] = {
    # p -= lr * g
    "sgd-plain": OptimizerRule(0, (2, 1), ((2, 1),), "foreach"),
    # m = mu m; m += g; p -= lr m
    "sgd": OptimizerRule(1, (3, 2), ((1, 1), (2, 1), (2, 1)), "foreach"),
    # m lerp; v mul, addcmul; sqrt; div; add eps; addcdiv
    "adam": OptimizerRule(2, (4, 3), ((2, 1), (1, 1), (3, 1), (1, 1), (1, 1), (1, 1), (3, 1)), "fused", 1),
    # the same after p *= 1 - lr wd
    "adamw": OptimizerRule(
        2, (4, 3), ((1, 1), (2, 1), (1, 1), (3, 1), (1, 1), (1, 1), (1, 1), (3, 1)), "fused", 1
    ),
}
IMPLEMENTATIONS = ("fused", "foreach", "single")


def names() -> list[str]:
    """Every optimizer name that capture accepts."""
    return [*RULES, *(f"{rule}-{how}" for rule in RULES for how in IMPLEMENTATIONS)]


def check(name: str) -> tuple[OptimizerRule, str]:
    """The rule and implementation of an optimizer name."""
    base, how = checks.text("optimizer", name), ""
    if name.endswith(tuple(f"-{way}" for way in IMPLEMENTATIONS)):
        base, _, how = name.rpartition("-")
    if base not in RULES:
        raise UnknownName(
            "optimizer",
            name,
            names(),
            f"allowed: {', '.join(RULES)}, each also with {', '.join('-' + h for h in IMPLEMENTATIONS)}",
        )
    return RULES[base], how or RULES[base].default


def launches(shapes: Sequence[tuple[int, ...]], lists: int) -> int:
    """Launches of a multi-tensor kernel over tensors of these shapes, walking `lists` tensors per
    parameter.
    """
    limit = MAX_TENSORS[min(5, max(1, lists))]
    count, chunks, members = 0, 0, 0
    for shape in shapes:
        elements = 1
        for size in shape:
            elements *= size
        members += 1
        left = -(-elements // CHUNK)
        while left:
            take = min(left, MAX_CHUNKS - chunks)
            chunks, left = chunks + take, left - take
            if chunks == MAX_CHUNKS:
                count, chunks = count + 1, 0
                members = 1 if left else 0
        if members == limit:
            count, chunks, members = count + 1, 0, 0
    return count + (1 if chunks else 0)


def segment(name: str, parameters: Sequence[tuple[tuple[int, ...], str]]) -> tuple[Segment, int]:
    """The optimizer's segment and the bytes of state it keeps, for trainable parameters (shape, dtype)."""
    rule, how = check(name)
    groups: dict[str, list[tuple[int, ...]]] = {}
    for shape, dtype in parameters:
        groups.setdefault(dtype, []).append(shape)
    ops: list[Op] = []
    state = temporary = 0
    for dtype, shapes in groups.items():
        counts = [_numel(shape) for shape in shapes]
        size = sum(counts) * ITEMSIZE[dtype]
        state += rule.states * sum(-(-n * ITEMSIZE[dtype] // 512) * 512 for n in counts)
        if how == "foreach":
            temporary += rule.temporaries * size
        steps = (rule.fused,) if how == "fused" else rule.foreach
        for reads, writes in steps:
            number = len(shapes)
            if how != "single":
                number = launches(shapes, reads + (writes if reads < writes else 0))
            ops.append(
                Op(
                    f"optimizer.{name}",
                    "optimizer",
                    "optimizer",
                    "",
                    dtype,
                    0.0,
                    tuple(Access(-1 - i, size) for i in range(reads)),
                    tuple(Access(-1 - i, size) for i in range(writes)),
                    (len(shapes), sum(counts), number),
                    (how,),
                )
            )
    live = {"temporary": temporary} if temporary else {}
    return Segment("optimizer", "optimizer", tuple(ops), {}, live), state


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
