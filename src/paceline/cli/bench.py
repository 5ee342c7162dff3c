"""`paceline bench`: measurements on an emulated cluster, predictions beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from paceline.cli.options import Json, print_json, show, whole
from paceline.cli.throughput import score

app = App(
    name="bench",
    help=(
        "Measure: on an emulated cluster, whose hosts are network namespaces with shaped links (needs root on"
        " Linux), or (tta) on this machine."
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


def _counts(text: str, what: str = "hosts") -> list[int]:
    from paceline.errors import SpecError

    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise SpecError(f"{what} are whole numbers separated by commas; got {text!r}") from None


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


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


@app.command
def tta(
    *,
    task: Annotated[
        str, Parameter(help="tasks, separated by commas, also mnist:FOLDER, cifar10:FOLDER or images:FOLDER")
    ] = "digits-shifted,text-small",
    strategies: Annotated[
        str,
        Parameter(
            help="contestants, separated by commas, the baseline first: sgd, lars, or strategies of"
            " `paceline train`"
        ),
    ] = "sgd,lars,terngrad,dgc,powersgd,ps-async",
    batch: Annotated[
        str, Parameter(name=["--batch", "-b"], help="samples of a step of all ranks; several with commas")
    ] = "64,512,4096",
    seeds: Annotated[int, Parameter(converter=whole, help="runs of each contestant at each batch")] = 5,
    world: Annotated[int, Parameter(converter=whole, help="ranks, as processes of this machine")] = 2,
    target: Annotated[
        float | None, Parameter(help="share of right answers; by default that of the rules")
    ] = None,
    rules: Annotated[
        Path | None, Parameter(help="TOML file with targets, limits and tuning, in place of those that ship")
    ] = None,
    output: Annotated[
        Path, Parameter(name=["--output", "-o"], help="folder for runs, report, logs and records of learning")
    ] = Path("tta"),
    html: Annotated[Path | None, Parameter(help="also write a page")] = None,
    markdown: Annotated[bool, Parameter(negative="", help="print the table as Markdown")] = False,
    json_: Json = False,
) -> None:
    """Time to accuracy: contestants race to targets that were fixed before, with several seeds; all runs,
    medians, tests, and the time that was predicted.

    paceline bench tta --task digits-shifted,text-small --seeds 5 --html tta.html && paceline audit
    tta/report.json

    A table that was interrupted goes on with the same --output. What it writes: runs.jsonl, report.json (for
    `paceline audit`), learning-TASK.toml (for `predict --learning`), mllog/ (lines that MLCommons' tools
    read).
    """
    from paceline.bench import tta as measured
    from paceline.bench.tta import view

    found = measured.time_to_target(
        _names(task),
        _names(strategies),
        _counts(batch, "batches"),
        seeds=seeds,
        folder=output,
        world=world,
        target=target,
        rules=rules,
    )
    if html is not None:
        from paceline.report import page

        command = (
            f"paceline bench tta --task {task} --strategies {strategies} --batch {batch} --seeds {seeds}"
        )
        page.write(html, view.page(found, command))
    if json_:
        print_json(found.to_dict())
    elif markdown:
        print(view.markdown(found))
    else:
        show(found)
    if html is not None and not json_:
        print(f"written: {html}")


app.command(score, name="throughput")
