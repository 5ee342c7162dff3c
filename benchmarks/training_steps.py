"""Seconds per step on emulated links: part `steps` of benchmarks/training.py, measured, or made from lines
that were (`--rows`).
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace

    from paceline.bench.strategies import StrategyComparison, StrategyTiming

#: bytes per second: 1 Gbit/s, unshaped, 100 Mbit/s, 20 Mbit/s; the slowest last, since time may run out
LINKS = (125e6, None, 12.5e6, 2.5e6)
BEST = "best"
#: strategies, the most wanted first, and those without which there is nothing to say
NAMES = ("none", "ddp", "overlap", "dgc", "auto:loss=some", "terngrad", "fp16", "allreduce", "priority")
WANTED = NAMES[:6]
#: seconds of a block of steps
BLOCK_S = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A network on so many hosts: what is timed there."""

    model: str
    hosts: int = 2
    links: tuple[Any, ...] = LINKS
    names: tuple[str, ...] = WANTED
    rounds: int = 6


#: one after another on all cores
ALONE = (
    Place(model="cnn", links=(*LINKS[:3], BEST), names=NAMES, rounds=7),
    Place(model="vgg-like", links=LINKS[:3], names=NAMES, rounds=7),
)
#: two rows of them at once, each on half of the cores where that leaves two for every host
BESIDE = (
    (Place(model="cnn", links=LINKS[3:]), Place(model="vgg-like", hosts=3), Place(model="cnn", hosts=4)),
    (Place(model="vgg-like", links=LINKS[3:]), Place(model="cnn", hosts=3), Place(model="vgg-like", hosts=4)),
)


def steps(options: Namespace) -> str:
    """The tables; measures where no lines are given."""
    from paceline.bench.strategies import read

    if options.rows:
        return "\n\n".join(render(read([file])) for file in options.rows)
    with tempfile.TemporaryDirectory() as folder:
        output, until = options.raw or Path(folder, "steps.jsonl"), time.monotonic() + options.limit
        if options.place:
            row([_named(text, options.rounds) for text in options.place], output, until)
        else:
            measure(output, until, beside=not options.quick)
        return render(read([output]))


def _named(text: str, rounds: int) -> Place:
    """A place in words: cnn:4:100Mbit/s, vgg-like:2:1Gbit/s,unshaped,best."""
    from paceline.units import parse

    model, hosts, links = text.split(":")
    rates = tuple(
        {"unshaped": None, BEST: BEST}[link] if link in ("unshaped", BEST) else parse(link, "bandwidth")
        for link in links.split(",")
    )
    return Place(
        model=model, hosts=int(hosts), links=rates, names=NAMES if hosts == "2" else WANTED, rounds=rounds
    )


def measure(output: Path, until: float, *, alone: bool = True, beside: bool = True) -> None:
    """Appends lines to a file until a moment of `time.monotonic`."""
    if alone:
        row(ALONE, output, until)
    if beside:
        cores = sorted(os.sched_getaffinity(0))
        halves = [cores[: len(cores) // 2], cores[len(cores) // 2 :]]
        start = multiprocessing.get_context("spawn").Process
        rows = [
            start(target=row, args=(places, output, until, half))
            for places, half in zip(BESIDE, halves, strict=True)
        ]
        for process in rows:
            process.start()
            if len(cores) < 16:
                process.join()
        for process in rows:
            process.join()


def row(places: Sequence[Place], output: Path, until: float, cores: Sequence[int] = ()) -> None:
    """Measures one place after another, on some of the cores, while there is time."""
    from paceline.bench.strategies import compare
    from paceline.errors import RunError

    if cores:
        os.sched_setaffinity(0, cores)
    for place in places:
        began = time.monotonic()
        try:
            if until - began > 15:
                compare(
                    model=place.model,
                    hosts=[place.hosts],
                    links=place.links,
                    strategies=place.names,
                    seconds=BLOCK_S,
                    rounds=place.rounds,
                    output=output,
                    timeout_s=until - began,
                )
        except RunError as error:  # out of time, as a rule: what was measured is there
            print(f"{place.model}, {place.hosts} hosts: {error}", flush=True)
        print(
            f"{place.model}, {place.hosts} hosts: {time.monotonic() - began:.0f} s,"
            f" {until - time.monotonic():.0f} s left",
            flush=True,
        )


def render(found: StrategyComparison) -> str:
    """A table for each model and number of hosts, and what comes out of them."""
    places = dict.fromkeys(
        (row.model, row.batch, row.hosts)
        for row in sorted(found.rows, key=lambda row: (row.model, row.batch, row.hosts))
    )
    parts = [
        _table([row for row in found.rows if (row.model, row.batch, row.hosts) == place]) for place in places
    ]
    return "\n\n".join(
        [f"**{found.machine}, shared out to the hosts**", *parts, *_behind(found), _summary(found)]
    )


def _table(rows: list[StrategyTiming]) -> str:
    links = sorted({row.link_Bps for row in rows}, key=lambda link: link or float("inf"))
    names = list(dict.fromkeys(row.strategy for row in rows))
    by = {(row.strategy, row.link_Bps): row for row in rows}
    title = (
        f"`{rows[0].model}`, {rows[0].batch} samples a rank, {rows[0].hosts} hosts; milliseconds a step,"
        " predicted in brackets:"
    )
    shown = [next(row.link for row in rows if row.link_Bps == link) for link in links]
    lines = [title, "", "| strategy | " + " | ".join(shown) + " | MB sent |", "|---" * (len(links) + 2) + "|"]
    for name in names:
        timings = [by.get((name, link)) for link in links]
        cells = ["" if row is None else _cell(row) for row in timings]
        sent = {f"{row.sent_bytes / 1e6:.2f}" for row in timings if row is not None}
        lines.append(
            f"| {name} | "
            + " | ".join(cells)
            + f" | {min(sent) if len(sent) == 1 else f'{min(sent)} to {max(sent)}'} |"
        )
    return "\n".join(lines)


def _cell(row: StrategyTiming) -> str:
    """Measured milliseconds of a step, the predicted ones in brackets, and the note."""
    text = f"{row.step_s * 1e3:.0f} ({row.predicted_s * 1e3:.0f})"
    return f"{text} {row.note}" if row.note else text


def _behind(found: StrategyComparison) -> list[str]:
    """How far `auto` is behind the fastest strategy, place by place, and `overlap` ahead of DDP."""
    lines = [
        (
            "| | DDP over `overlap` | `auto` took | fastest beside it | `auto` over it | least to most |"
            " rounds |"
        ),
        "|---|---:|---|---|---:|---:|---:|",
    ]
    for row in sorted(found.of_auto(), key=lambda row: (row.model, row.hosts, row.link_Bps or float("inf"))):
        beside = {other.strategy: other for other in found.rows if found.beside(row, other)}
        gains = found.paired(beside["ddp"], beside["overlap"]) if {"ddp", "overlap"} <= beside.keys() else ()
        if best := found.fastest(row):
            lines.append(
                f"| {row.model}, {row.hosts} hosts, {row.link} |"
                f" {f'{statistics.median(gains):.2f}' if gains else ''} | {row.note} | {best[0].strategy} |"
                f" {statistics.median(best[1]):.3f} | {min(best[1]):.2f} to {max(best[1]):.2f} |"
                f" {len(best[1])} |"
            )
    return ["Ratios of steps, round by round; medians:\n\n" + "\n".join(lines)] if len(lines) > 2 else []


def _summary(found: StrategyComparison) -> str:
    def ratio(over: str, under: str, **where: Any) -> list[tuple[float, StrategyTiming]]:
        """Seconds of one strategy over those of another, place by place, the largest first."""
        held = [row for row in found.rows if all(getattr(row, key) == value for key, value in where.items())]
        pairs = [
            (found.paired(a, b), b)
            for a in held
            if a.strategy == over
            for b in held
            if b.strategy == under and found.beside(a, b)
        ]
        return sorted(
            ((statistics.median(rounds), b) for rounds, b in pairs if rounds), key=lambda pair: -pair[0]
        )

    def named(pair: tuple[float, StrategyTiming], form: str = "{:.2f}") -> str:
        return f"{form.format(pair[0])} ({pair[1].model}, {pair[1].hosts} hosts, {pair[1].link})"

    errors = found.errors()
    first = (
        f"Mean error of the prediction {found.error():.1%} over {len(errors)} rows, median"
        f" {statistics.median(errors):.1%}; of the pairs of strategies more than 10 % apart,"
        f" {found.ranked():.1%} are in the right order."
    )
    lines = [first]
    for name in ("terngrad", "dgc"):
        gains = ratio("ddp", name, hosts=2, link_Bps=12.5e6)
        floors = ratio(name, "none", hosts=2)
        if gains and floors:
            lines.append(
                f"DDP's step over that of {name} at 100 Mbit/s, 2 hosts:"
                f" {', '.join(named(gain, '{:.1f}') for gain in gains)}; that of {name} over the floor, all"
                f" links: {', '.join(named(floor) for floor in floors)}."
            )
    gains = ratio("ddp", "overlap")
    if gains:
        most = [
            next(pair for pair in gains if pair[1].model == model)
            for model in dict.fromkeys(row.model for _, row in gains)
        ]
        lines.append(
            f"DDP's step over that of overlap: at most {', '.join(named(pair) for pair in most)}; at least"
            f" {named(gains[-1])}."
        )
    behind = [(row, *best) for row in found.of_auto() if (best := found.fastest(row))]
    if behind:
        worst = max(((statistics.median(rounds), row) for row, _, rounds in behind), key=lambda pair: pair[0])
        within = sum(statistics.median(rounds) <= 1.05 for _, _, rounds in behind)
        lines.append(
            "`auto`'s step over that of the fastest beside it, the median of the rounds' ratios: at most"
            f" {named(worst)}, within 5 % in {within} of {len(behind)} places; it took the same strategy in"
            f" {sum(row.note == best.strategy for row, best, _ in behind)}."
        )
        took = [(row, own, found.fastest(own)) for row, *_ in behind if (own := found.taken(row))]
        costs = [(max(1.0, statistics.median(best[1])), row) for row, _, best in took if best]
        if costs:
            twice = [statistics.median(found.paired(row, own)) for row, own, _ in took]
            most = max(costs, key=lambda pair: pair[0])
            lines[-1] += (
                f" What it took, run by itself, over the fastest: at most {named(most)}. `auto` over what it"
                f" took, run by itself, the same work twice: {min(twice):.2f} to {max(twice):.2f}."
            )
    return "\n".join(f"- {line}" for line in lines)
