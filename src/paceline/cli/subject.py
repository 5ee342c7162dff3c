"""What the commands that compare and explain take: a model, a cluster, a plan, and how a module is
captured.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from paceline.cli.options import (
    Batch,
    ChannelsLast,
    Checkpointing,
    Compile,
    Image,
    Optimizer,
    Precision,
    Seq,
    print_json,
    show,
)

if TYPE_CHECKING:
    from paceline.whatif.subject import Subject

Where = Annotated[
    str, Parameter(name="--cluster", help="such as 32xdgx-h100, 4x8xh100-sxm@400Gb/s/gpu or a .toml file")
]
How = Annotated[
    str, Parameter(name="--plan", help='words such as "fsdp tp=8 gbs=1024" or "terngrad", or a .toml file')
]
Plot = Annotated[Path | None, Parameter(name="--plot", help="also write a plot (.png, .svg or .pdf)")]
Html = Annotated[Path | None, Parameter(name="--html", help="also write an HTML page with the plot")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CaptureSizes:
    """Sizes of a captured step and how it runs, but for its precision."""

    batch: Batch | None = None
    seq: Seq = None
    image: Image = None
    optimizer: Optimizer = None
    checkpointing: Checkpointing = False
    compile: Compile = False
    channels_last: ChannelsLast = None

    @property
    def given(self) -> dict[str, Any]:
        """The options that were given."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value
            for name, value in found.items()
            if value is not None and (value is not False or name == "channels_last")
        }


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """How a module is captured, where the model is not a transformer of the catalog."""

    sizes: CaptureSizes | None = None
    precision: Precision | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The options that were given."""
        sizes = {} if self.sizes is None else self.sizes.given
        return sizes if self.precision is None else {**sizes, "precision": self.precision}


def subject(model: str, cluster: str, plan: str, captured: CaptureOptions | None) -> Subject:
    """The subject of a command."""
    from paceline.whatif.subject import Subject

    return Subject.of(model, cluster, plan, **(captured.given if captured is not None else {}))


def answer(found: Any, json_: bool, plot: Path | None = None, html: Path | None = None) -> None:
    """Prints an answer, and draws it where that is asked for."""
    if plot is not None:
        from paceline.report import plots

        plots.save(found, plot)
    if html is not None:
        from paceline.report import page, plots
        from paceline.spec.whatif import Change

        images = () if isinstance(found, Change) else (plots.embedded(found),)
        page.write(html, page.page(f"paceline: {type(found).__name__.lower()}", found, images=images))
    if json_:
        print_json(found.to_dict())
        return
    show(found)
    for path in filter(None, (plot, html)):
        print(f"written: {path}")
