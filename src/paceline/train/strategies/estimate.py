"""How long a step takes under each strategy, from a profile of the model and a probe of the machine: the
model behind `auto`.

Each strategy is described by what it sends: messages, with what is done before and after each, when they are
ready, and who waits for them. One program for the event engine is made of any such description. A rank has
one link, which carries one message after another, and threads beside the passes that encode, sum and update.
Bytes are those that strategies count themselves; see each strategy's file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np

from paceline.cost import compression as cost
from paceline.errors import SpecError
from paceline.sim.engine import run
from paceline.sim.program import COMPUTE, Builder, Label, buckets
from paceline.spec.compression import DGC, SCHEMES, BFloat16, Exchange, Float16, Float32, Scheme, parse
from paceline.spec.defaults import DEFAULTS, PLAIN
from paceline.spec.vocabulary import ALIASES, Mode
from paceline.sync.factors import LinearShape
from paceline.train.comm import IN_FLIGHT
from paceline.train.layout import piece_bytes
from paceline.train.probe import Machine, Rates
from paceline.train.profile import Layer, Profile, order_of
from paceline.train.strategies.averaging import BUCKET_BYTES, FIRST_BYTES, counted
from paceline.train.strategies.priority import urgent_first
from paceline.train.transport import small

#: schemes by the name of a parameter; gradients with theirs
Schemes = Mapping[str, Scheme]
Coded = Sequence[tuple[Layer, Scheme]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where a step runs."""

    machine: Machine
    world: int
    rates: Rates = field(default_factory=Rates)
    #: cores of one rank, and how many of them an encoder takes
    cores: int = 1
    threads: int = 1

    @property
    def share(self) -> float:
        """Of a tensor, what a rank sends to the others where each gets its part."""
        return (self.world - 1) / self.world

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

    @property
    def ahead_s(self) -> float:
        """After a pause, a burst goes through a link at once: as if it carried all so much sooner, but
        nothing comes before it is sent.
        """
        return self.machine.burst_bytes / self.machine.link_Bps

    def reply_s(self, op: str, size: float) -> float:
        """Seconds after its last byte until a message of this kind and size has come.

        Reductions go round the ring unless they are small.
        """
        if op == "gather" or small(size, self.world):
            return self.machine.latency_s
        measured = self.machine.reduce_latency_s
        return 2 * (self.world - 1) * self.machine.latency_s if measured is None else measured

    def sent_s(self, way: str, size: float) -> float:
        """Of so many bytes on a link that carries nothing else, by what is done with them on their way."""
        return size / self.machine.rate(way)

    def carry_s(self, way: str, size: float, messages: float = 1) -> float:
        """Processor time of a rank that sends so many bytes in so many messages, besides what delays the
        passes anyway.
        """
        each = max(0.0, self.machine.message_s - self.turn_s)
        return each * messages + size * self.machine.byte_s.get(way, 0.0)

    def copy_s(self, size: float) -> float:
        """Of a copy, or one pass over two operands, of so many bytes of float32."""
        return size / 4 * self.rates.copy_s

    def code_s(self, kind: str, coded: Coded) -> float:
        """Of encoding or decoding (`kind`) gradients; one that goes as it is, is copied."""
        each, call = getattr(self.rates, f"{kind}_s"), getattr(self.rates, f"{kind}_call_s")
        return sum(
            self.copy_s(layer.bytes)
            if isinstance(scheme, Float32)
            else layer.bytes / 4 * each.get(scheme.name, 0.0) + call.get(scheme.name, 0.0)
            for layer, scheme in coded
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """Gradients that travel together: when they are ready in the backward pass, and what follows; seconds."""

    ready_s: float
    #: one after another: work, on the link, until the reply has come
    stages: tuple[tuple[float, float, float], ...]
    #: work on what has come
    after_s: float = 0.0
    #: of a deferred update: in the forward pass, when its parameters are needed; itself; its way back
    need_s: float = 0.0
    update_s: float = 0.0
    back_s: float = 0.0
    #: processor time for all of its messages
    carry_s: float = 0.0

    @property
    def coded_s(self) -> float:
        """Of encoding and decoding."""
        return sum(work_s for work_s, _, _ in self.stages) + self.after_s


@dataclass(slots=True, kw_only=True)
class _Steps:
    """Steps of a rank one behind another: its passes, the work beside them, and its link. Seconds of the
    passes are with what messages cost them.
    """

    at: Setting
    #: in the order in which they travel
    messages: Sequence[_Message]
    forward_s: float
    backward_s: float
    #: of the whole model, once all has come; None where messages have updates of their own, which hide under
    #: the next forward pass
    update_s: float | None
    #: what cores take for all of it, if they do nothing else
    least_s: float = 0.0
    builder: Builder = field(default_factory=Builder)

    def seconds(self) -> float:
        """Of a step, once steps follow one another."""
        here: dict[int, int] = {}
        ends = [self._add(COMPUTE, self.at.ahead_s)]  # the link was idle before the first step
        for _ in range(_STEPS if self.update_s is None else 1):
            end, came = self._passes(here)
            if self.update_s is None:
                here = self._updates(end, came)
            else:
                end = self._add(COMPUTE, self.update_s, came)
            ends.append(end)
        took_s = np.diff(run(self.builder.build()).end[ends])
        return max(float(took_s[-1]), self.least_s)

    def _add(self, stream: str, seconds: float, after: Sequence[int] = ()) -> int:
        return self.builder.add(self.builder.stream(0, stream), Label(stream, stream, seconds), after)

    def _passes(self, here: Mapping[int, int]) -> tuple[int, list[int]]:
        """Both passes, of which the first waits for parameters that are not `here` yet; the end of the
        second, and the sums of what was sent.
        """
        waits: defaultdict[float, list[int]] = defaultdict(list)
        for i, update in here.items():
            waits[self.messages[i].need_s].append(update)
        ready = [self.forward_s + message.ready_s for message in self.messages]
        early = [moment - self.at.ahead_s for moment in ready]
        end, reached = self._compute([*ready, *early], waits)
        return end, [self._sent(i, reached[early[i]], reached[ready[i]]) for i in range(len(self.messages))]

    def _compute(
        self, moments: Iterable[float], waits: Mapping[float, list[int]]
    ) -> tuple[int, dict[float, int]]:
        """Both passes, with waits at some moments; their end, and when they come to each moment."""
        now, after, reached = 0.0, list[int](), dict[float, int]()
        for moment in sorted({*moments, *waits}):
            reached[moment] = self._add(COMPUTE, max(0.0, moment - now), after)
            now, after = max(now, moment), waits.get(moment, [])
        left_s = self.forward_s + self.backward_s - now
        return self._add(COMPUTE, max(0.0, left_s), after), reached

    def _sent(self, number: int, early: int, ready: int) -> int:
        message = self.messages[number]
        own, waits = f"message {number}", [early]
        self._add(own, message.stages[0][0], [ready])  # nothing comes before that is encoded
        for work_s, wire_s, reply_s in message.stages:
            carried = self._add("link", wire_s + self.at.gap_s, [self._add("work", work_s, waits)])
            waits = [self._add(own, reply_s, [carried])]
        return self._add("sum", message.after_s, waits)

    def _updates(self, end: int, came: Sequence[int]) -> dict[int, int]:
        """When the parameters of each message are here. Updates go in the order of need; those whose sums are
        still to come hold up the rest.
        """
        here = {}
        for i, message in sorted(enumerate(self.messages), key=lambda one: one[1].need_s):
            here[i] = self._add("update", message.update_s, [end, came[i]])
            if message.back_s:
                carried = self._add("link", message.back_s + self.at.gap_s, [here[i]])
                here[i] = self._add(f"message {i}", self.at.machine.latency_s, [carried])
        return here


def averaging_s(profile: Profile, at: Setting, schemes: Schemes) -> float:
    """Seconds of a step whose gradients are averaged, each under the scheme that it has by name."""
    return _averaging(profile, at, schemes).seconds()


def _averaging(profile: Profile, at: Setting, schemes: Schemes) -> _Steps:
    """Gradients are averaged, plainly or compressed, in the backward pass, and complete before the update."""
    messages = list(_in_buckets([(layer, schemes[layer.name]) for layer in order_of(profile.layers)], at))
    backward_s = profile.backward_s + at.turn_s * sum(len(message.stages) for message in messages)
    update_s = _update_s(profile, at, schemes)
    # all cores together have the passes, the encoders and the messages to do
    work_s = sum(at.threads * message.coded_s + message.carry_s for message in messages)
    shared_s = (backward_s + work_s) / at.cores
    return _Steps(
        at=at,
        messages=messages,
        forward_s=profile.forward_s,
        backward_s=backward_s,
        update_s=update_s,
        least_s=profile.forward_s + shared_s + update_s,
    )


def _in_buckets(coded: Coded, at: Setting) -> Iterator[_Message]:
    """Messages, each of which delays the pass, and so the gradients of those behind it."""
    sizes = [counted(layer.bytes, scheme, layer.shape, at.cores == 1) for layer, scheme in coded]
    turns_s = 0.0
    for members in buckets(sizes, BUCKET_BYTES, FIRST_BYTES):
        message = _bucket([coded[i] for i in members], at)
        turns_s += len(message.stages) * at.turn_s
        yield replace(message, ready_s=turns_s + message.ready_s)


def _update_s(profile: Profile, at: Setting, schemes: Schemes) -> float:
    """Of an update whose momentum a compressor may have taken over: one addition then, with two operands read
    and one written.
    """
    taken = any(isinstance(scheme, DGC) and scheme.momentum for scheme in schemes.values())
    addition_s = at.copy_s(1.5 * profile.bytes)
    return min(profile.update_s, addition_s) if taken and profile.momentum else profile.update_s


def _bucket(coded: Coded, at: Setting) -> _Message:
    """Gradients that are averaged together. Of the same stage, all are sent at once; what goes as it is with
    the first. What is agreed on first is small, and the encoder waits for it.
    """
    stages = list(zip_longest(*(cost.exchanges(scheme, layer.shape) for layer, scheme in coded)))
    encode_s = at.code_s("encode", coded) / len(stages)
    sent = _sent_bytes(coded, at.world)
    wires_s = [*(0.0 for _ in stages[1:]), sum(at.sent_s(way, size) for way, size in sent.items())]
    carried_s = sum(at.carry_s(way, size, 0) for way, size in sent.items())
    return _Message(
        ready_s=max(layer.ready_s for layer, _ in coded),
        stages=tuple((encode_s, wires_s[i], _reply_s(stage, at)) for i, stage in enumerate(stages)),
        after_s=at.code_s("decode", coded),
        carry_s=at.carry_s("exchange", 0.0, len(stages)) + carried_s,
    )


def _sent_bytes(coded: Coded, world: int) -> Mapping[str, float]:
    """By what is done with them on their way, as `Machine` has it."""
    sent: defaultdict[str, float] = defaultdict(float)
    for layer, scheme in coded:
        way = "sum" if scheme.collective == "all_reduce" else "exchange"
        if isinstance(scheme, Float16 | BFloat16):
            way = "half"
        sent[way] += cost.sent_bytes(scheme, layer.shape, world)
    return sent


def _reply_s(sent: Iterable[Exchange | None], at: Setting) -> float:
    """Of messages that are sent together, each kind as one."""
    sizes: defaultdict[str, float] = defaultdict(float)
    for one in sent:
        if one is not None:
            sizes[one.op] += one.bytes
    return max(at.reply_s(op, size) for op, size in sizes.items())


def _ddp(profile: Profile, at: Setting) -> _Steps:
    """As torch's DistributedDataParallel does it: the thread of the backward pass copies into buckets, and
    out of them at the end.
    """
    ordered, copy_s = order_of(profile.layers), at.copy_s(profile.bytes)
    pace = 1 + copy_s / profile.backward_s
    messages = []
    for members in buckets([layer.bytes for layer in ordered], DDP_BUCKET_BYTES, DDP_FIRST_BYTES):
        size = sum(ordered[i].bytes for i in members)
        wire_s = at.sent_s("whole", 2 * at.share * size)
        ready_s = pace * max(ordered[i].ready_s for i in members)
        messages.append(_Message(ready_s=ready_s, stages=((0.0, wire_s, at.reply_s("sum", size)),)))
    return _Steps(
        at=at,
        messages=messages,
        forward_s=profile.forward_s,
        backward_s=pace * profile.backward_s,
        update_s=copy_s + profile.update_s,
    )


def _deferred(profile: Profile, at: Setting, *, shares: bool, factors: bool) -> _Steps:
    """`overlap` (or, without `shares`, `priority`), whose updates hide under the next forward pass."""
    layers = sorted(profile.layers, key=lambda layer: layer.need_s)
    traded = _traded(layers, at) if factors and shares else {}
    rest = [layer for layer in layers if layer not in traded]
    update = profile.update_s / max(1, profile.bytes)
    parts = [_factors(layer, mode, at, update) for layer, mode in traded.items()]
    for members in buckets([layer.bytes for layer in rest], piece_bytes(at.machine.link_Bps, at.world)[0]):
        parts += _pieces([rest[i] for i in members], at, shares, update)
    order = sorted(parts, key=lambda part: part.ready_s) if shares else _urgent_first(parts, at)
    # copies are work of the backward pass; products of factors are left to others
    spent_s = at.copy_s(sum(layer.bytes for layer in rest)) - sum(_product_s(layer, at) for layer in traded)
    return _overlapped(profile, at, order, spent_s)


def _urgent_first(parts: Sequence[_Message], at: Setting) -> list[_Message]:
    ready, need = [part.ready_s for part in parts], [part.need_s for part in parts]
    sent = [at.machine.latency_s + part.stages[0][1] for part in parts]
    return [parts[i] for i in urgent_first(ready, need, sent)]


def _overlapped(profile: Profile, at: Setting, parts: Sequence[_Message], spent_s: float) -> _Steps:
    """With these messages, for which the backward pass takes so much longer, or shorter."""
    backward_s = max(profile.backward_s / 2, profile.backward_s + spent_s) + len(parts) * at.turn_s
    forward_s = profile.forward_s + sum(part.back_s > 0 for part in parts) * at.turn_s
    pace = backward_s / profile.backward_s
    work_s = sum(part.after_s + part.update_s + part.carry_s for part in parts)
    return _Steps(
        at=at,
        messages=[replace(part, ready_s=pace * part.ready_s) for part in parts],
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=None,
        least_s=forward_s + backward_s + work_s if at.cores < 2 else 0.0,
    )


def _traded(layers: Iterable[Layer], at: Setting) -> dict[Layer, str]:
    """Fully connected layers that exchange something else than their gradients, and what."""
    machine = at.machine
    modes = {
        layer: _shape(layer).choose(at.world, machine.link_Bps, machine.flops)
        for layer in layers
        if layer.rows and len(layer.shape) == 2
    }
    return {layer: mode for layer, mode in modes.items() if mode != "gradient"}


def _shape(layer: Layer) -> LinearShape:
    return LinearShape(n_in=layer.shape[1], n_out=layer.shape[0], rows=layer.rows)


def _product_s(layer: Layer, at: Setting) -> float:
    """Of the gradient of a fully connected layer; a product of few rows is a pass over the weight."""
    return max(_shape(layer).product_flops / at.machine.flops, at.copy_s(layer.bytes))


def _factors(layer: Layer, mode: str, at: Setting, update: float) -> _Message:
    """A fully connected layer that exchanges factors; `update`: seconds a byte."""
    share = 1.0 if mode == "factors" else 1 / at.world
    back = at.share * layer.bytes if mode == "rows" else 0.0
    sent = _shape(layer).sent_bytes(mode, at.world) - back
    product_s = max(_product_s(layer, at) * at.world * share, at.copy_s(layer.bytes) * share)
    return _part([layer], at, ("exchange", sent, back), product_s, update * layer.bytes * share)


def _pieces(layers: Sequence[Layer], at: Setting, shares: bool, update: float) -> list[_Message]:
    """Small neighbours as one message, a large one as several."""
    total = sum(layer.bytes for layer in layers)
    count = max(1, round(total / piece_bytes(at.machine.link_Bps, at.world)[1]))
    size = total / count
    way = at.share * size
    if shares:
        one = _part(layers, at, ("exchange", way, way), at.copy_s(size), update * size / at.world)
    else:
        one = _part(layers, at, ("sum", 2 * way, 0.0), at.copy_s(size) / 2, update * size)
    return [one] * count


def _part(
    layers: Sequence[Layer], at: Setting, sent: tuple[str, float, float], sum_s: float, update_s: float
) -> _Message:
    """What deferred strategies send: in which way, bytes of gradients and of parameters."""
    way, out, back = sent
    return _Message(
        ready_s=max(layer.ready_s for layer in layers),
        stages=((0.0, at.sent_s(way, out), at.machine.latency_s),),
        after_s=sum_s,
        need_s=min(layer.need_s for layer in layers),
        update_s=update_s,
        back_s=at.sent_s("exchange", back),
        carry_s=at.carry_s(way, out + back, 1 + (back > 0)),
    )


def step_s(strategy: str, profile: Profile, at: Setting) -> float:
    """Seconds of a step under a strategy of this name; `none` does not communicate, `auto` takes what is
    fastest.
    """
    name = ALIASES.get(kind := strategy.partition(":")[0], kind)
    if at.world == 1 or name == "none":
        return profile.compute_s
    if name == "auto":
        return min(step_s(candidate, profile, at) for candidate in (*EXACT, *allowed(strategy)))
    if name in PERIODS:
        sent_s = at.sent_s("exchange", 2 * at.share * profile.bytes)
        return profile.compute_s + (sent_s + at.machine.latency_s) / PERIODS[name]
    return _described(strategy, profile, at).seconds()


def _described(strategy: str, profile: Profile, at: Setting) -> _Steps:
    """What a strategy that communicates in every step sends."""
    name = strategy.partition(":")[0]
    if name == "ddp":
        return _ddp(profile, at)
    if name in ("overlap", "priority"):
        return _deferred(profile, at, shares=name == "overlap", factors="fc=gradient" not in strategy)
    if name != "allreduce" and name not in SCHEMES:
        raise SpecError(f"no model of strategy {strategy!r}")
    scheme = FLOAT32 if name == "allreduce" else parse(strategy)
    chosen = cost.assign(scheme, profile.shapes)
    return _averaging(profile, at, chosen)


def allowed(strategy: str) -> tuple[str, ...]:
    """Schemes of compression that `auto` may take, given with its options in words: `auto:loss=some`."""
    _, _, given = strategy.replace(" ", "").partition("loss=")
    return LOSSES.get(given.partition(",")[0], ())


#: steps in a row, until one is as the next
_STEPS = 3
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
