"""`paceline analyze`: what a network is made of, whatever it runs on."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.cli.options import Json, print_json, show
from paceline.cli.subject import CaptureOptions

if TYPE_CHECKING:
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
    captured: CaptureOptions | None = None,
    html: Annotated[Path | None, Parameter(help="also write a page with charts")] = None,
    json_: Json = False,
) -> None:
    """What a network is made of. Say what to look at: --concurrency.

    paceline analyze resnet50 --batch 256 --concurrency

    paceline analyze llama3-8b --batch 16 --seq 4096 --precision bf16 --concurrency --cluster 32xdgx-h100

    paceline analyze my_net.py:build --concurrency --json

    Parameters
    ----------
    model
        as for `predict`
    """
    from paceline.catalog import clusters
    from paceline.errors import SpecError

    if not concurrency:
        raise SpecError("say what to look at: --concurrency")
    where = clusters.get(cluster) if cluster is not None else None
    from paceline.report.concurrency import concurrency_page
    from paceline.whatif.concurrency import concurrency as run

    found = run(_unfolded(model, captured or CaptureOptions()), where)
    if html is not None:
        from paceline.report import page

        page.write(html, concurrency_page(found, shlex.join(["paceline", *sys.argv[1:]])))
    if json_:
        print_json(found.to_dict())
        return
    show(found)
    if html is not None:
        print(f"written: {html}")


def _unfolded(model: str, captured: CaptureOptions) -> Workload:
    """A saved workload as it is; anything else captured with each of its blocks, however alike they are."""
    from paceline.cli.options import workload
    from paceline.errors import SpecError

    if captured.compile:
        raise SpecError("--compile fuses the operators that work and depth are counted from; leave it out")
    options = captured.given
    if model.endswith(".json") and not model.startswith("hf:"):
        given = dict.fromkeys(("batch", "seq", "image", "precision", "optimizer", "channels_last"))
        return workload(model, **{**given, "checkpointing": False, "compile": False, **options})
    from paceline.capture import capture

    return capture(model, fold=False, **options)
