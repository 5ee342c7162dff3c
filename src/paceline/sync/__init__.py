"""Ways to keep replicas in sync, as objects: compressed, overlapped, by priority, now and then, through
servers.

    way.py          what a way says of a step, and the usual way
    compressed.py   gradients encoded, averaged every step
    overlapped.py   scattered under the backward pass, gathered under the next forward pass; or by priority
    factors.py      what fully connected layers may exchange in place of gradients
    served.py       every step through parameter servers
    rarely.py       now and then, through servers without waiting, with neighbours: added to a replica's own
                    step
    accuracy.py     what each may cost in accuracy, and who measured it

Each is part of a plan like any other word (`Plan.parse("terngrad")`, `Plan.parse("ps-async servers=4")`), for
captured modules and for transformers by their sizes alike.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import PlanError
from paceline.extend import claim, named
from paceline.spec.plan import Plan
from paceline.spec.synchronisation import AVERAGE, SETTINGS, Relaxation, register_average
from paceline.spec.vocabulary import Mode
from paceline.sync import rarely
from paceline.sync.compressed import compressed
from paceline.sync.served import served
from paceline.sync.way import USUAL, Way

#: word of a plan -> the way that it names, with its settings
WAYS: dict[str, Callable[[Relaxation], Way]] = {
    **{name: named(average.way) for name, average in AVERAGE.items()},
    "ps-sync": served,
}


def register(name: str, make: Callable[[Relaxation], Way]) -> None:
    """Makes `name` a word of a plan: gradients are averaged every step, in the way that `make` returns for
    the plan's settings.
    """
    claim("way of averaging", name, make, WAYS)
    register_average(name)
    WAYS[name] = make


def way_of(plan: Plan) -> Way:
    """What of a plan's way of synchronising happens every step; PlanError where it does not go with the rest
    of the plan.
    """
    relax = plan.relax
    if relax.plain:
        return USUAL
    check(plan)
    if not relax.mode.every_step:
        return rarely.alone(relax)
    if relax.mode is not Mode.REPLICAS:
        return WAYS[relax.mode](relax)
    return compressed(relax) if relax.compress else WAYS[relax.average](relax)


def check(plan: Plan) -> None:
    """That a way of synchronising goes with the rest of the plan."""
    relax = plan.relax
    if not plan.sharding.whole:
        raise PlanError(
            f"plan cannot run: {relax.label} averages whole replicas, but {plan.sharding} shards them; leave"
            f" {plan.sharding} out"
        )
    if relax.compress and (not relax.mode.every_step or relax.average != "allreduce"):
        other = relax.mode if relax.mode is not Mode.REPLICAS else relax.average
        raise PlanError(
            f"plan cannot run: {relax.compress} is modelled for gradients that are averaged every step, not"
            f" with {other}"
        )
    for name, modes in SETTINGS.items():
        if getattr(relax, name) and relax.mode not in modes:
            raise PlanError(f"plan cannot run: {name}={getattr(relax, name)} does not go with {relax.label}")
