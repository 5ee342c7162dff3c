"""`paceline predict`: one training step, on one device or many."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from paceline.cli.job import JobOptions, show_job
from paceline.cli.like import Like, planned
from paceline.cli.options import (
    Batch,
    ChannelsLast,
    Checkpointing,
    Compile,
    Image,
    Json,
    LearningFile,
    Optimizer,
    Precision,
    RequireFit,
    Seq,
    end,
    show_prediction,
    to_target,
)

if TYPE_CHECKING:
    from paceline.spec.plan import Plan
    from paceline.spec.prediction import DistributedPrediction, Prediction


def predict(
    model: str = "",
    /,
    *,
    device: Annotated[
        str | None, Parameter(name=["--device", "-d"], help="a catalog name or a .toml file")
    ] = None,
    cluster: Annotated[
        str | None,
        Parameter(
            help="several devices, such as 32xdgx-h100 or 4x8xh100-sxm@400Gb/s/gpu, instead of --device"
        ),
    ] = None,
    plan: Annotated[
        str | None, Parameter(help='how the work is split, such as "dp=fsdp tp=8 mbs=1 gbs=1024 seq=8192"')
    ] = None,
    like: Like | None = None,
    batch: Batch | None = None,
    seq: Seq = None,
    image: Image = None,
    precision: Precision | None = None,
    optimizer: Optimizer = None,
    checkpointing: Checkpointing = False,
    compile: Compile = False,
    channels_last: ChannelsLast = None,
    framework: Annotated[
        str | None,
        Parameter(help="framework that runs the step, such as torch-compile or nemo, or a .toml file"),
    ] = None,
    trace: Annotated[
        Path | None,
        Parameter(
            help="write the simulated timeline: FILE.json.gz for Perfetto, or a folder with a file per rank"
        ),
    ] = None,
    learning: LearningFile = None,
    require_fit: RequireFit = False,
    json_: Json = False,
    whole: JobOptions | None = None,
) -> None:
    """Predict one training step: time with interval, throughput, memory, bottleneck.

    Parameters
    ----------
    model
        a catalog name, FILE.py:FUNCTION, hf:PATH/config.json, torchvision:NAME, timm:NAME, or a saved
        workload (.json); optional if --like names one
    """
    from paceline import api
    from paceline.errors import SpecError

    words: str | Plan = plan or ""
    if like is not None:
        if cluster is None:
            raise SpecError("--like goes with --cluster; one device is --cluster 1xh200, for example")
        model, words = planned(like, model, plan or "")
    if not model:
        raise SpecError("give a model, or --like with a configuration that names one; see: paceline models")

    if (device is None) == (cluster is None) or (device is not None and plan is not None):
        raise SpecError("give --device for one device, or --cluster (and --plan) for many")
    given = {
        "batch": batch,
        "seq": seq,
        "image": image,
        "precision": precision,
        "optimizer": optimizer,
        "checkpointing": checkpointing or None,
        "compile": compile or None,
        "channels_last": channels_last,
        "framework": framework,
    }
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if whole is not None:
        if learning is not None:
            raise SpecError("--learning says how long a job is; leave --tokens or --epochs out")
        if not whole.asked:
            raise SpecError("a whole job needs --tokens or --epochs")
        if cluster is None:
            raise SpecError(
                "--tokens and --epochs go with --cluster; one device is --cluster 1xh200, for example"
            )
        step = api.predict(model, cluster=cluster, plan=words, **options)
        show_job(step, cluster, whole, json_)
        end(step.fit.fits, require_fit)
        return
    found: Prediction | DistributedPrediction
    if cluster is None:
        found = api.predict(model, str(device), trace=trace is not None, **options)
    else:
        found = api.predict(model, cluster=cluster, plan=words, trace=trace is not None, **options)
    show_prediction(found, trace, json_, to_target(found, learning))
    end(found.fit.fits, require_fit)
