"""Every command of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from paceline import __version__
from paceline.cli import (
    analyze,
    bench,
    calibrate,
    capture,
    catalog,
    check,
    compare,
    diagnose,
    explain,
    explore,
    plan,
    predict,
    profile,
    schedule,
    simulate,
    throughput,
    train,
    validate,
    whatif,
)
from paceline.extend import load_all

app = App(
    name="paceline",
    version=__version__,
    suppress_keyboard_interrupt=False,
    help="Predict, plan, run and schedule distributed training of neural networks.",
)
app.meta.suppress_keyboard_interrupt = False

for _command in (
    predict.predict,
    plan.plan,
    compare.compare,
    whatif.whatif,
    explain.explain,
    diagnose.diagnose,
    analyze.analyze,
    explore.explore,
    simulate.simulate,
    capture.capture,
    calibrate.calibrate,
    validate.validate,
    train.train,
    check.check,
    profile.profile,
    throughput.throughput,
    schedule.schedule,
    schedule.submit,
    schedule.queue,
    schedule.eta,
    schedule.cancel,
):
    app.command(_command)
app.command(bench.app)
for _listing, _name in (
    (catalog.devices_, "devices"),
    (catalog.clusters_, "clusters"),
    (catalog.frameworks_, "frameworks"),
    (catalog.models_, "models"),
):
    app.command(_listing, name=_name)


@app.meta.default
def _extended(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    extend: Annotated[
        list[Path] | None,
        Parameter(
            negative="",
            group="Every command",
            help=(
                "a Python file to run first, which registers your own policy, emitter, schedule...; may be"
                " repeated"
            ),
        ),
    ] = None,
) -> None:
    """Runs the files that a user named, then the command."""
    load_all([str(file) for file in extend or ()])
    app(words, print_error=False, exit_on_error=False)
