"""The command line: each command is a few lines over a public function."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from paceline import __version__
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.spec.prediction import DistributedPrediction, Prediction
    from paceline.spec.workload import Workload

app = App(name="paceline", version=__version__, help="How fast will this network train there, how much memory does it need, and what is in the way?")


def _whole(_: Any, tokens: Sequence[Any]) -> int:
    """A size as it was written: no silent rounding of 2.5 to 2."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"expected a whole number, got {tokens[0].value!r}") from None


Batch = Annotated[int, Parameter(name=["--batch", "-b"], converter=_whole, help="samples per step")]
Seq = Annotated[int | None, Parameter(converter=_whole, help="tokens per sample, for models that take text")]
Image = Annotated[int | None, Parameter(converter=_whole, help="side of the square images, for models that take them")]
Precision = Annotated[str, Parameter(help="fp32, tf32, bf16, fp16, amp_bf16 or amp_fp16")]
Optimizer = Annotated[str | None, Parameter(help="sgd, sgd-plain, adam or adamw, each also -fused, -foreach, -single")]
Checkpointing = Annotated[bool, Parameter(negative="", help="recompute the activations of repeated blocks")]
Compile = Annotated[bool, Parameter(negative="", help="fuse as torch.compile does")]
ChannelsLast = Annotated[bool | None, Parameter(help="memory layout of images; by default what the model is usually run in")]
Json = Annotated[bool, Parameter(name="--json", negative="", help="print JSON")]


def _print(thing: Any) -> None:
    from rich.console import Console

    console = Console()
    # a pipe has no width of its own: keep lines whole for grep
    (console if console.is_terminal else Console(width=160)).print(thing)


def _workload(
    model: str, batch: int | None, seq: int | None, image: int | None, precision: str | None, optimizer: str | None, checkpointing: bool,
    compile: bool, channels_last: bool | None,
) -> Workload:
    """A saved workload as it is, anything else captured."""
    from paceline.errors import SpecError
    from paceline.spec.workload import Workload

    if model.endswith(".json") and not model.startswith("hf:"):
        given = [n for n, v in (("--batch", batch), ("--seq", seq), ("--image", image), ("--precision", precision), ("--optimizer", optimizer),
                                ("--checkpointing", checkpointing or None), ("--channels-last", channels_last)) if v is not None]
        if given:
            raise SpecError(f"{model} is a captured workload, whose {given[0][2:]} is fixed; capture it again to change it")
        workload = Workload.load(Path(model))
        if not compile:
            return workload
        from paceline.capture.fuse import fuse

        return fuse(workload)
    from paceline.capture import capture

    return capture(
        model, batch=1 if batch is None else batch, seq=seq, image=image, precision=precision or "fp32", optimizer=optimizer,
        checkpointing=checkpointing, channels_last=channels_last, compile=compile,
    )


@app.command
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
        captured = _workload(model, batch, seq, image, precision, optimizer, checkpointing, compile, channels_last)
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
    workload = _workload(model, batch, seq, image, precision, optimizer, checkpointing, compile, channels_last)
    _show(run(workload, target, trace=trace is not None), trace, json_)


def _show(prediction: Prediction | DistributedPrediction, trace: Path | None, json_: bool) -> None:
    """Prints a prediction, and writes its trace where one is asked for."""
    if trace is not None and prediction.timeline is not None:
        prediction.timeline.save(trace)
    if json_:
        print(json.dumps(prediction.to_dict()))
    else:
        _print(prediction)
        if trace is not None:
            print(f"trace written to {trace}")


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

    _show(run(workload, clusters.get(cluster), Plan.parse(plan)), None, json_)


def _predict_distributed(model: str, cluster: str, plan: str, others: Sequence[str], trace: Path | None, json_: bool) -> None:
    """A transformer under a parallel plan, simulated."""
    from paceline.catalog import clusters, transformers
    from paceline.errors import SpecError
    from paceline.predict.simulated import predict as run
    from paceline.spec.plan import Plan

    if others:
        raise SpecError(f"{others[0]} does not go with --cluster; batch, sequence, precision and recomputation are words of --plan")
    _show(run(transformers.get(model), clusters.get(cluster), Plan.parse(plan), trace=trace is not None), trace, json_)


@app.command
def capture(
    model: str, /, *, output: Annotated[Path, Parameter(name=["--output", "-o"], help="the file to write")], batch: Batch = 1, seq: Seq = None,
    image: Image = None, precision: Precision = "fp32", optimizer: Optimizer = None, checkpointing: Checkpointing = False,
    channels_last: ChannelsLast = None,
) -> None:
    """Capture a model's training step into a file, to predict from later without torch.

    Parameters
    ----------
    model
        a catalog name, FILE.py:FUNCTION, hf:PATH/config.json, torchvision:NAME or timm:NAME
    """
    workload = _workload(model, batch, seq, image, precision, optimizer, checkpointing, False, channels_last)
    workload.save(output)
    operators = sum(len(workload.segments[i].ops) for i in workload.order)
    found = f"{workload.parameter_count:,} parameters, {operators:,} operators in {len(workload.segments)} distinct segments"
    print(f"{output}: {workload.name}, {found}")


@app.command(name="devices")
def devices_(*names: str, json_: Json = False) -> None:
    """List the catalog's devices, or every fact of those named, with sources."""
    from paceline.catalog import devices
    from paceline.report import catalog

    chosen = [devices.get(name) for name in (names or devices.names())]
    if json_:
        print(json.dumps([catalog.device_dict(d) for d in chosen]))
    else:
        for view in [catalog.device_facts(d) for d in chosen] if names else [catalog.device_table(chosen)]:
            _print(view)


@app.command(name="clusters")
def clusters_(*names: str, json_: Json = False) -> None:
    """List the catalog's clusters, or every fact of those named (such as 4xdgx-h100, or a .toml file), with sources."""
    from paceline.catalog import clusters
    from paceline.report import catalog

    chosen = [clusters.get(name) for name in (names or clusters.names())]
    if json_:
        print(json.dumps([catalog.cluster_dict(c) for c in chosen]))
    else:
        for view in [catalog.cluster_facts(c) for c in chosen] if names else [catalog.cluster_table(chosen)]:
            _print(view)


@app.command(name="models")
def models_(*, json_: Json = False) -> None:
    """List the catalog's models, with parameter counts and sources."""
    from paceline.report import catalog

    if json_:
        print(json.dumps(catalog.model_dicts()))
    else:
        _print(catalog.model_table())


@app.command
def calibrate(
    *, output: Annotated[Path, Parameter(name=["--output", "-o"], help="the device file to write")] = Path("this-machine.toml"),
    seconds: Annotated[float, Parameter(help="how long to measure, about")] = 30.0,
) -> None:
    """Measure this machine (its GPU, or the CPU where there is none) into a device file."""
    from paceline.bench.calibrate import calibrate as run

    print(run(output, seconds))


@app.command
def validate(
    *sets: str, data: Annotated[Path | None, Parameter(env_var="PACELINE_DATA", help="folder with measurement sets")] = None,
    rows: Annotated[Path | None, Parameter(help="write each row with its prediction as CSV")] = None,
    leave_out_device: Annotated[bool, Parameter(negative="", help="predict each device with curves fitted without it")] = False, json_: Json = False,
) -> None:
    """Score predictions against measurements: error, bias and coverage per set, beside the naive guess."""
    from paceline.bench.validate import board, run
    from paceline.report.catalog import validation_table

    scores = run(sets, data, rows_file=rows, leave_out_device=leave_out_device)
    if json_:
        print(json.dumps(board(scores)))
    else:
        for view in validation_table(scores):
            _print(view)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, on the process's own arguments unless given; a user's mistake is one line on stderr and exit code 2."""
    try:
        app(sys.argv[1:] if arguments is None else arguments, print_error=False, exit_on_error=False)
    except (PacelineError, CycloptsError) as error:
        text = str(error) if isinstance(error, PacelineError) else " ".join(str(error).split())
        print(f"paceline: {text}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()


if __name__ == "__main__":
    main()
