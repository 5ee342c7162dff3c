"""A pipeline schedule: 1F1B with twice as many forward passes ahead, so that transfers hide behind passes.

Zhuang et al., On Optimizing the Communication of Model Parallelism, MLSys 2023: Eager-1F1B.

    paceline --extend examples/extend/schedule.py compare gpt3-1.3b \
        --cluster 4x1xh100-sxm@10Gb/s \
        --plan "pp=4 gbs=32 framework=torch-compile" --plans 1f1b,eager-1f1b
    paceline --extend examples/extend/schedule.py plan gpt3-13b \
        --cluster 1xdgx-h100 --gbs 32 --fix pp=4 eager-1f1b

In a program, `import schedule` is all: predictions, the search and `paceline.train.Pipeline` know it then.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.spec.schedules import Action, Schedule, register


class Eager(Schedule):
    """Two forward passes ahead for each rank behind, where 1F1B runs one."""

    name = "eager-1f1b"

    def actions(self, rank: int, pp: int, micro_batches: int, vpp: int = 1) -> Iterator[Action]:
        ahead = min(micro_batches, 2 * (pp - 1 - rank))
        yield from (Action(rank, "F", i) for i in range(ahead))
        for i in range(micro_batches):
            if ahead + i < micro_batches:
                yield Action(rank, "F", ahead + i)
            yield Action(rank, "B", i)

    def in_flight(self, rank: int, pp: int, micro_batches: int, vpp: int) -> float:
        return float(min(micro_batches, 2 * (pp - 1 - rank) + 1))


register(Eager())
