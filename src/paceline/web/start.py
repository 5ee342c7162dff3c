"""Starts the explorer from the words of the command line."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path

from paceline.api import sizes
from paceline.errors import SpecError
from paceline.spec.plan import Plan
from paceline.web.scenario import Scenario, Sources
from paceline.web.server import serve

#: a folder without uploads
_NOWHERE = Path("/nonexistent")


def _usual(model: str) -> str:
    """A plan to begin with: sharded data parallel, with tensor parallelism inside nodes where it applies."""
    return "fsdp tp=8 gbs=512 recompute=selective" if sizes(model) is not None else "ddp"


def start(model: str, cluster: str, plan: str, *, port: int, browser: bool) -> None:
    """Checks the first scenario, serves it, and opens a browser."""
    link, mark, fragment = model.partition("#")
    if mark and link.startswith("http://"):
        first, given = Scenario(model="llama3-70b", cluster="16xdgx-h100"), frozenset[str]()
    else:
        words = str(Plan.parse(plan)) if plan.strip().endswith(".toml") else plan
        first = Scenario(model=model, cluster=cluster, plan=words or _usual(model))
        given = frozenset({model, cluster})
        Sources(uploads=_NOWHERE, given=given).subject(first)

    def opened(address: str) -> None:
        whole = f"{address}#{fragment}" if mark else address
        print(f"paceline explore: {whole}\nopen this address on this machine; Ctrl-C ends it", flush=True)
        if browser and not webbrowser.open(whole):
            print("no browser could be opened here", file=sys.stderr)

    if not 0 <= port < 65_536:
        raise SpecError(f"--port is 0 to 65535, got {port}")
    try:
        serve(first, given, port=port, opened=opened)
    except OSError as error:
        raise SpecError(f"cannot listen on port {port}: {error.strerror}") from None
