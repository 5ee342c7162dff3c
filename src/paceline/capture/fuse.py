"""The same training step with kernels fused as torch.compile's inductor fuses them on a GPU.

Works on a workload, captured now or saved, and follows inductor's own stages:

1. lower: each operator becomes pieces that walk elements (pointwise), rows (a norm's or softmax's
   statistics) or columns (sums over the batch); products, convolutions, attention, recurrent layers,
   sorts and the optimizer stay library kernels. A norm is statistics, then pointwise.
2. keep or recompute: what the backward pass reads of the forward pass is saved, unless it can be
   computed again from what is saved anyway, or from less.
3. inline: a pointwise result that no library kernel reads is never stored, its expression moves into
   each reader, as long as that does not read too much twice.
4. schedule: pieces over the same elements that pass data on, or read the same data, become one
   kernel. It reads what comes from outside once and writes what others use.

Each segment is fused by itself, so repeated blocks stay folded.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.errors import SpecError
from paceline.spec.vocabulary import Phase
from paceline.spec.workload import ITEMSIZE, Access, Op, Segment, Workload

#: a tensor at one time: its storage, and how often that was written before
Key = tuple[int, int]

#: what is not saved otherwise is recomputed if that reads at most so many times the bytes of the result
READING_MORE = 1.25
#: inductor's thresholds: a result with several readers is stored if its expression reads more than the first,
#: any above the second
READS_SHARED, READS_ANY = 4, 8
#: products with a ragged side are padded where they do at least so many multiply-adds per element touched
PADDING_INTENSITY = 100
#: a column shorter than this is summed in one kernel, a longer one in parts, and those added up by a second
SPLIT_COLUMN = 1024
#: columns from which even the parts are too many for one more kernel
SPLIT_TWICE = 1 << 15
#: cost of special functions in units of one exponential per element; a random number takes many integer
#: rounds
_HEAVY = {
    "gelu": 1,
    "gelu_backward": 1,
    "erf": 1,
    "tanh": 1,
    "exp": 1,
    "silu": 1,
    "silu_backward": 1,
    "sigmoid": 1,
    "softplus": 1,
    "mish": 1,
}
RANDOM = 6
#: the caching allocator's unit
ALLOCATION_UNIT = 512

_LIBRARY = ("gemm", "conv", "attention", "rnn", "sort", "scan", "optimizer", "sync")


def fuse(workload: Workload) -> Workload:
    """The workload as torch.compile would run it: fewer kernels, fewer bytes, the same matrix work."""
    if workload.options.get("compiled"):
        raise SpecError(f"{workload.name}: already fused; capture it again for the eager step")
    lowered = _Lowering(workload)
    saved = _Saved(lowered)
    fused = [
        [*segment.ops]
        if segment.phase == Phase.OPTIMIZER
        else _schedule(_inline(nodes, lowered, saved), saved.outside)
        for segment, nodes in zip(workload.segments, lowered.nodes, strict=True)
    ]
    fused = _with_reuse(fused)
    memory = _memory_change(workload, [list(s.ops) for s in workload.segments], fused)
    segments = tuple(
        replace(segment, ops=tuple(ops), net=net, peak=peak, calls=len(ops), modules=0)
        if segment.phase != Phase.OPTIMIZER
        else segment
        for segment, ops, (net, peak) in zip(workload.segments, fused, memory, strict=True)
    )
    return replace(workload, segments=segments, options={**workload.options, "compiled": True})


# -- 1. lower -------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Node:
    """A piece of work over `rows` x `columns` elements; `form` is pointwise, row, column or library."""

    op: Op
    segment: int
    form: str
    rows: int
    columns: int
    reads: dict[Key, int]
    writes: dict[Key, int]
    #: special functions by the node that calls for them: inlined twice, they still run once per kernel
    heavy: dict[int, float]
    launches: int = 1
    #: results must be stored: written in part, or by atomic adds
    stored: bool = False
    #: cannot be computed a second time
    random: bool = False
    #: takes its operands from memory: another shape of the loop, or a library kernel
    direct: bool = False
    names: list[str] = field(default_factory=list)

    @property
    def elements(self) -> int:
        return self.rows * self.columns


class _Lowering:
    """All segments as nodes, with who makes and who reads each tensor."""

    def __init__(self, workload: Workload) -> None:
        self.phases = [segment.phase for segment in workload.segments]
        self.size: dict[int, int] = defaultdict(int)  # storage -> most bytes seen
        self._version: dict[int, int] = defaultdict(int)
        self._count = itertools.count()
        self._fresh = itertools.count(
            1
            + max(
                (a.tensor for s in workload.segments for o in s.ops for a in (*o.reads, *o.writes)), default=0
            )
        )
        for access in (a for s in workload.segments for o in s.ops for a in (*o.reads, *o.writes)):
            self.size[access.tensor] = max(self.size[access.tensor], access.bytes)
        self.nodes: list[list[_Node]] = [
            list(self._segment(i, s)) if s.phase != Phase.OPTIMIZER else []
            for i, s in enumerate(workload.segments)
        ]
        self.maker: dict[Key, _Node] = {
            key: node for nodes in self.nodes for node in nodes for key in node.writes
        }
        self.readers: dict[Key, list[_Node]] = defaultdict(list)
        for node in (n for nodes in self.nodes for n in nodes):
            for key in node.reads:
                self.readers[key].append(node)

    def bytes(self, key: Key) -> int:
        return self.size[key[0]]

    def new(self, size: int) -> Access:
        """A tensor that the eager step does not have."""
        access = Access(next(self._fresh), size)
        self.size[access.tensor] = size
        return access

    def _node(
        self,
        segment: int,
        op: Op,
        form: str,
        rows: int,
        columns: int,
        reads: Iterable[Access],
        writes: Iterable[Access],
        *,
        heavy: float = 0.0,
        launches: int = 1,
        stored: bool = False,
        random: bool = False,
        direct: bool = False,
    ) -> _Node:
        taken: dict[Key, int] = defaultdict(int)
        for a in reads:
            key = (a.tensor, self._version[a.tensor])
            taken[key] = min(self.size[a.tensor], taken[key] + a.bytes)
        made: dict[Key, int] = {}
        for a in writes:
            if self._version[a.tensor] and a.bytes < self.size[a.tensor]:  # the rest of it stays as it was
                taken.setdefault((a.tensor, self._version[a.tensor]), 0)
                stored = True
            self._version[a.tensor] += 1
            made[a.tensor, self._version[a.tensor]] = a.bytes
        special = {next(self._count): heavy} if heavy else {}
        return _Node(
            op,
            segment,
            form,
            max(1, rows),
            max(1, columns),
            dict(taken),
            made,
            special,
            launches,
            stored,
            random,
            direct or form == "library",
            [op.name.split(".")[-1]],
        )

    def _segment(self, index: int, segment: Segment) -> Iterator[_Node]:
        ops = iter(segment.ops)
        following: Op | None = next(ops, None)
        while following is not None:
            op, following = following, next(ops, None)
            if (
                op.kind == "fill"
                and following is not None
                and following.name == op.name
                and following.kind != "fill"
            ):
                # zeros, then a part of them written: one pointwise expression, or a scatter
                part, following = following, next(ops, None)
                if part.kind == "scatter":
                    yield self._node(index, op, "library", op.dims[0], 1, (), op.writes)
                    target = Access(op.writes[0].tensor, part.reads[0].bytes)
                    yield self._node(
                        index,
                        part,
                        "pointwise",
                        part.dims[0],
                        1,
                        (*part.reads, target),
                        (target,),
                        stored=True,
                    )
                else:
                    yield self._node(index, op, "pointwise", op.dims[0], 1, part.reads, op.writes)
                continue
            yield from self._lower(index, op)

    def _lower(self, index: int, op: Op) -> Iterator[_Node]:
        kind, elements = op.kind, op.dims[0] if op.dims else 1
        if kind == "gemm":
            yield from self._product(index, op)
        elif kind in _LIBRARY:
            yield self._node(index, op, "library", elements, 1, op.reads, op.writes)
        elif kind == "copy" and op.reads and op.writes and op.reads[0].tensor == op.writes[0].tensor:
            return  # eager brings an operand into another layout; inductor writes it so in the first place
        elif kind == "gather" and op.writes:
            rows = [self.new(a.bytes) if a.tensor == op.writes[0].tensor else a for a in op.reads]
            yield self._node(index, op, "pointwise", elements, 1, rows, op.writes)
        elif kind == "reduce":
            yield self._reduction(index, op)
        elif kind == "batchnorm":
            yield from self._batch_norm(index, op)
        elif kind in ("norm", "softmax"):
            yield from self._row_norm(index, op)
        elif kind == "pool":
            yield self._pool(index, op)
        elif "random" in op.tags and len(op.writes) > 1:  # dropout: a mask, which is kept, and its product
            yield self._node(
                index, op, "pointwise", elements, 1, (), op.writes[1:], heavy=RANDOM * elements, random=True
            )
            yield self._node(index, op, "pointwise", elements, 1, (*op.reads, *op.writes[1:]), op.writes[:1])
        else:
            random = "random" in op.tags
            heavy = RANDOM if random else _HEAVY.get(op.name.split(".")[-1].rstrip("_"), 0)
            stored = kind == "scatter"
            yield self._node(
                index,
                op,
                "pointwise",
                elements,
                1,
                op.reads,
                op.writes,
                heavy=heavy * elements,
                random=random,
                stored=stored,
            )

    def _product(self, index: int, op: Op) -> Iterator[_Node]:
        """A product; where a side is ragged, its operands are first copied to a whole number of 16-byte
        words.
        """
        batch, m, n, k = op.dims
        unit = 16 // ITEMSIZE.get(op.dtype, 4)
        padded = pm, pn, pk = tuple(-(-side // unit) * unit for side in (m, n, k))
        aligned = op.dtype in ("fp32", "fp64") or padded == (m, n, k) or int(op.tags[1][5:]) >= unit
        if aligned or m * n * k < PADDING_INTENSITY * (m * k + k * n + m * n):
            yield self._node(index, op, "library", 1, 1, op.reads, op.writes)
            return
        operands = list(op.reads)
        for place, (whole, padded_elements) in enumerate(
            (((m, k) == (pm, pk), batch * pm * pk), ((k, n) == (pk, pn), batch * pk * pn))
        ):
            if not whole:
                source = operands[place]
                operands[place] = self.new(padded_elements * ITEMSIZE.get(op.dtype, 4))
                yield self._node(
                    index, op, "pointwise", padded_elements, 1, (source,), (operands[place],), direct=True
                )
        product = replace(
            op, dims=(batch, *padded), tags=(op.tags[0], f"align{unit}", *op.tags[2:]), reads=tuple(operands)
        )
        yield self._node(index, product, "library", 1, 1, operands, op.writes)

    def _reduction(self, index: int, op: Op) -> _Node:
        kept, reduced = op.dims
        if "inner" in op.tags and kept > 1:
            return self._node(index, op, "row", kept, reduced, op.reads, op.writes)
        return self._node(
            index, op, "column", kept, reduced, op.reads, op.writes, launches=1 + (reduced > SPLIT_COLUMN)
        )

    def _pool(self, index: int, op: Op) -> _Node:
        """A loop over windows; where the maximum was found takes one byte in place of eight.

        The gradient is handed its forward input, which is therefore saved, but does not read it.
        """
        elements, window = op.dims
        reads = op.reads[:1]
        if op.tags[0] == "backward":
            reads += tuple(replace(a, bytes=0) for a in op.reads[1:2])
            reads += tuple(replace(a, bytes=a.bytes // 8) for a in op.reads[2:])
        writes = tuple(replace(a, bytes=a.bytes // 8) if place else a for place, a in enumerate(op.writes))
        return self._node(
            index,
            op,
            "pointwise",
            elements,
            1,
            reads,
            writes,
            heavy=elements * window,
            stored=True,
            direct=True,
        )

    def _batch_norm(self, index: int, op: Op) -> Iterator[_Node]:
        """Sums over batch and points, then a pointwise pass."""
        points, channels = op.dims
        if op.tags[0] == "inference":
            yield self._node(index, op, "pointwise", points * channels, 1, op.reads, op.writes[:1])
            return
        long, very = points > SPLIT_COLUMN, points > SPLIT_TWICE
        if op.tags[0] == "forward":
            x, rest, sums = op.reads[:1], op.reads[1:], op.writes[1:] or (self.new(8 * channels),)
            launches = 1 + long + very
        else:  # two sums of one pass, each finished by itself
            x, rest, sums = op.reads[:2], op.reads[2:], op.writes[1:] or (self.new(8 * channels),)
            launches = 1 + 2 * long
        yield self._node(index, op, "column", channels, points, (*x, *rest), sums, launches=launches)
        yield self._node(index, op, "pointwise", points * channels, 1, (*x, *rest, *sums), op.writes[:1])

    def _row_norm(self, index: int, op: Op) -> Iterator[_Node]:
        """Statistics of each row, then a pointwise pass over it; a norm's weights get their gradient by
        columns.
        """
        rows, columns = op.dims
        forward = op.tags[0] == "forward"
        softmax, logarithmic = op.kind == "softmax", "log" in op.name
        reads = op.reads[:5]  # the gradient of a layer norm is handed the bias, but has no use for it
        statistics = op.writes[1:] if forward and op.writes[1:] else (self.new(8 * rows),)
        exponentials = rows * columns * softmax
        again = exponentials * (forward != logarithmic)
        yield self._node(index, op, "row", rows, columns, reads, statistics, heavy=exponentials * forward)
        yield self._node(
            index, op, "pointwise", rows * columns, 1, (*reads, *statistics), op.writes[:1], heavy=again
        )
        if not forward and op.writes[1:]:
            yield self._node(
                index,
                op,
                "column",
                columns,
                rows,
                reads[:4],
                op.writes[1:],
                launches=1 + (rows > SPLIT_COLUMN),
            )


# -- 2. keep or recompute -------------------------------------------------------------------------


class _Saved:
    """What the backward pass reads of the forward pass, and what it computes again instead."""

    def __init__(self, lowered: _Lowering) -> None:
        self._lowered = lowered
        self.again: dict[Key, tuple[dict[Key, int], dict[int, float]]] = {}
        #: read in another segment than the one that makes it, or in none at all
        self.outside: set[Key] = set()
        kept: set[Key] = set()
        cheap: list[Key] = []
        for key, maker in lowered.maker.items():
            readers = lowered.readers.get(key, [])
            later = [r for r in readers if r.segment != maker.segment]
            if not readers:
                self.outside.add(key)
            if not later:
                continue
            backward = (
                all(lowered.phases[r.segment] == Phase.BACKWARD for r in later)
                and lowered.phases[maker.segment] != Phase.BACKWARD
            )
            if backward and _repeatable(maker) and not any(r.direct for r in later):
                cheap.append(key)
            else:
                self.outside.add(key)
                kept.add(key)
        for key in cheap:
            sources, heavy = self._expand(key, kept)
            extra = [s for s in sources if s in lowered.maker and s not in kept]
            if not extra or sum(sources.values()) <= READING_MORE * lowered.bytes(key):
                self.again[key] = (sources, heavy)
                kept.update(extra)
                self.outside.update(extra)
            else:
                kept.add(key)
                self.outside.add(key)

    def _expand(self, key: Key, kept: set[Key]) -> tuple[dict[Key, int], dict[int, float]]:
        """The stored tensors from which one of the same segment follows by pointwise work."""
        maker = self._lowered.maker[key]
        sources: dict[Key, int] = {}
        heavy = dict(maker.heavy)
        for read, size in maker.reads.items():
            inner = self._lowered.maker.get(read)
            if read in kept or inner is None or inner.segment != maker.segment or not _repeatable(inner):
                sources[read] = max(size, sources.get(read, 0))
            else:
                more, cost = self._expand(read, kept)
                heavy |= cost
                for source, part in more.items():
                    sources[source] = max(part, sources.get(source, 0))
        return sources, heavy


def _repeatable(node: _Node) -> bool:
    return node.form == "pointwise" and not node.random and not node.stored


# -- 3. inline ------------------------------------------------------------------------------------


def _inline(nodes: Sequence[_Node], lowered: _Lowering, saved: _Saved) -> list[_Node]:
    """The nodes that store something, each reading only what is stored."""
    expressions: dict[Key, tuple[dict[Key, int], dict[int, float], list[str]]] = {}
    out: list[_Node] = []
    for node in nodes:
        if node.form == "library":
            out.append(node)
            continue
        reads: dict[Key, int] = {}
        heavy, names = dict(node.heavy), list[str]()
        for key, size in node.reads.items():
            found: Mapping[Key, int] = {key: size}
            if key in expressions:
                found, more, inner = expressions[key]
                heavy, names = heavy | more, names + inner
            elif key in saved.again and lowered.maker[key].segment != node.segment:
                found, more = saved.again[key]
                heavy |= more
            for source, part in found.items():
                reads[source] = max(part, reads.get(source, 0))
        node.reads, node.heavy, node.names = reads, heavy, [*dict.fromkeys((*names, *node.names))]
        for key in list(node.writes):
            users = [r for r in lowered.readers.get(key, ()) if r.segment == node.segment]
            needed = (
                key in saved.outside
                or node.stored
                or node.random
                or node.form != "pointwise"
                or any(u.direct for u in users)
            )
            if not needed and len(reads) <= (READS_ANY if len(users) == 1 else READS_SHARED):
                expressions[key] = (reads, heavy, node.names)
                del node.writes[key]
        # else dead code
        if node.writes and (
            reads or node.random or node.stored or any(key in lowered.readers for key in node.writes)
        ):
            out.append(node)
    return out


# -- 4. schedule ----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Kernel:
    """Nodes that run as one kernel."""

    nodes: list[_Node]
    form: str
    rows: int
    columns: int
    first: int
    last: int
    #: kernels it waits for, as they were numbered when made
    after: set[int]

    @property
    def elements(self) -> int:
        return self.rows * self.columns


class _Schedule:
    def __init__(self) -> None:
        self.kernels: list[_Kernel] = []
        self._merged: list[int] = []

    def find(self, number: int) -> int:
        while self._merged[number] != number:
            number = self._merged[number]
        return number

    def add(self, node: _Node, after: set[int]) -> int:
        number = len(self.kernels)
        self.kernels.append(_Kernel([node], node.form, node.rows, node.columns, number, number, after))
        self._merged.append(number)
        return number

    def merge(self, a: int, b: int) -> int:
        """Make one kernel of two where their loops match and no third kernel has to run between them."""
        one, two = self.kernels[a], self.kernels[b]
        if not _alike(one, two) or self._between(a, b) or self._between(b, a):
            return b
        lead = one if one.form != "pointwise" else two
        joined = _Kernel(
            one.nodes + two.nodes,
            lead.form,
            lead.rows,
            lead.columns,
            min(one.first, two.first),
            max(one.last, two.last),
            one.after | two.after,
        )
        self.kernels[b] = joined
        self._merged[a] = b
        return b

    def _between(self, early: int, late: int) -> bool:
        """Whether some third kernel needs `early` and is needed by `late`."""
        start = self.kernels[early].first
        waiting = [n for n in map(self.find, self.kernels[late].after) if n not in (early, late)]
        seen = set(waiting)
        while waiting:
            number = waiting.pop()
            for before in map(self.find, self.kernels[number].after):
                if before == early:
                    return True
                if before not in seen and before != number and self.kernels[before].last >= start:
                    seen.add(before)
                    waiting.append(before)
        return False

    def ordered(self) -> Iterator[_Kernel]:
        """The kernels, each behind those it waits for, otherwise as early as their first node."""
        alive = [n for n in range(len(self.kernels)) if self._merged[n] == n]
        before = {n: {self.find(m) for m in self.kernels[n].after} - {n} for n in alive}
        after: dict[int, list[int]] = defaultdict(list)
        for n, others in before.items():
            for m in others:
                after[m].append(n)
        ready = [(self.kernels[n].last, n) for n in alive if not before[n]]
        heapq.heapify(ready)
        while ready:
            _, n = heapq.heappop(ready)
            yield self.kernels[n]
            for m in after[n]:
                before[m].discard(n)
                if not before[m]:
                    heapq.heappush(ready, (self.kernels[m].last, m))


def _alike(one: _Kernel, two: _Kernel) -> bool:
    """Whether one loop can do both: over the same elements, or over one number per row (per column) of the
    other.
    """
    forms = {one.form, two.form}
    if "library" in forms:
        return False
    if "column" in forms:
        if one.form == two.form:
            return (one.rows, one.columns) == (two.rows, two.columns)
        column, other = (one, two) if one.form == "column" else (two, one)
        return other.form == "pointwise" and other.elements == column.rows
    if one.form == two.form == "row":
        return (one.rows, one.columns) == (two.rows, two.columns)
    if "row" in forms:
        row, other = (one, two) if one.form == "row" else (two, one)
        return other.elements in (row.elements, row.rows)
    return one.elements == two.elements


def _schedule(nodes: Sequence[_Node], outside: set[Key]) -> list[Op]:
    """Kernels of one segment as operators."""
    schedule = _Schedule()
    made: dict[Key, int] = {}
    read_by: dict[Key, list[int]] = defaultdict(list)
    last_read: dict[int, set[int]] = defaultdict(set)
    for node in nodes:
        # behind the makers of what it reads, and behind the readers of a storage that it writes over
        makers = {made[key] for key in node.reads if key in made}
        number = schedule.add(node, makers | {r for key in node.writes for r in last_read[key[0]]})
        if node.form != "library":
            sharing = (
                n
                for key in node.reads
                if node.form != "pointwise" or node.reads[key] >= node.elements
                for n in read_by[key]
            )
            for other in dict.fromkeys((*sorted(makers, reverse=True), *sharing)):
                if (other := schedule.find(other)) != number:
                    number = schedule.merge(other, number)
        for key in node.reads:
            read_by[key].append(number)
            last_read[key[0]].add(number)
        for key in node.writes:
            made[key] = number
    readers: dict[Key, list[_Node]] = defaultdict(list)
    for node in nodes:
        for key in node.reads:
            readers[key].append(node)
    return [_emit(kernel, readers, outside) for kernel in schedule.ordered()]


def _emit(kernel: _Kernel, readers: Mapping[Key, Sequence[_Node]], outside: set[Key]) -> Op:
    lead = max(kernel.nodes, key=lambda n: n.elements)
    if kernel.form == "library":
        return lead.op
    inside = set(kernel.nodes)
    made = {key for node in kernel.nodes for key in node.writes}
    reads: dict[int, int] = defaultdict(int)
    for node in kernel.nodes:
        for key, size in node.reads.items():
            if key not in made:
                reads[key[0]] = max(reads[key[0]], size)
    writes: dict[int, int] = defaultdict(int)
    for node in kernel.nodes:
        for key, size in node.writes.items():
            if key in outside or node.stored or not inside.issuperset(readers.get(key, ())):
                writes[key[0]] = max(writes[key[0]], size)
    names = dict.fromkeys(name for node in kernel.nodes for name in node.names)
    heavy: dict[int, float] = {}
    for node in kernel.nodes:
        heavy |= node.heavy
    launches = 1 + sum(node.launches - 1 for node in kernel.nodes)
    return Op(
        "fused." + "_".join(names),
        "fused",
        lead.op.phase,
        lead.op.module,
        lead.op.dtype,
        0.0,
        tuple(Access(t, b) for t, b in reads.items() if b),
        tuple(Access(t, b) for t, b in writes.items() if b),
        (kernel.elements, kernel.rows, int(sum(heavy.values())), launches),
        (kernel.form,),
    )


def _with_reuse(segments: Sequence[Sequence[Op]]) -> list[list[Op]]:
    """How many bytes lie between uses of a tensor, counted anew: fewer kernels touch less."""
    traffic = 0
    last: dict[int, int] = {}

    def seen(accesses: Iterable[Access]) -> tuple[Access, ...]:
        return tuple(replace(a, reuse=traffic - last[a.tensor] if a.tensor in last else -1) for a in accesses)

    out = []
    for ops in segments:
        done = []
        for op in ops:
            op = replace(op, reads=seen(op.reads), writes=seen(op.writes))
            traffic += op.bytes_read + op.bytes_written
            last.update({a.tensor: traffic for a in (*op.reads, *op.writes)})
            done.append(op)
        out.append(done)
    return out


# -- memory ---------------------------------------------------------------------------------------


def _memory_change(
    workload: Workload, eager: Sequence[Sequence[Op]], fused: Sequence[Sequence[Op]]
) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Net and peak of each segment: as captured, plus what lifetimes by first write and last use say has
    changed.
    """
    out = []
    for segment, before, after in zip(
        workload.segments, _lifetimes(workload, eager), _lifetimes(workload, fused), strict=True
    ):
        changed = []
        for captured, old, new in zip((segment.net, segment.peak), before, after, strict=True):
            total = {
                kind: captured.get(kind, 0) + new.get(kind, 0) - old.get(kind, 0)
                for kind in {*captured, *old, *new}
            }
            changed.append({kind: size for kind, size in total.items() if size})
        out.append((changed[0], changed[1]))
    return out


def _lifetimes(
    workload: Workload, segments: Sequence[Sequence[Op]]
) -> list[tuple[dict[str, int], dict[str, int]]]:
    """(net, peak) of activations and temporaries per segment, if each storage lived from first write to last
    use.
    """
    size: dict[int, int] = defaultdict(int)
    born: dict[int, int] = {}
    dies: dict[int, tuple[int, int]] = {}
    for i, ops in enumerate(segments):
        for j, op in enumerate(ops):
            for a in op.writes:
                born.setdefault(a.tensor, i)
            for a in (*op.reads, *op.writes):
                size[a.tensor] = max(size[a.tensor], a.bytes)
                dies[a.tensor] = (i, j)
    phases = [s.phase for s in workload.segments]
    kind = {
        t: "activations" if phases[i] != Phase.BACKWARD and phases[dies[t][0]] == "backward" else "temporary"
        for t, i in born.items()
    }
    ending: dict[tuple[int, int], list[int]] = defaultdict(list)
    read = {a.tensor for ops in segments for op in ops for a in op.reads}
    for t, when in dies.items():
        if t in born and t in read:  # what nobody reads is a result
            ending[when].append(t)

    def allocated(t: int) -> int:
        return -(-size[t] // ALLOCATION_UNIT) * ALLOCATION_UNIT

    out = []
    there: set[int] = set()
    for i, ops in enumerate(segments):
        live: dict[str, int] = defaultdict(int)
        best, peak = 0, {}
        for j, op in enumerate(ops):
            new = {a.tensor for a in op.writes} - there
            there |= new
            sizes = {size[t] for t in new} if op.kind == "fused" else set()
            for t in new:
                live[kind[t]] += allocated(t)
            # a fused kernel writes its result over an input of the same size that nobody needs any more
            over = [t for t in ending[i, j] if size[t] in sizes and t not in new]
            for t in over:
                live[kind[t]] -= allocated(t)
            if sum(live.values()) > best:
                best, peak = sum(live.values()), dict(live)
            for t in ending[i, j]:
                live[kind[t]] -= allocated(t) if t not in over else 0
        out.append((dict(live), dict(peak)))
    return out
