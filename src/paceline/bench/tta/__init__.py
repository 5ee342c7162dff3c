"""Time to accuracy: contestants on tasks, raced to targets that were fixed before.

paceline bench tta --task digits-shifted,text-small --strategies sgd,lars,terngrad,dgc,powersgd,ps-async
    --batch 64,512,4096 --seeds 5 --html tta.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.bench.tta.measure import Field, chosen_rate, machine, measure
from paceline.bench.tta.outcome import TargetRow, TargetRun, TargetTable
from paceline.bench.tta.rules import Contestant, read

#: the table of docs/benchmarks.md
TASKS = ("digits-shifted", "text-small")
CONTESTANTS = ("sgd", "lars", "terngrad", "dgc", "powersgd", "ps-async")
BATCHES, SEEDS = (64, 512, 4096), 5
#: what a table's folder holds besides the runs
REPORT, LOGS, LEARNING = "report.json", "mllog", "learning-{task}.toml"


def time_to_target(
    tasks: Sequence[str],
    contestants: Sequence[str],
    batches: Sequence[int],
    *,
    seeds: int,
    folder: Path,
    world: int = 2,
    target: float | None = None,
    rules: Path | None = None,
) -> TargetTable:
    """Tunes, runs and predicts; writes the runs, a report for `paceline audit`, logs and records of learning
    into the folder. Runs that it holds are not done again.
    """
    from paceline.bench.tta import expected, fair_report, mllog

    field = field_of(tasks, contestants, batches, seeds=seeds, world=world, target=target, rules=rules)
    found = measure(field, folder)
    table = table_of(field, found)
    fair_report.write(table, folder / REPORT)
    mllog.write(table, folder / LOGS)
    for task in table.rules:
        record = expected.learning(table, task, found)
        if record is not None:
            name = LEARNING.format(task=task.partition(":")[0])
            (folder / name).write_text(record.to_toml(), encoding="utf-8")
    return table


def field_of(
    tasks: Sequence[str] = TASKS,
    contestants: Sequence[str] = CONTESTANTS,
    batches: Sequence[int] = BATCHES,
    *,
    seeds: int = SEEDS,
    world: int = 2,
    target: float | None = None,
    rules: Path | None = None,
) -> Field:
    """What is measured; by default the table of docs/benchmarks.md."""
    book = read(rules)
    return Field(
        races=tuple(book.race(task, target) for task in tasks),
        contestants=tuple(map(book.contestant, contestants)),
        batches=tuple(batches),
        seeds=seeds,
        world=world,
        rules=book,
    )


def table_of(field: Field, lines: Sequence[Mapping[str, Any]]) -> TargetTable:
    """The table of finished runs, tested and predicted."""
    from paceline.bench.tta.expected import predicted

    tuned = {_key(line): line for line in lines if line["kind"] == "tuning"}
    runs: dict[tuple[str, str, int], list[TargetRun]] = {}
    for line in lines:
        if line["kind"] == "run":
            names = TargetRun.__dataclass_fields__
            words = {name: line[name] for name in names} | {"evaluations": tuple(line["evaluations"])}
            runs.setdefault(_key(line), []).append(TargetRun(**words))
    rows = [
        _row(one, tuned[race.task, one.name, batch], runs[race.task, one.name, batch])
        for race in field.races
        for batch in field.batches
        for one in field.contestants
    ]
    table = TargetTable(
        rows=tuple(rows),
        rules={race.task: race for race in field.races},
        baseline=field.contestants[0].name,
        world=field.world,
        seeds=field.seeds,
        machine=next((line["on"] for line in lines if "on" in line), machine()),
    )
    return predicted(table.tested(), lines)


def _row(one: Contestant, tuned: Mapping[str, Any], runs: Sequence[TargetRun]) -> TargetRow:
    return TargetRow(
        task=tuned["task"],
        contestant=one.name,
        strategy=one.strategy,
        optimizer=one.optimizer,
        batch=tuned["batch"],
        lr=chosen_rate(tuned),
        trials=len(tuned["rates"]),
        runs=tuple(runs),
    )


def _key(line: Mapping[str, Any]) -> tuple[str, str, int]:
    return line["task"], line["contestant"], line["batch"]
