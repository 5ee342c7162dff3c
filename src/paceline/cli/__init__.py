"""The command line: each command is a file here, a few lines over a public function, which it imports when called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from paceline import __version__
from paceline.cli import (
    bench,
    calibrate,
    capture,
    catalog,
    check,
    compare,
    explain,
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
from paceline.errors import PacelineError
from paceline.extend import load_all

app = App(name="paceline", version=__version__, help="How fast will this network train there, how much memory does it need, and what is in the way?")

for _command in (
    predict.predict, plan.plan, compare.compare, whatif.whatif, explain.explain, simulate.simulate, capture.capture, calibrate.calibrate,
    validate.validate, train.train, check.check, profile.profile, throughput.throughput,
    schedule.schedule, schedule.submit, schedule.queue, schedule.eta, schedule.cancel,
):
    app.command(_command)
app.command(bench.app)
for _listing, _name in (
    (catalog.devices_, "devices"), (catalog.clusters_, "clusters"), (catalog.frameworks_, "frameworks"), (catalog.models_, "models"),
):
    app.command(_listing, name=_name)


@app.meta.default
def _extended(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    extend: Annotated[list[Path] | None, Parameter(
        negative="", group="Every command",
        help="a Python file to run first, which registers a policy, emitter, schedule...; may be repeated",
    )] = None,
) -> None:
    """Runs the files that a user named, then the command."""
    load_all([str(file) for file in extend or ()])
    app(words, print_error=False, exit_on_error=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, on the process's own arguments unless given; a user's mistake is one line on stderr and exit code 2."""
    try:
        app.meta(sys.argv[1:] if arguments is None else arguments, print_error=False, exit_on_error=False)
    except (PacelineError, CycloptsError) as error:
        text = str(error) if isinstance(error, PacelineError) else " ".join(str(error).split())
        print(f"paceline: {text}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
