"""Strategies side by side on an emulated cluster: seconds per step predicted and measured, bytes on the wire
counted by the interfaces.

    paceline bench strategies --hosts 2 --link 100Mbit/s --model vgg-like

Each strategy trains the same network from the same seed in the same processes, in rounds of short blocks, so
that what disturbs the machine disturbs all of them, and what one takes over another is the median of its
rounds' ratios; `none` does not communicate at all: the floor. Every host has cores of its own where there are
enough. The prediction takes the passes from a profile of one rank alone, taken before the rounds of a link
and brought to the pace that `none` had in each round, encoders' rates and the cost of a message from a probe
on the bare link, and the link's rate from what was asked for: nothing from the strategy that it predicts.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import SpecError
from paceline.train.launch import run
from paceline.units import show

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.bench.emulate import EmulatedCluster

STRATEGIES = ("none", "ddp", "allreduce", "overlap", "priority", "fp16", "terngrad", "dgc", "auto:loss=some")
#: share of a link's rate that TCP over Ethernet of 1500 bytes leaves for payload: 1448 of 1538, headers
#: counted by the token bucket as 14
PAYLOAD = 1448 / 1514

#: gradients' memory goes back to the system and is cleared again in some steps and not in others, by the
#: process's history, unless told
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyTiming:
    """One strategy on one link."""

    model: str
    batch: int
    strategy: str
    hosts: int
    #: None: not shaped
    link_Bps: float | None
    #: seconds per step, of each round, and which rounds these are
    rounds_s: tuple[float, ...]
    turns: tuple[int, ...]
    predicted_s: float
    #: of one host, per step
    sent_bytes: float
    note: str = ""

    @property
    def step_s(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds_s)

    @property
    def by_auto(self) -> bool:
        """Whether `auto` chose the strategy of this row; `note` says which."""
        return self.strategy.partition(":")[0] == "auto"

    @property
    def link(self) -> str:
        """For people."""
        return "unshaped" if self.link_Bps is None else f"{self.link_Bps * 8e-6:g} Mbit/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyComparison:
    """All of them, and where."""

    rows: tuple[StrategyTiming, ...] = field(default_factory=tuple)
    machine: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"machine": self.machine, "rows": [{**asdict(row), "step_s": row.step_s} for row in self.rows]}

    def of_auto(self) -> list[StrategyTiming]:
        """Rows of `auto`, whatever its options."""
        return [row for row in self.rows if row.by_auto]

    @staticmethod
    def beside(row: StrategyTiming, other: StrategyTiming) -> bool:
        """Whether two rows differ in strategy only."""
        return _place(row) == _place(other)

    @staticmethod
    def paired(row: StrategyTiming, other: StrategyTiming) -> tuple[float, ...]:
        """Seconds of one over those of another, of each round in which both were timed: the pace of the
        machine drops out.
        """
        beside = dict(zip(other.turns, other.rounds_s, strict=True))
        return tuple(
            seconds / beside[turn]
            for turn, seconds in zip(row.turns, row.rounds_s, strict=True)
            if turn in beside
        )

    def fastest(self, row: StrategyTiming) -> tuple[StrategyTiming, tuple[float, ...]] | None:
        """The strategy beside a row that it is furthest behind (or least ahead of), and the ratios of their
        rounds.
        """
        beside = [other for other in self.rows if self.beside(row, other) and not other.by_auto]
        others = [
            (other, self.paired(row, other))
            for other in beside
            if other.strategy not in ("none", row.strategy)
        ]
        return max(
            (pair for pair in others if pair[1]), key=lambda pair: statistics.median(pair[1]), default=None
        )

    def taken(self, row: StrategyTiming) -> StrategyTiming | None:
        """Beside a row of `auto`, that of the strategy which it took, run by itself."""
        return next(
            (other for other in self.rows if self.beside(row, other) and other.strategy == row.note), None
        )

    def base_s(self, row: StrategyTiming) -> float | None:
        """Seconds per step of DDP beside a row."""
        return next(
            (other.step_s for other in self.rows if other.strategy == "ddp" and self.beside(row, other)), None
        )

    def error(self) -> float:
        """Mean error of the predictions of what communicates, relative."""
        return statistics.fmean(self.errors() or [0.0])

    def errors(self) -> list[float]:
        """Of each row but the floors."""
        return [abs(row.predicted_s / row.step_s - 1) for row in self.rows if row.strategy != "none"]

    def ranked(self) -> float:
        """Share of pairs of strategies in one place, more than 10 % apart, that the prediction puts in the
        right order.
        """
        pairs = [
            (a, b)
            for i, a in enumerate(self.rows)
            for b in self.rows[i + 1 :]
            if self.beside(a, b) and abs(a.step_s - b.step_s) > 0.1 * max(a.step_s, b.step_s)
        ]
        return (
            statistics.fmean((a.step_s < b.step_s) == (a.predicted_s < b.predicted_s) for a, b in pairs)
            if pairs
            else 1.0
        )

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title="Seconds per step")
        for title in (
            "model",
            "hosts",
            "link",
            "strategy",
            "step",
            "spread",
            "predicted",
            "of ddp",
            "sent per step",
            "",
        ):
            table.add_column(title, justify="left" if title in ("model", "strategy", "", "link") else "right")
        for row in self.rows:
            spread, base = (max(row.rounds_s) - min(row.rounds_s)) / row.step_s, self.base_s(row)
            table.add_row(
                row.model,
                str(row.hosts),
                row.link,
                row.strategy,
                show(row.step_s, "time"),
                f"{spread:.0%}",
                show(row.predicted_s, "time"),
                "" if base is None else f"{row.step_s / base:.2f}",
                show(row.sent_bytes, "bytes"),
                row.note,
            )
        return table


def _place(row: StrategyTiming) -> tuple[Any, ...]:
    return row.model, row.batch, row.hosts, row.link_Bps


def compare(
    *,
    model: str = "cnn",
    strategies: Sequence[str] = STRATEGIES,
    hosts: Sequence[int] = (2,),
    links: Sequence[float | str | None] = (12.5e6,),
    seconds: float = 1.0,
    rounds: int = 2,
    batch: int | None = None,
    cpus: float | None = None,
    timeout_s: float = 900.0,
    output: Path | None = None,
) -> StrategyComparison:
    """Predicted and measured, for every strategy, link and number of hosts; lines of `read` are appended to
    `output` as they come.

    A link is its rate in bytes per second, None for a bare one, or "best": where `overlap` is predicted to
    gain most over DDP.
    """
    from paceline.bench.emulate import EmulatedCluster
    from paceline.bench.stepping import network

    network(model)
    if not strategies or not links or not hosts:
        raise SpecError("name at least one strategy, one link and one number of hosts")
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        lines = Path(output or Path(folder, "lines.jsonl")).resolve()
        for count in hosts:
            with (
                EmulatedCluster(hosts=count, cpus=cpus, pin=True, congestion="reno") as cluster,
                Shaper(cluster, Path(folder, str(count))) as shaper,
            ):
                run(
                    "paceline.bench.stepping:worker",
                    world=count,
                    on=cluster,
                    timeout_s=timeout_s,
                    environment=MEMORY,
                    arguments={
                        "model": model,
                        "strategies": list(strategies),
                        "links": list(links),
                        "seconds": seconds,
                        "rounds": rounds,
                        "batch": batch,
                        "folder": str(shaper.folder),
                        "output": str(lines),
                    },
                )
        return read([lines])


class Shaper:
    """Sets the links of a cluster as a rank inside it asks: it may not itself, the switch is elsewhere."""

    def __init__(self, cluster: EmulatedCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Shaper:
        self.folder.mkdir()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _serve(self) -> None:
        count = 0
        while not self._end.wait(1e-3):
            wanted = self.folder / f"wanted{count}"
            if wanted.exists():
                self.cluster.shape(json.loads(wanted.read_text()))
                (self.folder / f"done{count}").touch()
                count += 1


def read(files: Iterable[Path]) -> StrategyComparison:
    """Rows of measured lines, predicted from the facts beside them as this version of the model sees it; of a
    place measured again, the last rows.
    """
    known: dict[tuple[Any, ...], dict[str, Any]] = {}  # two clusters may have written at once
    places: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for file in files:
        for text in file.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            run = line["model"], line["batch"], line["hosts"]
            if line["kind"] == "facts":
                known[run] = line
                continue
            held = places.setdefault((*run, line["link_Bps"]), [])
            if held and held[0]["facts"] is not known[run]:
                held.clear()
            held.append({**line, "facts": known[run]})
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for place, lines in places.items():
        for line in lines:
            found.setdefault((*place, line["strategy"]), []).append(line)
    alone = {
        (*place[:4], line["turn"]): line["step_s"]
        for place, lines in found.items()
        if place[4] == "none"
        for line in lines
    }
    rows = []
    for (model, batch, hosts, link, strategy), lines in found.items():

        def expected(
            line: dict[str, Any],
            place: tuple[Any, ...] = (model, batch, hosts, link),
            strategy: str = strategy,
        ) -> float:
            took = alone.get((*place, line["turn"])) if strategy != "none" else None
            return predict(
                line["facts"] if took is None else paced(line["facts"], took), [strategy], place[2], place[3]
            )[strategy]

        rows.append(
            StrategyTiming(
                model=model,
                batch=batch,
                hosts=hosts,
                link_Bps=link,
                strategy=strategy,
                rounds_s=tuple(line["step_s"] for line in lines),
                turns=tuple(line["turn"] for line in lines),
                sent_bytes=statistics.median(line["sent_bytes"] for line in lines),
                note=lines[-1]["note"],
                predicted_s=statistics.median(map(expected, lines)),
            )
        )
    return StrategyComparison(
        rows=tuple(rows), machine=", or ".join(dict.fromkeys(line["on"] for line in known.values()))
    )


def paced(facts: Mapping[str, Any], step_s: float) -> dict[str, Any]:
    """Facts with the passes of one rank alone at the pace that they had in a round, in which a step of theirs
    took so many seconds.
    """
    profile = facts["profile"]
    phases = {name: profile[name] for name in ("forward_s", "backward_s", "update_s")}
    pace = step_s / sum(phases.values())
    layers = [
        {**layer, "need_s": pace * layer["need_s"], "ready_s": pace * layer["ready_s"]}
        for layer in profile["layers"]
    ]
    return {
        **facts,
        "profile": {
            **profile,
            **{name: pace * seconds for name, seconds in phases.items()},
            "layers": layers,
        },
    }


def predict(
    facts: Mapping[str, Any], strategies: Sequence[str], hosts: int, link: float | None
) -> dict[str, float]:
    """Seconds per step by the model that `auto` decides with."""
    from paceline.bench.emulate.cluster import burst_bytes
    from paceline.train.probe import Machine, Rates
    from paceline.train.profile import Profile
    from paceline.train.strategies.estimate import Setting, step_s

    bare = Machine(**facts["machine"])
    machine = bare if link is None else bare.behind(link * PAYLOAD, burst_bytes(link) * PAYLOAD)
    setting = Setting(
        machine=machine,
        world=hosts,
        rates=Rates(**facts["rates"]),
        cores=facts["cores"],
        threads=facts.get("threads", 1),
    )
    profile = Profile.from_dict(facts["profile"])
    return {name: step_s(name, profile, setting) for name in strategies}


#: rates that a token bucket keeps well, bytes per second
_SLOWEST, _FASTEST = 1.25e6, 2.5e8


def best_link(facts: Mapping[str, Any], hosts: int) -> float:
    """Bytes per second of the link on which `overlap` is predicted to gain most over DDP, to two digits."""
    grid = [_SLOWEST * 1.1**i for i in range(60) if _SLOWEST * 1.1**i <= _FASTEST]
    gains = [
        (found["ddp"] / found["overlap"], link)
        for link in grid
        for found in [predict(facts, ("ddp", "overlap"), hosts, link)]
    ]
    return float(f"{max(gains)[1]:.1e}")
