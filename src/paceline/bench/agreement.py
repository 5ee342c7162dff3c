"""How far closed form and simulation are apart: both predict the same random plans."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.catalog import clusters, transformers
from paceline.errors import PlanError
from paceline.predict import distributed, simulated
from paceline.spec.plan import Plan
from paceline.spec.vocabulary import Precision, Recompute, Sharding

MODELS = (
    "gpt3-1.3b",
    "gpt3-6.7b",
    "gpt3-13b",
    "gpt3-175b",
    "llama2-7b",
    "llama3-8b",
    "llama3-70b",
    "llama3-405b",
    "mixtral-8x7b",
)
CLUSTERS = (
    "1xdgx-h100",
    "4xdgx-h100",
    "32xdgx-h100",
    "256xdgx-h100",
    "2xdgx-a100",
    "16xdgx-a100",
    "8xdgx-b200",
    "16xp4d",
)
_ANY = (1, 1, 2, 4, 8, 16)
#: shardings of plans with and without a pipeline
_PIPELINED = (Sharding.DDP, Sharding.ZERO1, Sharding.ZERO2)
_UNPIPELINED = (Sharding.DDP, Sharding.ZERO1, Sharding.FSDP, Sharding.FSDP, Sharding.HSDP)


@dataclass(frozen=True, slots=True)
class PredictionPair:
    """Seconds of a step by both."""

    model: str
    cluster: str
    plan: str
    closed_s: float
    simulated_s: float

    @property
    def difference(self) -> float:
        """Of the closed form from the simulation, as a share of the latter."""
        return self.closed_s / self.simulated_s - 1


def compare(count: int, seed: int = 0) -> Iterator[PredictionPair]:
    """`count` random plans that can run and that fit."""
    draw = random.Random(seed)
    networks = {name: clusters.get(name) for name in CLUSTERS}
    while count:
        model, cluster = transformers.get(draw.choice(MODELS)), networks[draw.choice(CLUSTERS)]
        try:
            plan = random_plan(draw, cluster.device_count, bool(model.experts))
            closed = distributed.predict(model, cluster, plan)
            if not closed.fit.fits:
                continue
            found = simulated.predict(model, cluster, plan)
        except PlanError:
            continue
        yield PredictionPair(model.name, cluster.name, closed.plan, closed.step_s, found.step_s)
        count -= 1


def random_plan(draw: random.Random, devices: int, experts: bool) -> Plan:
    """A plan for so many devices; PlanError where its degrees need more. It may still not be one that a model
    can run.
    """
    tp, pp, cp = draw.choice((1, 1, 2, 4, 8)), draw.choice(_ANY), draw.choice((1, 1, 1, 2))
    dp = devices // (tp * pp * cp)
    if not dp:
        raise PlanError("more ranks than devices")
    schedule = (
        draw.choice(("1f1b", "1f1b", "interleaved", "gpipe", "zb-h1", "zb-v", "dualpipev", "looped-bfs"))
        if pp > 1
        else ""
    )
    vpp = draw.choice((2, 4)) if schedule in ("interleaved", "looped-bfs") else 1
    mbs = draw.choice((1, 1, 2, 4))
    micro_batches = (
        draw.choice((pp // 2, pp, 2 * pp, 2 * pp + 1, 4 * pp)) if pp > 1 else draw.choice((1, 2, 8))
    )
    sharding = Sharding.NONE
    if dp * cp > 1:
        sharding = draw.choice(_PIPELINED if pp > 1 else _UNPIPELINED)
    return Plan(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=draw.choice((1, 2, 4, 8)) if experts else 1,
        vpp=vpp,
        mbs=mbs,
        gbs=dp * mbs * micro_batches,
        seq=draw.choice((2048, 4096)),
        sharding=sharding,
        sp=tp > 1 and draw.random() < 0.5,
        schedule=schedule,
        recompute=draw.choice(tuple(Recompute)),
        precision=draw.choice((Precision.BF16, Precision.BF16, Precision.FP8)),
        framework=draw.choice(("", "", "megatron-2022", "nemo", "torch", "jax")),
    )
