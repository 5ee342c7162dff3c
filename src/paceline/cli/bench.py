"""`paceline bench`: measurements on an emulated cluster, predictions beside them."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from paceline.cli.options import Json, print_json, show, whole
from paceline.cli.throughput import score

app = App(
    name="bench",
    help=(
        "Measure on an emulated cluster: hosts are network namespaces with shaped links (needs root on"
        " Linux)."
    ),
)

Hosts = Annotated[str, Parameter(help="number of hosts; several with commas")]
Link = Annotated[
    str,
    Parameter(help="rate of each host's link, such as 100Mbit/s, 1Gbit/s or unshaped; several with commas"),
]


def _links(text: str) -> list[float | None]:
    from paceline.units import parse

    return [
        None if word.strip() == "unshaped" else parse(word.strip(), "bandwidth") for word in text.split(",")
    ]


def _counts(text: str) -> list[int]:
    from paceline.errors import SpecError

    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise SpecError(f"hosts are whole numbers separated by commas; got {text!r}") from None


@app.command
def strategies(
    *,
    hosts: Hosts = "2",
    link: Link = "100Mbit/s",
    model: Annotated[str, Parameter(help="cnn, vgg-like or mlp, each 20 to 30 MB of gradients")] = "cnn",
    strategy: Annotated[
        str, Parameter(help="strategies, separated by commas; `none` does not communicate")
    ] = "",
    seconds: Annotated[
        float, Parameter(help="time for the steps of one strategy per round; at least one step")
    ] = 1.0,
    rounds: Annotated[
        int, Parameter(converter=whole, help="rounds over all strategies; the median counts")
    ] = 2,
    batch: Annotated[int | None, Parameter(converter=whole, help="samples per step of one rank")] = None,
    cpus: Annotated[float | None, Parameter(help="cores of each host")] = None,
    json_: Json = False,
) -> None:
    """Time training steps under each strategy, predicted and measured side by side, with the bytes on the
    wire.
    """
    from paceline.bench.strategies import STRATEGIES, compare

    found = compare(
        model=model,
        strategies=strategy.split(",") if strategy else STRATEGIES,
        hosts=_counts(hosts),
        links=_links(link),
        seconds=seconds,
        rounds=rounds,
        batch=batch,
        cpus=cpus,
    )
    if json_:
        print_json(found.to_dict())
    else:
        show(found)


@app.command
def collectives(
    *,
    hosts: Hosts = "2",
    link: Link = "100Mbit/s",
    largest: Annotated[str, Parameter(help="largest message size")] = "4 MB",
    json_: Json = False,
) -> None:
    """Time collectives on gloo, in the columns of nccl-tests, with the predicted time beside."""
    from paceline.bench.emulated_collectives import measure
    from paceline.units import parse

    found = measure(hosts=_counts(hosts), links_Bps=_links(link), largest_bytes=int(parse(largest, "bytes")))
    if json_:
        print_json(found.to_dict())
    else:
        show(found)


app.command(score, name="throughput")
