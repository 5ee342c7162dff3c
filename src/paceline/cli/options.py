"""Options that several commands share, and how commands print."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from paceline.spec.learning import TimeToTarget
    from paceline.spec.prediction import DistributedPrediction, Prediction
    from paceline.spec.workload import Workload


def whole(_: Any, tokens: Sequence[Any]) -> int:
    """A size as it was written: no silent rounding of 2.5 to 2."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"expected a whole number, got {tokens[0].value!r}") from None


Batch = Annotated[int, Parameter(name=["--batch", "-b"], converter=whole, help="samples per step")]
Seq = Annotated[
    int | None,
    Parameter(
        converter=whole,
        help=(
            "tokens per sample, for text models; hf: models default to 4096, or their maximum if that is less"
        ),
    ),
]
Image = Annotated[int | None, Parameter(converter=whole, help="side of the square images, for image models")]
Precision = Annotated[
    str, Parameter(help="fp32 (default), tf32, bf16 (default for hf: models), fp16, amp_bf16 or amp_fp16")
]
Optimizer = Annotated[
    str | None, Parameter(help="sgd, sgd-plain, adam or adamw, each also -fused, -foreach, -single")
]
Checkpointing = Annotated[bool, Parameter(negative="", help="recompute the activations of repeated blocks")]
Compile = Annotated[bool, Parameter(negative="", help="fuse as torch.compile does")]
ChannelsLast = Annotated[
    bool | None, Parameter(help="memory layout of images; by default the usual one of the model")
]
RequireFit = Annotated[
    bool,
    Parameter(
        negative="",
        help=("exit with code 1 if the step does not fit into memory; by default the exit code is 0"),
    ),
]
LearningFile = Annotated[
    str | None,
    Parameter(
        name="--learning",
        help=(
            "a record of learning (`paceline bench tta` writes them), FILE or FILE:CURVE: also the time to"
            " its target"
        ),
    ),
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="print JSON")]


def show(thing: Any) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal and not os.environ.get("COLUMNS", "").strip("0").isdigit():
        console = Console(width=160)  # a pipe has no width of its own: keep lines whole for grep
    console.print(thing)


def print_json(answer: Any) -> None:
    """Prints plain data as one line of JSON, for every --json; numbers that are not finite are null."""
    from paceline.report import plain

    print(plain.text(answer))


def end(fits: bool, require_fit: bool) -> None:
    """Ends a command that has printed its answer: with code 1 where that does not fit and has to."""
    if require_fit and not fits:
        sys.exit(1)


def workload(
    model: str,
    batch: int | None = None,
    seq: int | None = None,
    image: int | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    checkpointing: bool = False,
    compile: bool = False,
    channels_last: bool | None = None,
) -> Workload:
    """A saved workload as it is, anything else captured."""
    from paceline.errors import SpecError
    from paceline.spec.workload import Workload

    if model.endswith(".json") and not model.startswith("hf:"):
        saved = Workload.load(Path(model))
        given = [
            n
            for n, v in (
                ("--batch", batch),
                ("--seq", seq),
                ("--image", image),
                ("--precision", precision),
                ("--optimizer", optimizer),
                ("--checkpointing", checkpointing or None),
                ("--channels-last", channels_last),
            )
            if v is not None
        ]
        if given:
            raise SpecError(
                f"{model} is a captured workload, whose {given[0][2:]} is fixed; capture it again to"
                " change it"
            )
        if not compile:
            return saved
        from paceline.capture.fuse import fuse

        return fuse(saved)
    from paceline.capture import capture

    return capture(
        model,
        batch=1 if batch is None else batch,
        seq=seq,
        image=image,
        precision=precision,
        optimizer=optimizer,
        checkpointing=checkpointing,
        channels_last=channels_last,
        compile=compile,
    )


def to_target(prediction: Prediction | DistributedPrediction, learning: str | None) -> TimeToTarget | None:
    """The time to the target of a record, where one is given."""
    if learning is None:
        return None
    from paceline.spec.learning import named

    record, curve = named(learning)
    return record.time(prediction, curve)


def show_prediction(
    prediction: Prediction | DistributedPrediction,
    trace: Path | None,
    json_: bool,
    target: TimeToTarget | None = None,
) -> None:
    """Prints a prediction, and writes its trace where one is asked for."""
    if trace is not None:
        if prediction.timeline is None:
            from paceline.errors import SpecError

            raise SpecError(
                f"--trace {trace}: steps of this plan are predicted without a timeline; leave --trace out"
            )
        prediction.timeline.save(trace)
    if json_:
        besides = {} if target is None else {"time_to_target": target.to_dict()}
        print_json({**prediction.to_dict(), **besides})
    else:
        show(prediction)
        if target is not None:
            show(target)
        if trace is not None:
            print(f"trace written to {trace}")
