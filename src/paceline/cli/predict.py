"""`paceline predict`: one training step, on one device or many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.cli.options import Batch, ChannelsLast, Checkpointing, Compile, Image, Json, Optimizer, Precision, Seq, show_prediction, workload
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.spec.workload import Workload


def predict(
    model: str, /, *, device: Annotated[str | None, Parameter(name=["--device", "-d"], help="a catalog name or a .toml file")] = None,
    cluster: Annotated[str | None, Parameter(help="many devices, such as 32xdgx-h100 or 4x8xh100-sxm@400Gb/s, in place of --device")] = None,
    plan: Annotated[str | None, Parameter(help='how they share the work, such as "dp=fsdp tp=8 mbs=1 gbs=1024 seq=8192"')] = None,
    batch: Batch | None = None, seq: Seq = None, image: Image = None, precision: Precision | None = None, optimizer: Optimizer = None,
    checkpointing: Checkpointing = False, compile: Compile = False, channels_last: ChannelsLast = None,
    trace: Annotated[Path | None, Parameter(help="also write the simulated step as a trace for Perfetto")] = None, json_: Json = False,
) -> None:
    """Predict one training step: time with interval, throughput, memory, bottleneck.

    Parameters
    ----------
    model
        a catalog name, FILE.py:FUNCTION, hf:PATH/config.json, torchvision:NAME, timm:NAME, or a saved workload (.json)
    """
    from paceline.catalog import devices
    from paceline.errors import SpecError
    from paceline.predict.step import predict as run

    if cluster is not None and not _is_transformer(model):
        if device is not None or trace is not None:
            raise SpecError(f"{'--device' if device is not None else '--trace'} does not go with --cluster for {model}")
        if not model.endswith(".json"):  # what is saved is fixed
            batch, seq, precision, checkpointing = _settings(plan or "", batch, seq, precision, checkpointing)
        captured = workload(model, batch, seq, image, precision, optimizer, checkpointing, compile, channels_last)
        _predict_captured(captured, cluster, plan or "", json_)
        return
    if cluster is not None:
        given = {"--device": device, "--batch": batch, "--seq": seq, "--image": image, "--precision": precision, "--optimizer": optimizer,
                 "--checkpointing": checkpointing or None, "--compile": compile or None, "--channels-last": channels_last}
        _predict_distributed(model, cluster, plan or "", [name for name, value in given.items() if value is not None], trace, json_)
        return
    if device is None or plan is not None:
        raise SpecError("give --device for one device, or --cluster (and --plan) for many")
    target = devices.get(device)
    captured = workload(model, batch, seq, image, precision, optimizer, checkpointing, compile, channels_last)
    show_prediction(run(captured, target, trace=trace is not None), trace, json_)


def _is_transformer(model: str) -> bool:
    """Whether a model is known by its sizes, so that all plans apply; any other is captured, and split by data."""
    from paceline.catalog import transformers

    try:
        return bool(transformers.get(model))
    except PacelineError:
        return model.startswith("hf:")


def _settings(
    plan: str, batch: int | None, seq: int | None, precision: str | None, checkpointing: bool,
) -> tuple[int | None, int | None, str | None, bool]:
    """How to capture a model for a plan: as its options say, else as the plan does (`mbs`, `seq`, a precision, `recompute=full`)."""
    from paceline.spec.plan import Plan

    given = Plan.parse(plan)
    said = given.precision != Plan.precision or Plan.precision in plan
    return (
        given.mbs or None if batch is None else batch, given.seq or None if seq is None else seq,
        precision or (given.precision if said else None), checkpointing or given.recompute == "full",
    )


def _predict_captured(workload: Workload, cluster: str, plan: str, json_: bool) -> None:
    """Any captured module, data parallel or sharded."""
    from paceline.catalog import clusters
    from paceline.predict.parallel import predict as run
    from paceline.spec.plan import Plan

    show_prediction(run(workload, clusters.get(cluster), Plan.parse(plan)), None, json_)


def _predict_distributed(model: str, cluster: str, plan: str, others: Sequence[str], trace: Path | None, json_: bool) -> None:
    """A transformer under a parallel plan, simulated."""
    from paceline.catalog import clusters, transformers
    from paceline.errors import SpecError
    from paceline.predict.simulated import predict as run
    from paceline.spec.plan import Plan

    if others:
        raise SpecError(f"{others[0]} does not go with --cluster; batch, sequence, precision and recomputation are words of --plan")
    show_prediction(run(transformers.get(model), clusters.get(cluster), Plan.parse(plan), trace=trace is not None), trace, json_)
