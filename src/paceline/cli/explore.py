"""`paceline explore`: a local page with sliders that answers as they move."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter


def explore(
    model: str = "llama3-70b",
    /,
    *,
    cluster: Annotated[
        str, Parameter(help="such as 32xdgx-h100, 4x8xh100-sxm@400Gb/s/gpu or a .toml file")
    ] = "16xdgx-h100",
    plan: Annotated[str, Parameter(help='words such as "fsdp tp=8 gbs=1024", or a .toml file')] = "",
    port: Annotated[int, Parameter(help="port; 0 picks a free one")] = 0,
    browser: Annotated[bool, Parameter(help="open the page in a browser")] = True,
) -> None:
    """Open a page with sliders: everything redraws while they move. Serves this machine only.

    Parameters
    ----------
    model
        as for `predict`; or a link that the page made, to restore what it shows
    """
    from paceline.web.start import start

    start(model, cluster, plan, port=port, browser=browser)
