"""`paceline capture`: a training step into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.cli.options import (
    Batch,
    ChannelsLast,
    Checkpointing,
    Image,
    Optimizer,
    Precision,
    Seq,
    workload,
)


def capture(
    model: str,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"], help="file to write")],
    batch: Batch = 1,
    seq: Seq = None,
    image: Image = None,
    precision: Precision | None = None,
    optimizer: Optimizer = None,
    checkpointing: Checkpointing = False,
    channels_last: ChannelsLast = None,
) -> None:
    """Capture a model's training step into a file, to predict from later without torch.

    Parameters
    ----------
    model
        a catalog name, FILE.py:FUNCTION, hf:PATH/config.json, torchvision:NAME or timm:NAME
    """
    captured = workload(model, batch, seq, image, precision, optimizer, checkpointing, False, channels_last)
    captured.save(output)
    operators = sum(len(captured.segments[i].ops) for i in captured.order)
    found = (
        f"{captured.parameter_count:,} parameters, {operators:,} operators in {len(captured.segments)}"
        " distinct segments"
    )
    print(f"{output}: {captured.name}, {found}")
