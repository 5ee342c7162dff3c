"""How fast plans are bounded, and a whole space is searched, beside Calculon where it is at hand.

    python benchmarks/planner.py [--calculon FOLDER]

FOLDER is a checkout of calculon-ai/calculon: its prediction call (one plan of Megatron-1T on its A100 system)
is timed in the same run. Figures are CPU seconds of one core; the search uses as many cores as there are and
is timed by the clock.
"""

import argparse
import json
import logging
import sys
import time
from pathlib import Path

from paceline.catalog import clusters, transformers
from paceline.plan.bound import bounds
from paceline.plan.memory import peaks
from paceline.plan.request import goal
from paceline.plan.search import search
from paceline.plan.space import Limits, Space
from paceline.plan.table import Table

SPACES = (("megatron-1t", "64xdgx-a100", 512), ("gpt3-175b", "128xdgx-a100", 1024))
QUESTIONS = (
    ("llama3-8b", "1xdgx-h100", 64),
    ("llama3-8b", "8xdgx-h100", 512),
    ("llama3-70b", "8xdgx-h100", 512),
    ("llama3-70b", "64xdgx-h100", 1024),
)


def ours() -> float:
    """Plans per CPU second of one core: memory and bound of every plan of a space, from nothing."""
    name, where, batch = SPACES[0]
    model, cluster = transformers.get(name), clusters.get(where)
    space, table = Space(model, (cluster,), batch, model.seq, Limits.of()), Table(model, cluster)
    blocks = space.blocks
    begun = time.process_time()
    for block in blocks:
        peaks(block, table)
        bounds(block, table)
    cold = time.process_time() - begun
    begun = time.process_time()
    for block in blocks:
        peaks(block, table)
        bounds(block, table)
    warm = time.process_time() - begun
    print(
        f"closed form, one core: {len(space):,} plans of {name}: {len(space) / cold:,.0f} plans/s,"
        f" {len(space) / warm:,.0f} once layers are timed"
    )
    return len(space) / cold


def calculons(folder: Path) -> float:
    """Predictions per CPU second of Calculon."""
    sys.path.insert(0, str(folder))
    from calculon.llm import Llm
    from calculon.system import System

    def read(path: str) -> dict[str, object]:
        return json.loads((folder / path).read_text())

    log = logging.getLogger()
    app, system = Llm.Application(read("models/megatron-1T.json")), System(read("systems/a100_80g.json"))
    execution = read("examples/3072_t4_p64_d12_mbs4_full.json")
    count, begun = 30, time.process_time()
    for _ in range(count):
        model = Llm(app, log)
        model.compile(system, Llm.Execution.from_json(execution))
        model.run(system)
    rate = count / (time.process_time() - begun)
    print(f"Calculon's prediction call, one core: {rate:,.0f} plans/s")
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calculon", type=Path, help="a checkout of calculon-ai/calculon")
    chosen = parser.parse_args()
    mine = ours()
    if chosen.calculon:
        print(f"ratio: {mine / calculons(chosen.calculon):,.0f}")
    for name, where, batch in (*SPACES, *QUESTIONS):
        model, cluster = transformers.get(name), clusters.get(where)
        space = Space(model, (cluster,), batch, min(model.seq, 8192), Limits.of())
        found = search(space, goal("time", (cluster,)))
        print(
            f"{name} on {cluster.device_count}: {found.space:,} plans, {found.by_memory:,} out by memory,"
            f" {found.by_bound:,} by bound, {len(found.tried)} simulated, gap {100 * found.gap:.2f} %,"
            f" {found.elapsed_s:.1f} s: {found.tried[0].plan}"
        )


if __name__ == "__main__":
    main()
