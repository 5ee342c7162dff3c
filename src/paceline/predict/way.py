"""What a way of synchronising changes in a step: the hooks that predictions call, and the usual way, which
changes nothing.

Ways are objects (`paceline.sync`): one says what replicas exchange, what that adds to computation and memory,
and what it may cost in accuracy, for captured modules and for transformers by their sizes alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.sim.overlap import Transfer
from paceline.spec.cluster import Group
from paceline.spec.prediction import Evidence

if TYPE_CHECKING:
    from paceline.predict.distributed import Step
    from paceline.predict.gradients import Exchange, StageTime
    from paceline.predict.parallel import Ranks

Array = NDArray[np.float64]


class Way:
    """The usual way: gradients are averaged in full, every step, as the plan's sharding says."""

    # -- captured modules --------------------------------------------------------------------------

    def replicas(self, ranks: Ranks) -> Group:
        """Where the ranks sit that average gradients every step."""
        return ranks.cluster.group(ranks.plan.dp)

    def transfers(self, ranks: Ranks) -> list[Transfer]:
        """What the last micro-batch of a step communicates."""
        return ranks.usual_transfers()

    def durations(self, ranks: Ranks, device: Array) -> Array:
        """Seconds of each operator on the device, with what the way adds to them or spares them."""
        return device

    def evidence(self, ranks: Ranks) -> Iterable[Evidence]:
        """What the way rests on."""
        return ()

    # -- transformers by their sizes ---------------------------------------------------------------

    def averages(self, step: Step) -> bool:
        """Whether replicas reduce whole gradients once per step."""
        return True

    def exchanges(self, step: Step, dense: float, experts: float) -> tuple[list[Exchange], list[Exchange]]:
        """What reduces the gradients of so many parameters, and gathers them after the update."""
        return step.usual_exchanges(dense, experts)

    def finish(self, step: Step, parts: dict[str, float], stages: Sequence[StageTime]) -> dict[str, float]:
        """Where the time of a step goes, with what the way adds or hides."""
        return parts

    def size_evidence(self, parts: Mapping[str, float]) -> Iterable[Evidence]:
        """What the way rests on in a step whose time goes to `parts`."""
        return ()

    # -- both --------------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> float:
        """Bytes per parameter that a device keeps from one step to the next."""
        return 0.0

    @property
    def accuracy(self) -> Evidence | None:
        """What the way may cost in accuracy, and on what evidence."""
        return None


USUAL = Way()
