"""The command line: each command is a file here, a few lines over a public function, which it imports when
called.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from paceline.errors import PacelineError, missing_extra


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, on the process's own arguments unless given; a user's mistake is one line on
    stderr and exit code 2.

    Ctrl-C is one line on stderr and exit code 130, while the commands are imported too.
    """
    try:
        _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt as stop:
        print(f"paceline: interrupted: {stop}".removesuffix(": "), file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()


def _run(arguments: Sequence[str]) -> None:
    from cyclopts import CycloptsError

    from paceline.cli.commands import app

    try:
        app.meta(arguments, print_error=False, exit_on_error=False)
    except (PacelineError, CycloptsError) as error:
        text = str(error) if isinstance(error, PacelineError) else " ".join(str(error).split())
        print(f"paceline: {text}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        missing = missing_extra(error, f"paceline {arguments[0]}" if arguments else "paceline")
        if missing is None:
            raise
        print(f"paceline: {missing}", file=sys.stderr)
        sys.exit(2)
