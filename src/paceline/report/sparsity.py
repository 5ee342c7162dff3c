"""The zeros of a network for a terminal, and as a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.report.documents import document
from paceline.report.markup import table
from paceline.report.terminal import plain_table, spent
from paceline.spec.sparsity import DeviceGain, ProductGain, PrunedRun, Sparsity, StorageCost

#: rows of layers and of products that a terminal shows; --json has all
MOST_ROWS = 14
_LAYERS = (
    *("layer", "kind", "multiply-adds", "inputs", "in eights", "dead", "output gradients", "weights"),
    "weight gradients",
)
_OTHERS = ("module", "kind", "outputs", "gradients")
_STORAGE = ("granularity", "kept", "bitmap", "run length", "CSR", "2:4", "bytes", "multiply-adds")
_PRUNED = ("granularity", "kept", "accuracy", "pruned", "retrained", "lost (95 %)")
_PRODUCTS = (
    "product",
    "evaluates",
    "alike",
    "rows",
    "columns",
    "reduction",
    "dense",
    "sparse",
    "gain (90 %)",
)


def sparsity_view(found: Sparsity) -> RenderableType:
    """Zeros by layer, what index and pruning cost, what a device gains."""
    parts: list[RenderableType] = [
        Text.assemble((found.model, "bold"), f": shares that are zero in {_measured(found)}"),
        *_cut(_LAYERS, list(_layers(found)), left=(1,)),
        Text(_skippable(found)),
    ]
    if found.activations:
        parts += [Text(), *_cut(_OTHERS, list(_others(found)), left=(1,))]
    parts += [
        Text(),
        Text("index overhead, bits per kept value, of weights pruned at random places:", style="dim"),
        plain_table(_STORAGE, _storage(found.storage)),
    ]
    if found.pruned:
        parts += [Text(), pruned_table(found.pruned)]
    for gain in found.gains:
        parts += [Text(), *_gain(gain)]
    parts += [Text(note, style="dim") for note in found.notes]
    return Group(*parts)


def _measured(found: Sparsity) -> str:
    after = f" after {found.steps} steps" if found.steps else ""
    return f"{found.samples} samples{after}"


def _skippable(found: Sparsity) -> str:
    forward, backward = found.skippable
    return (
        f"multiply-adds with a zero factor: {_share(forward)} forward, {_share(backward)} backward; a device"
        " that skips each would save as much"
    )


def _cut(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()
) -> Iterator[RenderableType]:
    yield plain_table(head, rows[:MOST_ROWS], left)
    if len(rows) > MOST_ROWS:
        yield Text(f"{len(rows) - MOST_ROWS} more rows: --json", style="dim")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _layers(found: Sparsity) -> Iterator[tuple[str, ...]]:
    total = sum(layer.multiply_adds for layer in found.layers) or 1.0
    for layer in sorted(found.layers, key=lambda layer: -layer.multiply_adds):
        yield (
            layer.name,
            layer.kind,
            _share(layer.multiply_adds / total),
            _share(layer.inputs),
            _share(layer.input_vectors),
            _share(layer.dead_inputs),
            _share(layer.output_gradients),
            _share(layer.weight_zeros),
            _share(layer.weight_gradients),
        )


def _others(found: Sparsity) -> Iterator[tuple[str, ...]]:
    for one in found.activations:
        yield one.name, one.kind, _share(one.outputs), _share(one.output_gradients)


def _storage(costs: Sequence[StorageCost]) -> Iterator[tuple[str, ...]]:
    """A row per granularity and density, a column per form; bytes are those of the smallest form."""
    groups: dict[tuple[str, float], list[StorageCost]] = {}
    for cost in costs:
        groups.setdefault((cost.granularity.value, cost.density), []).append(cost)
    for (granularity, density), mine in groups.items():
        bits = {cost.form: f"{cost.index_bits:.3g}" for cost in mine}
        least = min(mine, key=lambda cost: cost.bytes_share)
        yield (
            granularity,
            f"{100 * density:.0f} %",
            *(bits.get(form, "-") for form in ("bitmap", "run length", "CSR", "2:4")),
            f"{100 * least.bytes_share:.1f} %",
            f"{100 * least.multiply_adds_share:.0f} %",
        )


def pruned_table(runs: Sequence[PrunedRun]) -> Table:
    """Accuracy by way of pruning: means over seeds."""
    drawn = plain_table(_PRUNED, map(_pruned, runs))
    drawn.title = f"{runs[0].task}, {len(runs[0].dense)} seeds: accuracy in %"
    drawn.title_justify = "left"
    return drawn


def _pruned(run: PrunedRun) -> tuple[str, ...]:
    mean, half = run.lost
    bounds = f" ± {100 * half:.2f}" if math.isfinite(half) else ""
    means = [f"{100 * fmean(values):.2f}" for values in (run.dense, run.pruned, run.retrained)]
    name = run.granularity.value if run.density < 1 else "nothing"
    return name, f"{100 * run.density:.0f} %", *means, f"{100 * mean:.2f}{bounds}"


def _gain(gain: DeviceGain) -> Iterator[RenderableType]:
    head = f"{gain.way} on {gain.device}: {gain.gain:.2f} x ({gain.low:.2f} to {gain.high:.2f})"
    yield Text.assemble((head, "bold"), f", {spent(gain.dense_s)} to {spent(gain.sparse_s)} on the device")
    if gain.products:
        yield from _cut(_PRODUCTS, list(_products(gain.products)), left=(1,))
    yield from (Text(note, style="dim") for note in gain.notes)


def _products(products: Sequence[ProductGain]) -> Iterator[tuple[str, ...]]:
    """Products of equal sizes as one row, those that take longest first."""
    groups: dict[tuple[str, int, int, int, float], list[ProductGain]] = {}
    for one in products:
        key = (one.evaluates, one.rows, one.columns, one.reduction, round(one.gain, 3))
        groups.setdefault(key, []).append(one)
    for mine in sorted(groups.values(), key=lambda mine: -sum(one.dense_s for one in mine)):
        one = mine[0]
        yield (
            one.layer,
            one.evaluates,
            str(len(mine)),
            *(f"{size:,}" for size in (one.rows, one.columns, one.reduction)),
            spent(one.dense_s),
            spent(one.sparse_s),
            f"{one.gain:.2f} ({one.gain_low:.2f} to {one.gain_high:.2f})",
        )


# -- a page ----------------------------------------------------------------------------------------


def sparsity_page(found: Sparsity, command: str) -> str:
    """The answer as one HTML file."""
    parts: list[tuple[str, object]] = [
        ("Layers", table(_LAYERS, _layers(found), _skippable(found))),
        ("Activations", table(_OTHERS, _others(found))),
        ("Index overhead, bits per kept value", table(_STORAGE, _storage(found.storage))),
    ]
    if found.pruned:
        parts.append(("Accuracy after pruning, %", table(_PRUNED, map(_pruned, found.pruned))))
    for gain in found.gains:
        words = f"{gain.gain:.2f} x ({gain.low:.2f} to {gain.high:.2f}); {'; '.join(gain.notes)}"
        parts.append((f"{gain.way} on {gain.device}", table(_PRODUCTS, _products(gain.products), words)))
    return document(f"Sparsity of {found.model}, {_measured(found)}", command, parts)
