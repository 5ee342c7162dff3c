"""How fast the scheduler simulates, and how its cost grows with jobs and nodes; the table of early ends in
docs/scheduling.md.

    python benchmarks/scheduler.py                  # events and jobs per CPU second, growth
    python benchmarks/scheduler.py --early-ends    # response time of successful jobs, with and without
                                                   # knowledge of early ends
    python benchmarks/scheduler.py --philly DIR    # the whole Philly trace from a data folder
"""

from __future__ import annotations

import sys
import time
from itertools import product

from paceline.sched.simulate import SimulationSettings, simulate
from paceline.sched.study import StudySetup, paired

POLICIES = ("fifo", "srtf", "las", "marginal")
PAIRS = (
    ("srtf", "srtf-ends"),
    ("srsf", "success"),
    ("marginal", "marginal-ends"),
    ("gittins", "gittins-ends"),
)


def timed(setup: StudySetup) -> None:
    """One line: CPU seconds of the simulation and what they hold."""
    trace, shape = setup.prepare()
    start = time.process_time()
    outcome = simulate(trace.jobs, shape, setup.make_policy(), SimulationSettings(clock_s=trace.clock_s))
    spent = time.process_time() - start
    jobs = len(outcome.done)
    print(
        f"{setup.policy:10} {jobs:7,} jobs on {outcome.devices:6,} devices: {spent:7.2f} CPU-s,"
        f" {outcome.events / spent:9,.0f} events/s, {jobs / spent:8,.0f} jobs/s, {1e3 * spent / jobs:.3f} ms"
        " a job",
        flush=True,
    )


def growth() -> None:
    for policy in POLICIES:
        for jobs in (1000, 4000, 16000):
            timed(StudySetup(trace="philly-like", policy=policy, jobs=jobs, cluster="64x4xv100", load=0.9))
    for policy in ("srtf", "las"):
        for nodes in (64, 256, 1024):
            timed(
                StudySetup(trace="philly-like", policy=policy, jobs=4000, cluster=f"{nodes}x4xv100", load=0.9)
            )


def early_ends(clusters: list[str]) -> None:
    print(
        "| jobs | shares of | load | without | knowing | s, without | s, knowing | change"
        " |\n|---|---|---|---|---|---|---|---|"
    )
    for trace, shares, load in product(
        ("trials", "philly-like"), clusters or ["philly", "helios"], (0.9, 1.2)
    ):
        for without, knowing in PAIRS:
            setup = StudySetup(
                trace=trace,
                policy=without,
                jobs=1500,
                cluster="16x4xv100",
                load=load,
                early_termination=shares,
            )
            a, b, change, width = paired(setup, without, knowing, seeds=8, processes=0)
            print(
                f"| {trace} | {shares} | {load} | {without} | {knowing} | {a:,.0f} | {b:,.0f} | {change:+.1f}"
                f" ± {width:.1f} % |",
                flush=True,
            )


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--early-ends"]:
        early_ends(arguments[1:])
    elif arguments[:1] == ["--philly"]:
        for policy in ("fifo", "srtf", "las"):
            timed(StudySetup(trace="philly", policy=policy, data=arguments[1]))
    else:
        growth()


if __name__ == "__main__":
    main(sys.argv[1:])
