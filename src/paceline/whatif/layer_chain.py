"""A captured network as a chain of layers, as forms of parallelism cut it: by samples, by output features, or
between layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.spec.device import Device
from paceline.spec.workload import Access, Op, Workload
from paceline.whatif.critical_path import CostedOp

BACKWARD = ("backward", "recompute")
#: products whose ranks exchange inputs and outputs when they are cut; attention, cut by heads, sends nothing
SPLIT = ("gemm", "conv", "rnn")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainedLayer:
    """A module of the network in the order of the forward pass, as forms of parallelism cut it."""

    name: str
    ops: tuple[Op, ...]
    #: output features, channels, heads or hidden values: the ranks among which it can be cut; None where it
    #: has no product, and is cut as what is before it
    width: int | None
    #: bytes of the whole batch that its products with weights read and write in the forward pass
    input_bytes: float
    output_bytes: float
    #: bytes of activations that the layers before it hand on to it and to those behind it
    cut_bytes: float

    @property
    def flops(self) -> float:
        """Floating-point operations of both passes."""
        return sum(op.flops for op in self.ops)

    def seconds(self, device: Device) -> float:
        """Both passes at the device's peaks: of each operator, the longer of arithmetic and traffic."""
        return sum(_roofline_s(op, device) for op in self.ops)


def _roofline_s(op: Op, device: Device) -> float:
    """Seconds of an operator at the peaks of a device."""
    moved = (op.bytes_read + op.bytes_written) / device.memory_bandwidth_Bps
    return max(op.flops / device.peak(op.dtype), moved)


def chain_of_layers(every: Sequence[CostedOp]) -> Iterator[ChainedLayer]:
    """The modules of the forward pass in order; what runs outside of modules goes with what is before it."""
    forward = [node.op for node in every if node.op.phase == "forward"]
    ahead: dict[str, list[Op]] = {}
    first_place: dict[str, int] = {}
    current = ""
    for place, op in enumerate(forward):
        current = op.module or current
        ahead.setdefault(current, []).append(op)
        first_place.setdefault(current, place)
    behind: dict[str, list[Op]] = defaultdict(list)
    for node in every:
        if node.op.phase in BACKWARD:
            name = node.op.module if node.op.module in ahead else next(iter(ahead), "")
            behind[name].append(node.op)
    crossing = _crossing(forward)
    for name, ops in ahead.items():
        yield _layer(name, ops, behind[name], crossing[first_place[name]])


def _layer(name: str, ahead: Sequence[Op], behind: Sequence[Op], cut_bytes: float) -> ChainedLayer:
    products = [op for op in ahead if _width(op)]
    sending = [op for op in products if op.kind in SPLIT]
    return ChainedLayer(
        name=name,
        ops=(*ahead, *behind),
        width=min((_width(op) for op in products), default=None),
        input_bytes=sum(_first(op.reads) for op in sending),
        output_bytes=sum(_first(op.writes) for op in sending),
        cut_bytes=cut_bytes,
    )


def _width(op: Op) -> int:
    """Ranks among which a product can be cut by its output; 0 of other operators."""
    places = {"gemm": 2, "conv": 2, "attention": 1, "rnn": 4}
    return op.dims[places[op.kind]] if op.kind in places else 0


def _first(accesses: Sequence[Access]) -> float:
    """Bytes of a product's first operand, which are its inputs, or of its first result."""
    return float(accesses[0].bytes) if accesses else 0.0


def _crossing(forward: Sequence[Op]) -> list[float]:
    """Bytes alive across each place of the forward pass: written before it, read at it or later."""
    written: dict[int, tuple[int, int]] = {}
    last: dict[int, int] = {}
    for place, op in enumerate(forward):
        for tensor in op.sources:
            last[tensor] = place
        for access in op.writes:
            written.setdefault(access.tensor, (place, access.bytes))
    change = [0.0] * (len(forward) + 2)
    for tensor, (place, size) in written.items():
        end = last.get(tensor, -1)
        if end > place:
            change[place + 1] += size
            change[end + 1] -= size
    alive, total = [], 0.0
    for step in change[: len(forward)]:
        total += step
        alive.append(total)
    return alive


def gradient_bytes(workload: Workload) -> float:
    """Bytes of all gradients."""
    return float(sum(parameter.bytes for parameter in workload.parameters if parameter.ready >= 0))
