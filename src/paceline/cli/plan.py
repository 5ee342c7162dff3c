"""`paceline plan`: the best way to run a model on a cluster, with a certificate."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.cli.options import Image, Json, Optimizer, Precision, Seq, show, whole

if TYPE_CHECKING:
    from paceline.plan.search import Progress

Words = Annotated[list[str] | None, Parameter(consume_multiple=True)]


def plan(
    model: str, /, *, cluster: Annotated[str | None, Parameter(help="such as 32xdgx-h100; or --gpus and --device")] = None,
    gpus: Annotated[str | None, Parameter(help="a range of sizes to choose from, such as 64..4096, of --device")] = None,
    device: Annotated[str | None, Parameter(name=["--device", "-d"], help="the device of --gpus")] = None,
    gbs: Annotated[int | None, Parameter(converter=whole, help="samples per step, of all devices")] = None, seq: Seq = None, image: Image = None,
    precision: Precision | None = None, optimizer: Optimizer = None,
    objective: Annotated[str, Parameter(help="time, cost or energy")] = "time",
    tokens: Annotated[str | None, Parameter(help="of the whole job, such as 300B: says how long and what it costs")] = None,
    deadline: Annotated[str | None, Parameter(help="the job may take at most, such as 30d; with --tokens")] = None,
    fix: Annotated[Words, Parameter(help="words of a plan that are given, such as tp=8")] = None,
    forbid: Annotated[Words, Parameter(help="words or fields that no plan may have, such as offload or zb-v")] = None,
    allow: Annotated[Words, Parameter(help="what may change training: fp8; for captured models compress, staleness, batch")] = None,
    top: Annotated[int, Parameter(converter=whole, help="plans to list")] = 10,
    pareto: Annotated[str | None, Parameter(help="also the front over some of time,cost,energy,memory,gpus")] = None,
    most: Annotated[int, Parameter(converter=whole, help="plans to simulate at most")] = 256,
    emit: Annotated[str | None, Parameter(help="write what runs it: torchrun,fsdp2,megatron,deepspeed,accelerate,torchtitan,slurm")] = None,
    output: Annotated[Path, Parameter(name=["--output", "-o"], help="the folder for --emit")] = Path("run"),
    html: Annotated[Path | None, Parameter(help="also write the answer as a page")] = None, json_: Json = False,
) -> None:
    """Find the best plan: degrees, batch split, schedule, sharding, recomputation; proven within a gap, with the runners-up and why they lost.

    Parameters
    ----------
    model
        a transformer of the catalog or hf:PATH for the whole space of plans; any other model is captured and shares its work by data
    """
    from paceline import units
    from paceline.api import plan as run

    captured = {"image": image, "precision": precision, "optimizer": optimizer}
    with _progress(json_) as progress:
        found = run(
            model, cluster=cluster, gpus=gpus, device=device, gbs=gbs, seq=seq, objective=objective, fix=_split(fix), forbid=_split(forbid),
            allow=_split(allow), tokens=units.parse(tokens, "count") if tokens else None,
            deadline_s=units.parse(deadline, "time") if deadline else None, top=top,
            pareto=_split([pareto] if pareto else None), most=most, progress=progress,
            **{name: value for name, value in captured.items() if value is not None})
    if html is not None:
        from paceline.report import page
        from paceline.report.plan import planned_html

        page.write(html, planned_html(found))
    written = []
    if emit:
        from paceline.plan.emit import emit as write

        written = write(found, _split([emit]), output)
    if json_:
        print(json.dumps(found.to_dict()))
    else:
        show(found)
        for path in written:
            print(f"wrote {path}")


def _split(words: list[str] | None) -> list[str]:
    return [word for text in words or () for word in text.replace(",", " ").split()]


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress | None]:
    """A bar on a terminal's standard error, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("planning", total=None)
        yield lambda what, done, total, best: bars.update(task, description=what, completed=done, total=total)
