"""How long a step takes under each strategy, from a profile of the model and a probe of the machine: the model behind `auto`.

One link per rank, which carries one message after another; one thread that computes the passes and one that encodes, sums and updates
(both on one core where a rank has no more). Bytes are those that strategies count themselves; see each strategy's file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.cost import compression as cost
from paceline.errors import SpecError
from paceline.sim.program import buckets
from paceline.spec.compression import SCHEMES, Float32, Scheme, parse
from paceline.train.comm import IN_FLIGHT
from paceline.train.layout import LEAST_BYTES, MOST_BYTES
from paceline.train.profile import Layer, Profile, order_of
from paceline.train.strategies.averaging import BUCKET_BYTES, FIRST_BYTES
from paceline.train.strategies.factors import Shape
from paceline.train.strategies.probe import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Seconds per gradient element that encoding and decoding take, by name of the scheme; and of a sum or copy (float32, one pass)."""

    encode_s: Mapping[str, float] = field(default_factory=dict)
    decode_s: Mapping[str, float] = field(default_factory=dict)
    copy_s: float = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where a step runs."""

    machine: Machine
    world: int
    rates: Rates = Rates()
    #: cores of one rank
    cores: int = 1

    @property
    def gap_s(self) -> float:
        """Seconds that a message keeps the link besides its bytes: several are in flight, so that their latencies overlap."""
        return self.machine.latency_s / IN_FLIGHT


def averaging_s(profile: Profile, at: Setting, scheme: Callable[[Layer], Scheme], bucket_bytes: float = BUCKET_BYTES,
                first_bytes: float = FIRST_BYTES) -> float:
    """Seconds of a step whose gradients are averaged, plainly or compressed, during the backward pass, and complete before the update."""
    ordered = order_of(profile.layers)
    link = worked = 0.0
    end = profile.backward_s
    for members in buckets([layer.bytes for layer in ordered], bucket_bytes, first_bytes):
        chosen = [ordered[i] for i in members]
        encode = sum(_work(scheme(layer), layer, at, at.rates.encode_s) for layer in chosen)
        decode = sum(_work(scheme(layer), layer, at, at.rates.decode_s) for layer in chosen)
        stages = max(len(cost.exchanges(scheme(layer), layer.shape)) for layer in chosen)
        wire = sum(cost.sent_bytes(scheme(layer), layer.shape, at.world) for layer in chosen) / at.machine.link_Bps
        link = max(link, max(layer.ready_s for layer in chosen) + encode) + wire + at.gap_s
        end = max(end, link + stages * at.machine.latency_s + decode)
        worked += encode + decode
    if at.cores < 2:
        end = max(end, profile.backward_s + worked)
    return profile.forward_s + end + profile.update_s


def _work(scheme: Scheme, layer: Layer, at: Setting, table: Mapping[str, float]) -> float:
    count = layer.bytes / 4
    return count * (at.rates.copy_s if isinstance(scheme, Float32) else table.get(scheme.name, 0.0))


@dataclass(frozen=True, slots=True)
class _Sent:
    """A part of the overlapped strategies: seconds of both exchanges on the link, of sum and update, and when it is ready and needed."""

    ready_s: float
    need_s: float
    out_s: float
    sum_s: float
    update_s: float
    back_s: float


def overlap_s(profile: Profile, at: Setting, *, shares: bool = True, factors: bool = True) -> float:
    """Seconds of a step of `overlap` (or, without `shares`, `priority`) once steps follow one another."""
    parts = _parts(profile, at, shares, factors)
    by_need = sorted(parts, key=lambda part: part.need_s)
    by_ready = sorted(parts, key=lambda part: part.ready_s)
    here = dict.fromkeys(map(id, parts), 0.0)  # when each part's parameters are here
    begin = begun = 0.0
    for _ in range(3):
        begun, begin = begin, max(begin, 0.0)
        now, done = begin, 0.0
        for part in by_need:  # the forward pass waits where a parameter is not here yet
            now = max(now + part.need_s - done, here[id(part)])
            done = part.need_s
        middle = now + profile.forward_s - done
        link, worker = 0.0, 0.0
        summed: dict[int, float] = {}
        for part in by_ready:
            link = max(link, middle + part.ready_s) + part.out_s + at.gap_s
            worker = max(worker, link + at.machine.latency_s) + part.sum_s
            summed[id(part)] = worker
        end = middle + profile.backward_s
        for part in by_need:
            worker = max(worker, end, summed[id(part)]) + part.update_s
            if part.back_s:
                link = max(link, worker) + part.back_s + at.gap_s
                here[id(part)] = link + at.machine.latency_s
            else:
                here[id(part)] = worker
        begin = end
    work = sum(part.sum_s + part.update_s for part in parts)
    alone = profile.forward_s + profile.backward_s + work
    return max(begin - begun, alone if at.cores < 2 else 0.0)


def _parts(profile: Profile, at: Setting, shares: bool, factors: bool) -> list[_Sent]:
    share = 1 / at.world if shares else 1.0
    link, copy = at.machine.link_Bps, at.rates.copy_s
    update = profile.update_s / max(1, profile.bytes)
    out: list[_Sent] = []
    small: list[Layer] = []
    for layer in sorted(profile.layers, key=lambda layer: layer.need_s):
        mode = _mode(layer, at) if factors and shares else "gradient"
        if mode != "gradient":
            n_out, n_in = layer.shape
            shape = Shape(n_in=n_in, n_out=n_out, rows=layer.rows)
            back = (at.world - 1) / at.world * layer.bytes if mode == "rows" else 0.0
            sent = shape.sent_bytes(mode, at.world) - back
            whole = 1.0 if mode == "factors" else share
            out.append(_Sent(layer.ready_s, layer.need_s, sent / link, shape.extra_flops(mode, at.world) / at.machine.flops,
                             update * layer.bytes * whole, back / link))
            continue
        small.append(layer)
        if sum(one.bytes for one in small) >= LEAST_BYTES:
            out += _pieces(small, at, shares, share, update, copy)
            small = []
    return out + _pieces(small, at, shares, share, update, copy)


def _pieces(layers: Sequence[Layer], at: Setting, shares: bool, share: float, update: float, copy: float) -> list[_Sent]:
    """Small neighbours as one message, a large one as several."""
    if not layers:
        return []
    total = sum(layer.bytes for layer in layers)
    count = max(1, round(total / MOST_BYTES))
    size = total / count
    way = (at.world - 1) / at.world * size / at.machine.link_Bps
    # a copy into flat memory, then the sum of everyone's part
    arithmetic = copy * size / 4 * (1 + 1 / (at.world if shares else 1))
    one = _Sent(max(layer.ready_s for layer in layers), min(layer.need_s for layer in layers), way if shares else 2 * way,
                arithmetic, update * size * share, way if shares else 0.0)
    return [replace(one) for _ in range(count)]


def _mode(layer: Layer, at: Setting) -> str:
    if len(layer.shape) != 2 or not layer.rows:
        return "gradient"
    return Shape(n_in=layer.shape[1], n_out=layer.shape[0], rows=layer.rows).choose(at.world, at.machine.link_Bps, at.machine.flops)


def step_s(strategy: str, profile: Profile, at: Setting) -> float:
    """Seconds of a step under a strategy of this name; `none` does not communicate, `auto` takes what is fastest."""
    name = strategy.partition(":")[0]
    if at.world == 1 or name == "none":
        return profile.compute_s
    if name in ("ddp", "allreduce"):
        sizes = {"bucket_bytes": DDP_BUCKET_BYTES, "first_bytes": DDP_FIRST_BYTES} if name == "ddp" else {}
        return averaging_s(profile, at, lambda _: FLOAT32, **sizes)
    if name in ("overlap", "priority"):
        return overlap_s(profile, at, shares=name == "overlap")
    if name in SCHEMES:
        chosen = cost.assign(parse(strategy), [(layer.name, layer.shape) for layer in profile.layers])
        return averaging_s(profile, at, lambda layer: chosen[layer.name])
    if name in PERIODS:
        once = 2 * (at.world - 1) / at.world * profile.bytes / at.machine.link_Bps + at.machine.latency_s
        return profile.compute_s + once / PERIODS[name]
    if name == "auto":
        candidates = ("allreduce", "overlap", "priority", "bf16", "fp16", "terngrad", "dgc")
        return min(step_s(candidate, profile, at) for candidate in candidates)
    raise SpecError(f"no model of strategy {strategy!r}")


#: DDP's own, in its default settings
DDP_BUCKET_BYTES, DDP_FIRST_BYTES = 25 * 2.0**20, 2.0**20
#: steps between two averages, as the strategies have them by default
PERIODS = {"local": 8, "post-local": 8, "diloco": 50}
FLOAT32 = Float32()
