"""`paceline train`: ready-made tasks under one or several strategies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.cli.options import Json, show, whole


def train(
    *, task: Annotated[str, Parameter(help="digits-cnn or text-mlp")] = "digits-cnn",
    strategy: Annotated[str, Parameter(help="one or several, separated by commas: ddp, allreduce, overlap, terngrad, dgc, auto...")] = "ddp",
    world: Annotated[int, Parameter(name=["--world", "--workers"], converter=whole, help="ranks or workers, as processes of this machine")] = 2,
    servers: Annotated[int | None, Parameter(converter=whole, help="parameter servers, for ps-... and easgd")] = None,
    staleness: Annotated[int | None, Parameter(converter=whole, help="updates that a gradient may be late, for ps-bounded")] = None,
    seeds: Annotated[int, Parameter(converter=whole, help="runs of each, with seeds 0, 1...")] = 1,
    steps: Annotated[int | None, Parameter(converter=whole, help="steps; by default the task's epochs")] = None,
    batch: Annotated[int | None, Parameter(converter=whole, help="samples per step, of all ranks together")] = None,
    lr: Annotated[float | None, Parameter(help="learning rate; by default the task's")] = None,
    optimizer: Annotated[str, Parameter(help="sgd or lars")] = "sgd",
    warmup: Annotated[int, Parameter(converter=whole, help="steps over which the learning rate rises")] = 0,
    record: Annotated[Path | None, Parameter(help="folder for the record of the run, which `paceline check` reads")] = None,
    checkpoint: Annotated[Path | None, Parameter(help="folder for checkpoints; a run that finds one there goes on from it")] = None,
    json_: Json = False,
) -> None:
    """Train a task on real data under each strategy: accuracy over seeds, and time to the task's target."""
    from paceline.train.tasks.compare import compare

    found = compare(task, strategy.split(","), world=world, seeds=seeds, steps=steps, batch=batch, lr=lr, optimizer=optimizer, warmup=warmup,
                    record=record, checkpoint=checkpoint, servers=servers, staleness=staleness)
    if json_:
        print(json.dumps(found.to_dict()))
    else:
        show(found)
