"""Strategies by name: what is started where, and what the user's loop gets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.errors import SpecError
from paceline.spec import defaults
from paceline.spec.defaults import DEFAULTS
from paceline.spec.vocabulary import Mode, ServerMode, ServerRule
from paceline.train.asynchronous import Factory, server
from paceline.train.asynchronous.client import Client
from paceline.train.asynchronous.codecs import codec
from paceline.train.asynchronous.flat import FlatVector
from paceline.train.asynchronous.gossip import check_period, gossip
from paceline.train.asynchronous.hogwild import hogwild
from paceline.train.asynchronous.launch import announce
from paceline.train.asynchronous.meeting import nodes, rendezvous, world
from paceline.train.asynchronous.moments import divided
from paceline.train.asynchronous.policy import UpdatePolicy
from paceline.train.asynchronous.remote import Distributed, ElasticOptimizer, ServerOptimizer
from paceline.train.asynchronous.server import ServerSpec
from paceline.train.asynchronous.store import TIMEOUT_S, VARIABLE


def served(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    mode: ServerMode,
    rule: ServerRule = ServerRule.GRADIENT,
    workers: int | None = None,
    servers: int | None = None,
    staleness: int = DEFAULTS[Mode.PS_BOUNDED].staleness,
    backups: int = DEFAULTS[Mode.PS_BACKUP].backup,
    staleness_aware: bool = False,
    elasticity: float | None = None,
    period: int = DEFAULTS[Mode.EASGD].period,
    push_every: int = 1,
    fetch_every: int = 1,
    up: str = "none",
    down: str = "none",
    checkpoint: Path | str | None = None,
    checkpoint_every: int = 100,
    streams: int = 1,
    retry_s: float = 60.0,
    pace_Bps: float | None = None,
    overlap: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> tuple[nn.Module, Distributed]:
    """Workers round parameter servers; see `Policy` for modes and rules.

    `up` and `down` name codecs; `checkpoint` is a folder of the servers' machine in which they save every
    `checkpoint_every` updates, and from which a later command goes on; `elasticity` is 0.9 / workers unless
    given, the stable choice of the paper; `overlap` sends each server's part during the backward pass, once
    its gradients are there.
    """
    kind = server.name_of(type(optimizer))
    policy = _checked(
        mode=mode,
        rule=rule,
        workers=world(workers),
        staleness=staleness,
        backups=backups,
        staleness_aware=staleness_aware,
        elasticity=elasticity,
        period=period,
        push_every=push_every,
        fetch_every=fetch_every,
        up=up,
        down=down,
        streams=streams,
        overlap=overlap,
    )
    count = servers if servers is not None else _usual_servers()
    flat = FlatVector(optimizer)
    shards = flat.shards(count)
    server.check_optimizer(kind, trusted=None if VARIABLE in os.environ else kind)
    place = rendezvous(timeout_s, trusted=kind)
    folder = _folder(checkpoint, place.number)
    store = place.store()
    if store.add("first", 1) == 1:  # whoever comes first says how the model starts
        moments = divided(flat.parameters, shards, optimizer.state)
        starts = flat.values().split([size for size, _ in shards])
        for number, (start, (_, parts)) in enumerate(zip(starts, shards, strict=True)):
            server.publish(
                store,
                ServerSpec(
                    number=number,
                    rendezvous=place,
                    start=start,
                    parts=parts,
                    optimizer=kind,
                    policy=policy,
                    moments=moments[number] if rule == ServerRule.GRADIENT and any(moments[number]) else (),
                    groups=len(optimizer.param_groups),
                    up=up,
                    down=down,
                    checkpoint_every=checkpoint_every,
                    checkpoint=folder / f"server{number}.pt" if folder else None,
                    streams=streams,
                    pace_Bps=pace_Bps,
                ),
            )
        announce(place, workers=policy.workers, servers=count)
    client = Client(place, [size for size, _ in shards], up=up, down=down, retry_s=retry_s)
    wrapped: Distributed
    if rule == ServerRule.ELASTIC:
        wrapped = ElasticOptimizer(optimizer, client, period=period)
    else:
        wrapped = ServerOptimizer(
            optimizer, client, push_every=push_every, fetch_every=fetch_every, overlap=overlap
        )
    wrapped.policy = policy
    wrapped.recorder.describe(mode=mode, servers=count, staleness=staleness, backups=backups)
    return model, wrapped


def _usual_servers() -> int:
    """As many as `paceline train` or the launcher says; else one for each node."""
    told = os.environ.get("PACELINE_SERVERS")
    return int(told) if told is not None else defaults.servers(nodes())


#: folders in which servers of this process's runs save
_folders: set[Path] = set()


def _folder(checkpoint: Path | str | None, number: int) -> Path | None:
    """Where the servers of the run of that number save: each run has a folder of its own."""
    told = os.environ.get("PACELINE_CHECKPOINT")
    if checkpoint is None:
        if told is None:
            return None
        return Path(told).absolute() / (f"run{number}" if number > 1 else "")
    folder = Path(checkpoint).absolute()
    if folder in _folders:
        raise SpecError(
            f"the servers of an earlier run of this process save in {str(folder)!r}, from which "
            "this one would go on; name a folder for each run"
        )
    _folders.add(folder)
    return folder


def _checked(
    *,
    mode: ServerMode,
    workers: int,
    rule: ServerRule = ServerRule.GRADIENT,
    staleness: int = DEFAULTS[Mode.PS_BOUNDED].staleness,
    backups: int = DEFAULTS[Mode.PS_BACKUP].backup,
    staleness_aware: bool = False,
    elasticity: float | None = None,
    period: int = DEFAULTS[Mode.EASGD].period,
    push_every: int = 1,
    fetch_every: int = 1,
    up: str = "none",
    down: str = "none",
    streams: int = 1,
    overlap: bool = False,
    servers: int | None = None,
    **_: Any,
) -> UpdatePolicy:
    """The policy that these options of `served` ask for; raises where they cannot be, before anything is
    started.
    """
    if min(period, push_every, fetch_every, streams, 1 if servers is None else servers) < 1:
        raise SpecError("servers, period, push_every, fetch_every and streams count from 1")
    if overlap and (rule == ServerRule.ELASTIC or max(push_every, fetch_every) > 1):
        raise SpecError(
            "overlap sends every gradient during its backward pass; it does not go with elastic averaging,"
            " push_every or fetch_every"
        )
    codec(up), codec(down)
    return UpdatePolicy(
        mode=mode,
        rule=rule,
        workers=workers,
        staleness=staleness,
        backups=backups,
        staleness_aware=staleness_aware,
        elasticity=elasticity if elasticity is not None else min(0.5, 0.9 / workers),
    )


def check(name: str, options: Mapping[str, Any], workers: int) -> None:
    """Raises what a strategy would say of its options on so many workers; nothing is started."""
    factory = FACTORIES[name]
    if isinstance(factory, partial):
        _checked(**{"workers": workers, **factory.keywords, **options})
    elif name == "gossip":
        check_period(options.get("period", 1))


FACTORIES: dict[str, Factory] = {
    "ps-async": partial(served, mode=ServerMode.ASYNC),
    "ps-sync": partial(served, mode=ServerMode.SYNC),
    "ps-bounded": partial(served, mode=ServerMode.BOUNDED),
    "ps-backup": partial(served, mode=ServerMode.BACKUP),
    "easgd": partial(served, mode=ServerMode.ASYNC, rule=ServerRule.ELASTIC),
    "easgd-sync": partial(served, mode=ServerMode.SYNC, rule=ServerRule.ELASTIC),
    "hogwild": hogwild,
    "gossip": gossip,
}


def options_of(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options that a strategy knows, so that one command line serves all of them."""
    import inspect

    factory = FACTORIES[name]
    known = inspect.signature(factory.func if isinstance(factory, partial) else factory).parameters
    return {key: value for key, value in options.items() if key in known and value is not None}
