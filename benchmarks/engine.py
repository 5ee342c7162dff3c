"""How many events the engine runs per CPU second, and how long whole predictions take.

python benchmarks/engine.py
"""

from __future__ import annotations

import time

from paceline.catalog import clusters, transformers
from paceline.predict.simulated import predict
from paceline.sim import engine
from paceline.sim.program import Builder, Label, Program
from paceline.sim.schedules import actions, in_order, sources
from paceline.spec.plan import Plan

PLANS = (
    ("llama3-8b", "8xdgx-h100", "fsdp gbs=128 mbs=1"),
    ("llama3-70b", "8xdgx-h100", "tp=8 pp=4 zero1 gbs=512 mbs=1 sp"),
    ("gpt3-175b", "128xdgx-a100", "tp=8 pp=8 vpp=3 gbs=1536 mbs=1 sp zero1 recompute=selective"),
    ("llama3-405b", "2048xdgx-h100", "tp=8 pp=16 vpp=7 gbs=2048 mbs=1 sp zero1 seq=8192"),
    ("llama3-405b", "2048xdgx-h100", "tp=8 pp=16 gbs=16384 mbs=1 sp zero1 seq=8192"),
)


def pipeline(pp: int, micro_batches: int, crowded: bool) -> Program:
    """Passes and transfers of 1F1B; `crowded`: with a collective beside every pass."""
    builder = Builder()
    forward, backward = Label("forward", "forward", 1.0), Label("backward", "backward", 2.0)
    beside = Label("gather", "gather", 0.5, "all_gather", 1.0, "dp", crowds=True)
    passes = [actions("1f1b", rank, pp, micro_batches) for rank in range(pp)]
    done: dict[tuple[int, str, int], int] = {}
    for rank, action in in_order(passes, pp):
        after = [done[source] for source in sources(action, pp)]
        done[action] = builder.add(builder.stream(rank), forward if action.kind == "F" else backward, after)
        if crowded:
            builder.add(builder.stream(rank, "dp"), beside)
    return builder.build()


def main() -> None:
    for crowded in (False, True):
        program = pipeline(16, 4096, crowded)
        start = time.process_time()
        events = engine.run(program, 0.3).events
        spent = time.process_time() - start
        print(
            f"{'with' if crowded else 'without'} contention: {len(program):,} tasks, {events:,} events,"
            f" {events / spent:,.0f} events/s"
        )
    for model, cluster, plan in PLANS:
        target, network = transformers.get(model), clusters.get(cluster)
        start = time.process_time()
        found = predict(target, network, Plan.parse(plan))
        first = time.process_time() - start
        print(f"{model} on {found.devices} devices, {plan}: {first:.3f} CPU-s, step {found.step_s:.3f} s")


if __name__ == "__main__":
    main()
