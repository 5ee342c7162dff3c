"""Seconds per step on emulated links: part `steps` of benchmarks/training.py, measured, or made from lines that were (`--rows`)."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace

    from paceline.bench.strategies import Comparison, Row

#: bytes per second: 1 Gbit/s, unshaped, 100 Mbit/s, 20 Mbit/s; the slowest last, since time may run out
LINKS = (125e6, None, 12.5e6, 2.5e6)
BEST = "best"
#: strategies, the most wanted first
NAMES = ("none", "ddp", "overlap", "dgc", "auto", "terngrad", "fp16", "allreduce", "priority")
#: what is measured, the most wanted first: model, hosts, links, rounds
PLAN: tuple[tuple[str, int, tuple[Any, ...], int], ...] = (
    ("cnn", 2, (BEST, *LINKS[:3]), 2), ("vgg-like", 2, LINKS, 2), ("cnn", 4, LINKS[:2], 1), ("vgg-like", 4, LINKS[:2], 1),
    ("cnn", 2, LINKS[3:], 1), ("cnn", 3, LINKS[:2], 1), ("vgg-like", 3, LINKS[:2], 1), ("vgg-like", 4, LINKS[2:3], 1),
)


def steps(options: Namespace) -> str:
    """The tables; measures where no lines are given."""
    from paceline.bench.strategies import compare, read
    from paceline.errors import RunError

    if options.rows:
        return "\n\n".join(render(read([file])) for file in options.rows)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        output = options.raw or Path(folder, "steps.jsonl")
        for model, hosts, links, rounds in PLAN[:2] if options.quick else PLAN:
            left = options.limit - (time.monotonic() - began)
            try:
                if left > 15:
                    compare(model=model, hosts=[hosts], links=links, strategies=NAMES, seconds=0.4, rounds=rounds, output=output, timeout_s=left)
            except RunError as error:  # out of time, as a rule: what was measured is there
                print(f"{model}, {hosts} hosts: {error}", flush=True)
            print(f"{model}, {hosts} hosts: {time.monotonic() - began:.0f} s", flush=True)
        return render(read([output]))


def render(found: Comparison) -> str:
    """A table for each model and number of hosts, and what comes out of them."""
    places = dict.fromkeys((row.model, row.batch, row.hosts) for row in sorted(found.rows, key=lambda row: (row.model, row.batch, row.hosts)))
    parts = [_table([row for row in found.rows if (row.model, row.batch, row.hosts) == place]) for place in places]
    return "\n\n".join([*parts, _summary(found), f"{found.machine}, shared out to the hosts."])


def _table(rows: list[Row]) -> str:
    links = sorted({row.link_Bps for row in rows}, key=lambda link: link or float("inf"))
    names = list(dict.fromkeys(row.strategy for row in rows))
    by = {(row.strategy, row.link_Bps): row for row in rows}
    title = f"`{rows[0].model}`, {rows[0].batch} samples a rank, {rows[0].hosts} hosts; milliseconds a step, predicted in brackets:"
    shown = [next(row.link for row in rows if row.link_Bps == link) for link in links]
    lines = [title, "", "| strategy | " + " | ".join(shown) + " | MB sent |", "|---" * (len(links) + 2) + "|"]
    for name in names:
        held = [by.get((name, link)) for link in links]
        cells = ["" if row is None else f"{row.step_s * 1e3:.0f} ({row.predicted_s * 1e3:.0f}){f' {row.note}' if row.note else ''}" for row in held]
        sent = {f"{row.sent_bytes / 1e6:.2f}" for row in held if row is not None}
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {min(sent) if len(sent) == 1 else f'{min(sent)} to {max(sent)}'} |")
    return "\n".join(lines)


def _summary(found: Comparison) -> str:
    def ratio(over: str, under: str, **where: Any) -> list[tuple[float, Row]]:
        """Seconds of one strategy over those of another, place by place, the largest first."""
        held = [row for row in found.rows if all(getattr(row, key) == value for key, value in where.items())]
        pairs = [(a, b) for a in held if a.strategy == over for b in held if b.strategy == under and found.beside(a, b)]
        return sorted(((a.step_s / b.step_s, b) for a, b in pairs), key=lambda pair: -pair[0])

    def named(pair: tuple[float, Row], form: str = "{:.2f}") -> str:
        return f"{form.format(pair[0])} ({pair[1].model}, {pair[1].hosts} hosts, {pair[1].link})"

    errors = [abs(row.predicted_s / row.step_s - 1) for row in found.rows]
    first = (f"Mean error of the prediction {found.error():.1%} over {len(errors)} rows, median {statistics.median(errors):.1%}; of the pairs of "
             f"strategies more than 10 % apart, {found.ranked():.1%} are in the right order.")
    lines = [first]
    for name in ("terngrad", "dgc"):
        gains = ratio("ddp", name, hosts=2, link_Bps=12.5e6)
        if gains:
            lines.append(f"DDP's step over that of {name} at 100 Mbit/s, 2 hosts: {', '.join(named(gain, '{:.1f}') for gain in gains)}.")
    gains = ratio("ddp", "overlap")
    if gains:
        most = [next(pair for pair in gains if pair[1].model == model) for model in dict.fromkeys(row.model for _, row in gains)]
        lines.append(f"DDP's step over that of overlap: at most {', '.join(named(pair) for pair in most)}; at least {named(gains[-1])}.")
    behind = []
    for row in found.rows:
        if row.strategy == "auto":
            best = min((other for other in found.rows if found.beside(row, other) and other.strategy not in ("none", "auto")), key=lambda r: r.step_s)
            behind.append((row.step_s / best.step_s, row, best.strategy))
    if behind:
        worst = max(behind, key=lambda found: found[0])
        within = sum(ratio <= 1.05 for ratio, _, _ in behind)
        same = sum(row.note == name for _, row, name in behind)
        lines.append(f"`auto` took the strategy that was the fastest beside it in {same} of {len(behind)} places; its step over that one's is "
                     f"at most {named(worst[:2])}, and within 5 % in {within}.")
    return "\n".join(f"- {line}" for line in lines)
