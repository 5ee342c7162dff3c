"""`paceline analyze`: what a network is made of, and what its step holds."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.cli.memory_analysis import Apply, Within, analyze_memory
from paceline.cli.options import Json, print_json, show
from paceline.cli.precision_analysis import AnalyzedOptions, PrecisionOptions, analyze_precision
from paceline.cli.sparsity_analysis import ShowSparsity, SparsityOptions, analyze_sparsity

if TYPE_CHECKING:
    from paceline.spec.concurrency import Concurrency
    from paceline.spec.memory_frontier import MemoryFrontier
    from paceline.spec.precision_analysis import PrecisionAnalysis
    from paceline.spec.sparsity import Sparsity
    from paceline.spec.workload import Workload


def analyze(
    model: str,
    /,
    *,
    concurrency: Annotated[
        bool,
        Parameter(
            negative="",
            help="work, depth and average parallelism by layer, and what each form of parallelism sends",
        ),
    ] = False,
    cluster: Annotated[
        str | None,
        Parameter(
            help="with --concurrency: also where each form of parallelism ends on such devices and networks,"
            " and on ones ten times as fast; as for predict, such as 4xdgx-h100"
        ),
    ] = None,
    memory: Annotated[
        bool,
        Parameter(
            negative="", help="what lives when in a step on --device, and what less memory costs in time"
        ),
    ] = False,
    sparsity: ShowSparsity = False,
    device: Annotated[
        str | None, Parameter(help="with --memory or --sparsity: the device, as for predict, such as h200")
    ] = None,
    within: Within = None,
    apply: Apply = None,
    recorded: PrecisionOptions | None = None,
    zeros: SparsityOptions | None = None,
    captured: AnalyzedOptions | None = None,
    html: Annotated[Path | None, Parameter(help="also write a page with charts")] = None,
    json_: Json = False,
) -> None:
    """What a network is made of, and what its step holds. Say what to look at: --concurrency, --memory,
    --precision or --sparsity.

    paceline analyze resnet50 --batch 256 --concurrency

    paceline analyze llama3-8b --batch 16 --seq 4096 --precision bf16 --concurrency --cluster 32xdgx-h100

    paceline analyze resnet50 --batch 32 --memory --device h200

    paceline analyze gpt2 --batch 8 --memory --device h200 --within 8GB --apply policy.json

    paceline analyze my_net.py:build --precision --save ranges.json

    paceline analyze ranges.json --precision --layer encoder.0

    paceline analyze gpt2 --batch 8 --precision bf16 --sparsity --device h200

    paceline analyze digits-cnn --sparsity --prune 5

    Parameters
    ----------
    model
        as for `predict`; with --precision also a task of `paceline train`, or a file of --save
    """
    from paceline.errors import SpecError

    options = captured or AnalyzedOptions()
    precision = options.look_at_precision
    if concurrency + memory + precision + sparsity != 1:
        raise SpecError(
            "say what to look at: --concurrency, --memory, --precision or --sparsity, one at a time"
        )
    ranges, zeros = recorded or PrecisionOptions(), zeros or SparsityOptions()
    _refuse("--concurrency", concurrency, {"--cluster": cluster})
    _refuse("--memory or --sparsity", memory or sparsity, {"--device": device})
    _refuse("--memory", memory, {"--within": within, "--apply": apply})
    _refuse("--precision", precision, ranges.words)
    _refuse("--sparsity", sparsity, zeros.words)
    found: Concurrency | MemoryFrontier | PrecisionAnalysis | Sparsity
    said: list[str] = []
    if concurrency:
        found = _concurrency(model, cluster, options)
    elif precision:
        found, said = analyze_precision(model, options.given, ranges)
    elif sparsity:
        found = analyze_sparsity(model, device, options.given, zeros)
    else:
        found, said = analyze_memory(model, device, options.given, within, apply)
    if html is not None:
        _write(html, found)
        said.append(f"written: {html}")
    if json_:
        print_json(found.to_dict())
        return
    show(found)
    for line in said:
        print(line)


def _refuse(of: str, chosen: bool, options: dict[str, object]) -> None:
    """Raises where an option of one analysis is given without it."""
    from paceline.errors import SpecError

    given = [name for name, value in options.items() if value is not None]
    if given and not chosen:
        raise SpecError(f"{given[0]} goes with {of}; add {of}, or leave {given[0]} out")


def _write(html: Path, found: Concurrency | MemoryFrontier | PrecisionAnalysis | Sparsity) -> None:
    """A page with charts of what was found."""
    from paceline.report import page
    from paceline.report.concurrency import concurrency_page
    from paceline.report.memory_frontier import memory_page
    from paceline.report.precision import precision_page
    from paceline.report.sparsity import sparsity_page
    from paceline.spec.concurrency import Concurrency
    from paceline.spec.memory_frontier import MemoryFrontier
    from paceline.spec.sparsity import Sparsity

    command = shlex.join(["paceline", *sys.argv[1:]])
    if isinstance(found, Concurrency):
        page.write(html, concurrency_page(found, command))
    elif isinstance(found, Sparsity):
        page.write(html, sparsity_page(found, command))
    elif isinstance(found, MemoryFrontier):
        page.write(html, memory_page(found, command))
    else:
        page.write(html, precision_page(found, command))


def _concurrency(model: str, cluster: str | None, options: AnalyzedOptions) -> Concurrency:
    from paceline.catalog import clusters
    from paceline.whatif.concurrency import concurrency

    where = clusters.get(cluster) if cluster is not None else None
    return concurrency(_unfolded(model, options), where)


def _unfolded(model: str, captured: AnalyzedOptions) -> Workload:
    """A saved workload as it is; anything else captured with each of its blocks, however alike they are."""
    from paceline.cli.options import workload
    from paceline.errors import SpecError

    if captured.given.get("compile"):
        raise SpecError("--compile fuses the operators that work and depth are counted from; leave it out")
    options = captured.given
    if model.endswith(".json") and not model.startswith("hf:"):
        return workload(model, **options)
    from paceline.capture import capture

    return capture(model, fold=False, **options)
