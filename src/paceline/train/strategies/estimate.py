"""How long a step takes under each strategy, from a profile of the model and a probe of the machine: the
model behind `auto`.

One link per rank, which carries one message after another; one thread that computes the passes and one that
encodes, sums and updates (both on one core where a rank has no more). Bytes are those that strategies count
themselves; see each strategy's file.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.cost import compression as cost
from paceline.errors import SpecError
from paceline.sim.program import buckets
from paceline.spec.compression import DGC, SCHEMES, BFloat16, Exchange, Float16, Float32, Scheme, parse
from paceline.spec.defaults import DEFAULTS, PLAIN
from paceline.spec.vocabulary import ALIASES, Mode
from paceline.train.comm import IN_FLIGHT
from paceline.train.layout import piece_bytes
from paceline.train.profile import Layer, Profile, order_of
from paceline.train.strategies.averaging import BUCKET_BYTES, FIRST_BYTES, counted
from paceline.train.strategies.factors import Shape
from paceline.train.strategies.probe import Machine
from paceline.train.transport import small


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Seconds that encoding and decoding take by name of the scheme, per gradient element and per call; per
    element, of a copy (float32).
    """

    encode_s: Mapping[str, float] = field(default_factory=dict)
    decode_s: Mapping[str, float] = field(default_factory=dict)
    encode_call_s: Mapping[str, float] = field(default_factory=dict)
    decode_call_s: Mapping[str, float] = field(default_factory=dict)
    copy_s: float = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where a step runs."""

    machine: Machine
    world: int
    rates: Rates = Rates()
    #: cores of one rank, and how many of them an encoder takes
    cores: int = 1
    threads: int = 1

    @property
    def turn_s(self) -> float:
        """Seconds that a message costs the passes: threads that send it hold the interpreter for about as
        long as it takes on a bare link.
        """
        return self.machine.latency_s

    @property
    def gap_s(self) -> float:
        """Seconds that a message keeps the link besides its bytes: several are in flight, so that their
        latencies overlap.
        """
        return self.machine.latency_s / IN_FLIGHT

    def reply_s(self, op: str, size: float) -> float:
        """Seconds after its last byte until a message of this kind and size has come.

        Reductions go round the ring unless they are small.
        """
        if op == "gather" or small(size, self.world):
            return self.machine.latency_s
        measured = self.machine.reduce_latency_s
        return 2 * (self.world - 1) * self.machine.latency_s if measured is None else measured

    def wire_s(self, scheme: Scheme, layer: Layer) -> float:
        """Of a layer's messages, on a link that carries nothing else."""
        machine = self.machine
        rate = {
            "exchange": machine.link_Bps,
            "sum": machine.reduce_Bps,
            "half": machine.half_Bps or machine.reduce_Bps,
        }[_carried(scheme)]
        return cost.sent_bytes(scheme, layer.shape, self.world) / rate

    def carry_s(self, op: str, size: float, messages: float = 1) -> float:
        """Processor time of a rank that sends so many bytes in so many messages, besides what delays the
        passes anyway.
        """
        return max(0.0, self.machine.message_s - self.turn_s) * messages + size * self.machine.byte_s.get(
            op, 0.0
        )

    def copy_s(self, size: float) -> float:
        """Of a copy, or one pass over two operands, of so many bytes of float32."""
        return size / 4 * self.rates.copy_s


def _carried(scheme: Scheme) -> str:
    """What is done with a layer's messages on their way, as `Machine` has it."""
    if isinstance(scheme, (Float16, BFloat16)):
        return "half"
    return "sum" if scheme.collective == "all_reduce" else "exchange"


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Gradients that travel together: when they are ready, and what follows: work, messages, work, in turns;
    seconds until each message's reply.
    """

    ready_s: float
    phases: tuple[float, ...]
    replies: tuple[float, ...]


def averaging_s(profile: Profile, at: Setting, scheme: Callable[[Layer], Scheme]) -> float:
    """Seconds of a step whose gradients are averaged, plainly or compressed, during the backward pass, and
    complete before the update.
    """
    ordered = order_of(profile.layers)
    waiting: list[_Bucket] = []
    turns = carried = 0.0
    sizes = [counted(layer.bytes, scheme(layer), layer.shape, at.cores == 1) for layer in ordered]
    for members in buckets(sizes, BUCKET_BYTES, FIRST_BYTES):
        chosen = [(scheme(ordered[i]), ordered[i]) for i in members]
        encode = sum(
            _work(one, layer, at, at.rates.encode_s, at.rates.encode_call_s) for one, layer in chosen
        )
        decode = sum(
            _work(one, layer, at, at.rates.decode_s, at.rates.decode_call_s) for one, layer in chosen
        )
        asked = [cost.exchanges(one, layer.shape) for one, layer in chosen]
        stages = max(map(len, asked))
        # of the same stage, all are sent at once; what goes as it is with the first
        replies = tuple(
            _reply_s([sent[stage] for sent in asked if stage < len(sent)], at) for stage in range(stages)
        )
        wire = sum(at.wire_s(one, layer) for one, layer in chosen)
        # what is agreed on first is small, and the encoder waits for it
        agreed = (encode / 2, 0.0) * (stages - 1)
        turns += stages * at.turn_s
        carried += at.carry_s("exchange", 0.0, stages)
        carried += sum(
            at.carry_s(_carried(one), cost.sent_bytes(one, layer.shape, at.world), 0) for one, layer in chosen
        )
        waiting.append(
            _Bucket(
                turns + max(layer.ready_s for _, layer in chosen),
                (*agreed, encode / 2 if agreed else encode, wire, decode),
                replies,
            )
        )
    backward = profile.backward_s + turns
    # all cores together have the passes, the encoders and the messages to do
    shared = (backward + carried + at.threads * sum(sum(bucket.phases[::2]) for bucket in waiting)) / at.cores
    end = max(backward, shared, _flow(waiting, at))
    taken = profile.momentum and any(
        isinstance(one := scheme(layer), DGC) and one.momentum for layer in profile.layers
    )
    # without momentum, the update is one addition: two operands read, one written
    return (
        profile.forward_s
        + end
        + (min(profile.update_s, at.copy_s(1.5 * profile.bytes)) if taken else profile.update_s)
    )


def _reply_s(sent: Sequence[Exchange], at: Setting) -> float:
    """Of messages that are sent together, each kind as one."""
    return max(
        at.reply_s(op, sum(one.bytes for one in sent if one.op == op)) for op in {one.op for one in sent}
    )


def ddp_s(profile: Profile, at: Setting) -> float:
    """Seconds of a step of torch's DistributedDataParallel: the thread of the backward pass copies into
    buckets, and out of them at the end.
    """
    ordered = order_of(profile.layers)
    pace = 1 + at.copy_s(profile.bytes) / profile.backward_s
    sent = 2 * (at.world - 1) / at.world / (at.machine.whole_Bps or at.machine.reduce_Bps)
    waiting = []
    for members in buckets([layer.bytes for layer in ordered], DDP_BUCKET_BYTES, DDP_FIRST_BYTES):
        size = sum(ordered[i].bytes for i in members)
        waiting.append(
            _Bucket(
                pace * max(ordered[i].ready_s for i in members),
                (0.0, sent * size),
                (at.reply_s("sum", size),),
            )
        )
    return (
        profile.forward_s
        + max(pace * profile.backward_s, _flow(waiting, at))
        + at.copy_s(profile.bytes)
        + profile.update_s
    )


class _Link:
    """Carries one message after another; after a pause, a burst goes through at once."""

    def __init__(self, at: Setting) -> None:
        self._burst_s, self._gap_s = at.machine.burst_bytes / at.machine.link_Bps, at.gap_s
        self._busy_s = -math.inf

    def send(self, when: float, seconds: float) -> float:
        """When a message is through that is sent at that moment, and takes so long without a burst."""
        self._busy_s = max(self._busy_s, when - self._burst_s) + seconds + self._gap_s
        return max(self._busy_s, when)


def _flow(waiting: Sequence[_Bucket], at: Setting) -> float:
    """When all are through, with one thread for work and one link, each serving who comes first."""
    worker, link = 0.0, _Link(at)
    events = [(bucket.ready_s, number, 0) for number, bucket in enumerate(waiting)]
    end = 0.0
    while events:
        when, number, phase = heapq.heappop(events)
        phases = waiting[number].phases
        if phase == len(phases):
            end = max(end, when)
            continue
        if phase % 2:
            then = link.send(when, phases[phase]) + waiting[number].replies[phase // 2]
        else:
            then = worker = max(when, worker) + phases[phase]
        heapq.heappush(events, (then, number, phase + 1))
    return end


def _work(
    scheme: Scheme, layer: Layer, at: Setting, each: Mapping[str, float], call: Mapping[str, float]
) -> float:
    if isinstance(scheme, Float32):
        return at.copy_s(layer.bytes)
    return layer.bytes / 4 * each.get(scheme.name, 0.0) + call.get(scheme.name, 0.0)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A part of the overlapped strategies: seconds of both exchanges on the link, of sum and update, and of
    processor time for them all; when it is ready and needed."""

    ready_s: float
    need_s: float
    out_s: float
    sum_s: float
    update_s: float
    back_s: float
    carry_s: float = 0.0


def overlap_s(profile: Profile, at: Setting, *, shares: bool = True, factors: bool = True) -> float:
    """Seconds of a step of `overlap` (or, without `shares`, `priority`) once steps follow one another."""
    parts, spent = _parts(profile, at, shares, factors)
    backward = max(profile.backward_s / 2, profile.backward_s + spent) + len(parts) * at.turn_s
    turns = sum(part.back_s > 0 for part in parts) * at.turn_s
    pace = backward / profile.backward_s
    by_need = sorted(parts, key=lambda part: part.need_s)
    in_order = sorted(parts, key=lambda part: part.ready_s)
    if not shares:
        in_order = _urgent_first(in_order, at)
    here = dict.fromkeys(map(id, parts), 0.0)  # when each part's parameters are here
    begin = begun = 0.0
    link = _Link(at)
    for _ in range(3):
        begun, begin = begin, max(begin, 0.0)
        now, done = begin, 0.0
        for part in by_need:  # the forward pass waits where a parameter is not here yet
            now = max(now + part.need_s - done, here[id(part)])
            done = part.need_s
        middle = now + profile.forward_s - done + turns
        worker = 0.0
        summed: dict[int, float] = {}
        for part in in_order:
            worker = (
                max(worker, link.send(middle + pace * part.ready_s, part.out_s) + at.machine.latency_s)
                + part.sum_s
            )
            summed[id(part)] = worker
        end = worker = middle + backward
        for part in by_need:  # updates go in this order; those whose sums are still to come hold up the rest
            worker = max(worker, summed[id(part)]) + part.update_s
            if part.back_s:
                here[id(part)] = link.send(worker, part.back_s) + at.machine.latency_s
            else:
                here[id(part)] = worker
        begin = end
    work = sum(part.sum_s + part.update_s + part.carry_s for part in parts)
    return max(begin - begun, profile.forward_s + turns + backward + work if at.cores < 2 else 0.0)


def _urgent_first(by_ready: Sequence[_Sent], at: Setting) -> list[_Sent]:
    """As `Priority` has it: whenever the link is free, of the parts that are ready the one needed first."""
    waiting, order = list(by_ready), list[_Sent]()
    now = 0.0
    while waiting:
        now = max(now, waiting[0].ready_s)
        part = min((part for part in waiting if part.ready_s <= now), key=lambda part: part.need_s)
        waiting.remove(part)
        order.append(part)
        now += at.machine.latency_s + part.out_s
    return order


def _parts(profile: Profile, at: Setting, shares: bool, factors: bool) -> tuple[list[_Sent], float]:
    """What travels, and the seconds that the backward pass takes more (or less) for it: copies into flat
    memory, products left to others.
    """
    link, update, spent = at.machine.link_Bps, profile.update_s / max(1, profile.bytes), 0.0
    least, _ = piece_bytes(link, at.world)
    out: list[_Sent] = []
    small: list[Layer] = []
    for layer in sorted(profile.layers, key=lambda layer: layer.need_s):
        mode = _mode(layer, at) if factors and shares else "gradient"
        if mode != "gradient":
            shape = Shape(n_in=layer.shape[1], n_out=layer.shape[0], rows=layer.rows)
            back = (at.world - 1) / at.world * layer.bytes if mode == "rows" else 0.0
            share = 1.0 if mode == "factors" else 1 / at.world
            # a product of few rows is a pass over the weight
            product = max(
                2.0 * shape.rows * shape.n_in * shape.n_out / at.machine.flops, at.copy_s(layer.bytes)
            )
            whole = max(product * at.world * share, at.copy_s(layer.bytes) * share)
            spent -= product
            sent = shape.sent_bytes(mode, at.world)
            out.append(
                _Sent(
                    layer.ready_s,
                    layer.need_s,
                    (sent - back) / link,
                    whole,
                    update * layer.bytes * share,
                    back / link,
                    at.carry_s("exchange", sent, 1 + (back > 0)),
                )
            )
            continue
        spent += at.copy_s(layer.bytes)
        small.append(layer)
        if sum(one.bytes for one in small) >= least:
            out += _pieces(small, at, shares, update)
            small = []
    return out + _pieces(small, at, shares, update), spent


def _pieces(layers: Sequence[Layer], at: Setting, shares: bool, update: float) -> list[_Sent]:
    """Small neighbours as one message, a large one as several."""
    if not layers:
        return []
    total = sum(layer.bytes for layer in layers)
    count = max(1, round(total / piece_bytes(at.machine.link_Bps, at.world)[1]))
    size = total / count
    way = (at.world - 1) / at.world * size
    share = 1 / at.world if shares else 1.0
    one = _Sent(
        max(layer.ready_s for layer in layers),
        min(layer.need_s for layer in layers),
        way / at.machine.link_Bps if shares else 2 * way / at.machine.reduce_Bps,
        at.copy_s(size) if shares else at.copy_s(size) / 2,
        update * size * share,
        way / at.machine.link_Bps if shares else 0.0,
        at.carry_s("exchange" if shares else "sum", 2 * way, 2 if shares else 1),
    )
    return [replace(one) for _ in range(count)]


def _mode(layer: Layer, at: Setting) -> str:
    if len(layer.shape) != 2 or not layer.rows:
        return "gradient"
    return Shape(n_in=layer.shape[1], n_out=layer.shape[0], rows=layer.rows).choose(
        at.world, at.machine.link_Bps, at.machine.flops
    )


def step_s(strategy: str, profile: Profile, at: Setting) -> float:
    """Seconds of a step under a strategy of this name; `none` does not communicate, `auto` takes what is
    fastest.
    """
    name = ALIASES.get(kind := strategy.partition(":")[0], kind)
    if at.world == 1 or name == "none":
        return profile.compute_s
    if name == "ddp":
        return ddp_s(profile, at)
    if name == "allreduce":
        return averaging_s(profile, at, lambda _: FLOAT32)
    if name in ("overlap", "priority"):
        return overlap_s(profile, at, shares=name == "overlap", factors="fc=gradient" not in strategy)
    if name in SCHEMES:
        chosen = cost.assign(parse(strategy), [(layer.name, layer.shape) for layer in profile.layers])
        return averaging_s(profile, at, lambda layer: chosen[layer.name])
    if name in PERIODS:
        once = 2 * (at.world - 1) / at.world * profile.bytes / at.machine.link_Bps + at.machine.latency_s
        return profile.compute_s + once / PERIODS[name]
    if name == "auto":
        return min(step_s(candidate, profile, at) for candidate in (*EXACT, *allowed(strategy)))
    raise SpecError(f"no model of strategy {strategy!r}")


def allowed(strategy: str) -> tuple[str, ...]:
    """Schemes of compression that `auto` may take, given with its options in words: `auto:loss=some`."""
    words = (part.strip().partition("=") for part in strategy.partition(":")[2].split(","))
    options = {name: value for name, _, value in words}
    return LOSSES.get(options.get("loss", NO_LOSS), ())


#: what `auto` may lose, and the compression that this allows
LOSSES: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "rounding": ("bf16", "fp16"),
    "some": ("bf16", "fp16", "terngrad", "dgc"),
}
NO_LOSS = "none"
#: what `auto` chooses from in any case
EXACT = ("allreduce", "overlap", "priority")
#: buckets of torch's DDP, as plans have them by default
DDP_BUCKET_BYTES, DDP_FIRST_BYTES = PLAIN.bucket_bytes, PLAIN.first_bucket_bytes
#: steps between two averages, as the strategies have them by default
PERIODS: Mapping[str, int] = {
    "local-sgd": DEFAULTS[Mode.LOCAL_SGD].period,
    "post-local": DEFAULTS[Mode.LOCAL_SGD].period,
    "diloco": DEFAULTS[Mode.DILOCO].period,
}
FLOAT32 = Float32()
