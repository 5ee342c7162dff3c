"""What the compressed gradients of a model cost: exact bytes on the wire, and seconds of encoders and
decoders.

Each scheme says its own bytes and work (`paceline.spec.compression`). Where its encoder was measured
(`catalog/encoders.toml`, by `benchmarks/encoders.py`), it takes so many copies of its gradient; else the work
counted for it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files

from paceline.cost.chip import Chip
from paceline.spec.compression import Exchange, Float32, Scheme, Shape, Work, numel, parse
from paceline.spec.compression.scheme import LATE
from paceline.spec.device import Device

FLOAT32 = Float32()
#: share of the memory's rate that a copy reaches (100 MB in 0.051 ms on an H200), and that loops which were
#: not measured do
COPY_SHARE, LOOP_SHARE = 0.82, 0.7
#: seconds of a launch where a device's file does not say
LAUNCH_S = 2e-6


def get(text: str) -> Scheme:
    """The scheme that `name` or `name:setting=value,...` describes; its `accuracy` and `evidence` say what it
    may cost.
    """
    return parse(text)


def wire_bytes(scheme: Scheme, shape: Shape, *, step: int | None = None) -> int:
    """Bytes one rank contributes for a float32 gradient of that shape, what is agreed on first not counted.

    `step` matters to schemes that warm up; None: after that.
    """
    return scheme.payload_bytes(shape, LATE if step is None else step)


def exchanges(scheme: Scheme, shape: Shape, *, step: int | None = None) -> tuple[Exchange, ...]:
    """The collectives of one gradient, one after another."""
    return scheme.exchanges(shape, LATE if step is None else step)


def sent_bytes(scheme: Scheme, shape: Shape, world: int, *, step: int | None = None) -> float:
    """Bytes one rank sends for one gradient, by ring algorithms."""
    return sum(exchange.sent_bytes(world) for exchange in exchanges(scheme, shape, step=step))


# -- models ----------------------------------------------------------------------------------------

Named = tuple[str, Sequence[int]]


def last_layer(parameters: Iterable[Named]) -> str:
    """The module that holds the last matrix, in the order in which a model lists its parameters: the
    classifier, as a rule.

    Embeddings that are tied to the output are listed first, and are not found.
    """
    found = ""
    for name, shape in parameters:
        if len(shape) >= 2:
            found = name.rpartition(".")[0]
    return found


def assign(scheme: Scheme, parameters: Iterable[Named]) -> dict[str, Scheme]:
    """The scheme of each parameter by name: float32 for small tensors and, if the scheme says so, for the
    last layer.
    """
    listed = list(parameters)
    last = last_layer(listed) if scheme.keep_last else None
    return {
        name: FLOAT32 if numel(shape) < scheme.min_elements or name.rpartition(".")[0] == last else scheme
        for name, shape in listed
    }


def model_bytes(
    scheme: Scheme, parameters: Iterable[Named], *, step: int | None = None, shared: bool = True
) -> int:
    """Bytes one rank contributes for all gradients of a model; `shared`: with the scalers that are agreed on
    first.
    """
    listed = list(parameters)
    chosen = assign(scheme, listed)
    return sum(
        wire_bytes(chosen[name], shape, step=step) + (chosen[name].shared_bytes(shape) if shared else 0)
        for name, shape in listed
    )


# -- seconds ---------------------------------------------------------------------------------------


@cache
def copies() -> Mapping[str, Mapping[str, tuple[float, float]]]:
    """By kind of device and scheme: copies of a gradient that encoding takes, and decoding what two ranks
    sent.
    """
    data = tomllib.loads((files("paceline.catalog") / "encoders.toml").read_text())
    return {
        kind: {name: (measured["encode"], measured["decode"]) for name, measured in table["copies"].items()}
        for kind, table in data.items()
    }


def encode_s(scheme: Scheme, shape: Shape, chip: Chip, device: Device) -> float:
    """Device seconds to encode a float32 gradient of that shape."""
    work = scheme.encode_work(shape)
    measured = copies().get(device.kind, {}).get(scheme.name)
    if measured is None or not work.passes:
        return _counted_s(work, chip, device)
    return measured[0] * _copy_s(shape, chip) + _launches_s(work, device)


def decode_s(scheme: Scheme, shape: Shape, world: int, chip: Chip, device: Device) -> float:
    """Device seconds to decode what `world` ranks sent of it."""
    work = scheme.decode_work(shape, world)
    measured = copies().get(device.kind, {}).get(scheme.name)
    if measured is None:
        return _counted_s(work, chip, device)
    of_two = scheme.decode_work(shape, 2).bytes
    return measured[1] * _copy_s(shape, chip) * work.bytes / of_two + _launches_s(work, device)


def _copy_s(shape: Shape, chip: Chip) -> float:
    return 8 * numel(shape) / (COPY_SHARE * chip.bandwidth)


def _counted_s(work: Work, chip: Chip, device: Device) -> float:
    """Arithmetic or memory traffic, whichever takes longer."""
    return max(work.flops / chip.peaks["fp32"], work.bytes / chip.bandwidth) / LOOP_SHARE + _launches_s(
        work, device
    )


def _launches_s(work: Work, device: Device) -> float:
    return work.passes * (device.launch_s or LAUNCH_S)
