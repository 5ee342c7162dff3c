"""How large the numbers of a user's own loop are: weights, activations, gradients and updates, counted by
power of two.

    ranges = pt.Ranges(model, optimizer, every=50)
    ...the loop as it is...
    ranges.result().save("ranges.json")  # all ranks: paceline analyze ranges.json --precision

Counts are exact for the steps that are looked at. Run the model in float32 or bfloat16: what float16 has lost
already is counted as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from paceline.errors import RunError, SpecError, UnknownName
from paceline.spec import checks
from paceline.spec.value_ranges import ExponentCounts, RangeRecord, TensorKind, ValueRange

#: exponents of counted values, as `ValueRange.exponents` has them
LOW, HIGH = -149, 128
#: the least gap to the largest value, and how many are told apart; larger ones count as the last
LEAST_GAP, GAPS = -1, 64
#: elements of a block
BLOCK = 32
#: elements counted at a time: what fits a cache and is not split over threads, or beside a model on a GPU
_AT_ONCE = {"cpu": 1 << 15, "cuda": 1 << 24}
_INFINITY, _LEAST_NORMAL, _BIAS = 0x7F800000, 0x00800000, 127
_ZEROS, _INFINITIES, _NANS = 0, 1, 2
_EXPONENTS = slice(3, 3 + HIGH - LOW + 1)
_TENSOR = slice(_EXPONENTS.stop, _EXPONENTS.stop + GAPS)
_BLOCKS = slice(_TENSOR.stop, _TENSOR.stop + GAPS)
_SIZE = _BLOCKS.stop
#: modules that hand on the values they get
_PLAIN = (nn.Identity, nn.Flatten, nn.Unflatten)


class Tally(NamedTuple):
    """Counts of values, as one vector, and the largest finite magnitude."""

    counts: Tensor
    largest: Tensor

    def record(self, layer: str, kind: TensorKind) -> ValueRange:
        """The same as plain data."""
        counts = self.counts.tolist()
        return ValueRange(
            layer=layer,
            kind=kind,
            zeros=counts[_ZEROS],
            infinities=counts[_INFINITIES],
            nans=counts[_NANS],
            largest=float(self.largest),
            exponents=ExponentCounts.of(counts[_EXPONENTS], LOW),
            below_tensor=ExponentCounts.of(counts[_TENSOR], LEAST_GAP),
            below_block=ExponentCounts.of(counts[_BLOCKS], LEAST_GAP),
        )


def tally(values: Tensor, *, blocks: bool = True) -> Tally:
    """Counts the values of a tensor; without `blocks`, not how far they lie below others."""
    local = values.to_local() if hasattr(values, "to_local") else values
    flat = local.detach().reshape(-1).to(torch.float32)
    counts = torch.zeros(_SIZE, dtype=torch.int64, device=flat.device)
    largest = torch.zeros((), dtype=torch.int32, device=flat.device)
    for part in flat.split(_AT_ONCE.get(flat.device.type, _AT_ONCE["cuda"])):
        bits = part.view(torch.int32) & 0x7FFFFFFF
        if bits.numel() and int(bits.max()) >= _INFINITY:
            counts[_INFINITIES] += (bits == _INFINITY).sum()
            counts[_NANS] += (bits > _INFINITY).sum()
            bits = bits[bits < _INFINITY]
        if not bits.numel():
            continue
        largest = torch.maximum(largest, bits.max())
        _count(bits, counts, blocks)
    if blocks:
        exponents = torch.arange(LOW, HIGH + 1, device=flat.device)
        gaps = (_floor(largest) - exponents - LEAST_GAP).clamp(0, GAPS - 1)
        counts[_TENSOR].index_add_(0, gaps, counts[_EXPONENTS])
    return Tally(counts, largest.view(torch.float32).to(torch.float64))


def _floor(bits: Tensor) -> Tensor:
    """floor(log2) of float32 numbers from their bits; of zero and subnormal numbers, -127."""
    return (bits >> 23) - _BIAS


def _count(bits: Tensor, counts: Tensor, blocks: bool) -> None:
    """Adds finite magnitudes, given by their bits."""
    # one less, so that a power of two counts with what is below it; zero becomes 0
    octaves = ((bits - 1) >> 23) + 1
    found = torch.bincount(octaves, minlength=256)
    counts[_ZEROS] += found[0]
    # octave 2 holds exponent 2 - _BIAS; octave 1 holds all subnormal numbers, told apart below
    counts[_EXPONENTS][2 - _BIAS - LOW :] += found[2:256]
    if int(found[1]):
        counts[_EXPONENTS] += _subnormal(bits[octaves == 1])
    if blocks:
        counts[_BLOCKS] += _in_blocks(bits, octaves, zeros=bool(found[0]))


def _subnormal(bits: Tensor) -> Tensor:
    """Counts of subnormal magnitudes by exponent: their bits are multiples of the smallest of them."""
    mantissa, exponent = torch.frexp(bits.to(torch.float32))
    places = exponent - (mantissa == 0.5).to(torch.int32)
    return torch.bincount(places, minlength=HIGH - LOW + 1)


def _in_blocks(bits: Tensor, octaves: Tensor, zeros: bool) -> Tensor:
    """Counts of magnitudes by how far they lie below the largest of their block."""
    missing = -bits.numel() % BLOCK
    if missing:
        bits, octaves = (nn.functional.pad(each, (0, missing)) for each in (bits, octaves))
    octaves = octaves.view(-1, BLOCK)
    tops = (bits.view(-1, BLOCK).amax(1, keepdim=True) >> 23) - LEAST_GAP
    gaps = (tops - octaves).clamp_(0, GAPS - 1)
    if missing or zeros:
        gaps.masked_fill_(octaves == 0, GAPS)
    return torch.bincount(gaps.view(-1), minlength=GAPS + 1)[:GAPS]


class Ranges:
    """Counts the values of every `every`-th step of a loop, by layer and kind.

    Layers are modules that own parameters or hold no others. `optimizer.step` ends a step; `scaler`, if
    losses are scaled, has `get_scale`. `close` takes the hooks away, as leaving a `with` block does.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int = 1,
        layers: Sequence[str] | None = None,
        scaler: Any = None,
    ) -> None:
        self.every = checks.whole("every", every)
        inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self.name = type(inner).__name__
        self.steps = 0
        self._scaler = scaler
        self._passed = 0
        self._before: dict[nn.Parameter, Tensor] = {}
        self._tallies: dict[tuple[str, TensorKind], Tally] = {}
        check_trained(inner)
        modules = _layers(inner)
        _known(layers, modules)
        self._modules = {name: each for name, each in modules.items() if layers is None or name in layers}
        self._parameters = _owned(self._modules)
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise SpecError(f"Ranges needs a torch optimizer, got {type(optimizer).__name__}")
        self._handles: list[Any] = [
            *(each.register_forward_hook(self._forward(name)) for name, each in self._modules.items()),
            optimizer.register_step_pre_hook(self._gradients),
            optimizer.register_step_post_hook(self._updates),
        ]

    @property
    def looking(self) -> bool:
        """Whether the step that runs is counted."""
        return self._passed % self.every == 0

    def _forward(self, layer: str) -> Callable[..., None]:
        def see(module: nn.Module, args: Any, output: Any) -> None:
            if not (self.looking and torch.is_grad_enabled()):
                return
            for values in _floating(output):
                self._add(layer, TensorKind.ACTIVATIONS, values)
                if values.requires_grad:
                    values.register_hook(self._backward(layer))

        return see

    def _backward(self, layer: str) -> Callable[[Tensor], None]:
        def see(gradient: Tensor) -> None:
            scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
            self._add(layer, TensorKind.ACTIVATION_GRADIENTS, gradient / scale if scale != 1 else gradient)

        return see

    def _gradients(self, *_: Any) -> None:
        """Before an update."""
        if not self.looking:
            return
        for parameter, layer in self._parameters.items():
            self._add(layer, TensorKind.WEIGHTS, parameter)
            if parameter.grad is not None:
                self._add(layer, TensorKind.WEIGHT_GRADIENTS, parameter.grad)
                self._before[parameter] = parameter.detach().clone()

    def _updates(self, *_: Any) -> None:
        """After an update."""
        if self.looking:
            self.steps += 1
            for parameter, before in self._before.items():
                self._add(self._parameters[parameter], TensorKind.UPDATES, relative(parameter, before))
            self._before.clear()
        self._passed += 1

    @torch.no_grad()
    def _add(self, layer: str, kind: TensorKind, values: Tensor) -> None:
        new = tally(values, blocks=kind != TensorKind.UPDATES)
        known = self._tallies.get((layer, kind))
        if known is not None:
            known.counts.add_(new.counts)
            new = Tally(known.counts, torch.maximum(known.largest, new.largest))
        self._tallies[layer, kind] = new

    def result(self, model: str = "", group: dist.ProcessGroup | None = None) -> RangeRecord:
        """What was counted, on all ranks together; all of them take part."""
        if not self.steps:
            raise RunError(
                f"no step of {self.name} was counted: Ranges counts when optimizer.step() runs; give it the"
                " optimizer that the loop steps"
            )
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        tallies = _summed(self._tallies, group) if together else self._tallies
        order = {layer: place for place, layer in enumerate(self._modules)}
        kinds = list(TensorKind)
        keys = sorted(tallies, key=lambda key: (order.get(key[0], len(order)), key[0], kinds.index(key[1])))
        return RangeRecord(
            model=model or self.name,
            steps=self.steps,
            ranks=dist.get_world_size(group) if together else 1,
            ranges=tuple(tallies[key].record(*key) for key in keys),
        )

    def close(self) -> None:
        """Takes the hooks away; what was counted stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Ranges:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@torch.no_grad()
def relative(after: Tensor, before: Tensor) -> Tensor:
    """Changes over the power of two at or below each weight; zero for weights that were zero."""
    powers = (before.float().view(torch.int32) & _INFINITY).view(torch.float32)
    return ((after.float() - before.float()) / powers).masked_fill_(powers == 0, 0.0)


def check_trained(module: nn.Module) -> None:
    """Raises where a module has no gradients."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise SpecError(
            f"{type(module).__name__} has no parameter that is trained, so there are no gradients to look at;"
            " set requires_grad, or give the module that is trained"
        )


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name or "(model)": each
        for name, each in model.named_modules()
        if not isinstance(each, _PLAIN)
        and (any(True for _ in each.parameters(recurse=False)) or not any(True for _ in each.children()))
    }


def _owned(modules: dict[str, nn.Module]) -> dict[nn.Parameter, str]:
    """The layer of each trained parameter; of a shared one, the first."""
    found: dict[nn.Parameter, str] = {}
    for name, each in modules.items():
        for parameter in each.parameters(recurse=False):
            found.setdefault(parameter, name)
    return found


def _known(layers: Sequence[str] | None, modules: Iterable[str]) -> None:
    names = list(modules)
    for layer in layers or ():
        if layer not in names:
            raise UnknownName("layer", layer, names, f"the model has {len(names)}, such as {names[0]!r}")


def _floating(output: Any) -> list[Tensor]:
    if hasattr(output, "to_tuple"):  # outputs of transformers
        output = output.to_tuple()
    leaves = pytree.tree_leaves(output)
    return [each for each in leaves if isinstance(each, Tensor) and each.is_floating_point()]


def _summed(
    tallies: dict[tuple[str, TensorKind], Tally], group: dist.ProcessGroup | None
) -> dict[tuple[str, TensorKind], Tally]:
    """Tallies of all ranks, which may have seen different layers."""
    theirs: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(theirs, list(tallies), group=group)
    keys = list(dict.fromkeys(key for keys in theirs for key in keys))
    device = next(iter(tallies.values())).counts.device if tallies else torch.device("cpu")
    counts = torch.zeros(len(keys), _SIZE, dtype=torch.int64, device=device)
    largest = torch.zeros(len(keys), dtype=torch.float64, device=device)
    for place, key in enumerate(keys):
        if key in tallies:
            counts[place] = tallies[key].counts
            largest[place] = tallies[key].largest
    dist.all_reduce(counts, group=group)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return {key: Tally(counts[place], largest[place]) for place, key in enumerate(keys)}
