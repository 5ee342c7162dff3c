"""`paceline train`: ready-made tasks under one or several strategies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.cli.options import Json, print_json, show, whole
from paceline.errors import RunError


def train(
    *,
    task: Annotated[
        str,
        Parameter(
            help="digits-cnn, digits-deep, digits-shifted, text-mlp or text-small; mnist:FOLDER,"
            " cifar10:FOLDER or images:FOLDER for data of your own"
        ),
    ] = "digits-cnn",
    strategy: Annotated[
        str,
        Parameter(
            help="strategies or plans, separated by commas: ddp, overlap, dgc, auto, 'diloco period=20'..."
        ),
    ] = "ddp",
    world: Annotated[
        int,
        Parameter(
            name=["--world", "--workers"],
            converter=whole,
            help="ranks or workers, as processes of this machine",
        ),
    ] = 2,
    servers: Annotated[
        int | None, Parameter(converter=whole, help="parameter servers, for ps-... and easgd")
    ] = None,
    staleness: Annotated[
        int | None, Parameter(converter=whole, help="bound on staleness in updates, for ps-bounded")
    ] = None,
    seeds: Annotated[int, Parameter(converter=whole, help="number of seeds per strategy")] = 1,
    seed: Annotated[int, Parameter(converter=whole, help="first seed")] = 0,
    jobs: Annotated[
        int, Parameter(converter=whole, help="runs at the same time; makes their times meaningless")
    ] = 1,
    steps: Annotated[
        int | None, Parameter(converter=whole, help="steps; by default the task's epochs")
    ] = None,
    batch: Annotated[
        int | None, Parameter(converter=whole, help="samples per step, of all ranks together")
    ] = None,
    lr: Annotated[float | None, Parameter(help="learning rate; by default the task's")] = None,
    optimizer: Annotated[str, Parameter(help="sgd or lars")] = "sgd",
    weight_decay: Annotated[float | None, Parameter(help="by default the task's")] = None,
    warmup: Annotated[
        int | None,
        Parameter(
            converter=whole, help="steps over which the learning rate rises; by default the task's share"
        ),
    ] = None,
    grow_batch: Annotated[
        float | None,
        Parameter(help="multiply the batch by this factor, twice, instead of lowering the learning rate"),
    ] = None,
    noise_scale: Annotated[
        bool, Parameter(negative="", help="record the gradient noise scale of each step")
    ] = False,
    record: Annotated[
        Path | None, Parameter(help="folder for the record of the run, which `paceline check` reads")
    ] = None,
    board: Annotated[
        bool, Parameter(negative="", help="also write scalars for TensorBoard into the record's folder")
    ] = False,
    checkpoint: Annotated[
        Path | None, Parameter(help="folder for checkpoints; a run resumes from the newest one there")
    ] = None,
    every: Annotated[int, Parameter(converter=whole, help="steps between checkpoints")] = 50,
    json_: Json = False,
) -> None:
    """Train a task on real data under each strategy: accuracy over seeds, and time to the task's target. A
    job for `paceline schedule`, too.
    """
    from paceline.train.launch import Place
    from paceline.train.tasks.compare import compare

    try:
        found = compare(
            task,
            strategy.split(","),
            world=world,
            seeds=seeds,
            seed=seed,
            steps=steps,
            batch=batch,
            lr=lr,
            optimizer=optimizer,
            weight_decay=weight_decay,
            warmup=warmup,
            growth=grow_batch,
            noise=noise_scale,
            record=record,
            board=board,
            checkpoint=checkpoint,
            every=every,
            servers=servers,
            staleness=staleness,
            jobs=jobs,
        )
    except RunError as error:
        if not error.signal or Place.given() is None:
            raise
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(128 + error.signal)  # a scheduler starts again what was killed, and gives up what failed
    if json_:
        print_json(found.to_dict())
    else:
        show(found)
