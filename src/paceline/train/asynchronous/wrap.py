"""Strategies by name: what is started where, and what the user's loop gets."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.errors import RunError, SpecError
from paceline.train.asynchronous import Factory, server
from paceline.train.asynchronous.client import Client
from paceline.train.asynchronous.codecs import codec
from paceline.train.asynchronous.flat import Flat
from paceline.train.asynchronous.gossip import check_period, gossip
from paceline.train.asynchronous.hogwild import hogwild
from paceline.train.asynchronous.policy import Policy
from paceline.train.asynchronous.remote import Distributed, ElasticOptimizer, ServerOptimizer
from paceline.train.asynchronous.server import ServerSpec
from paceline.train.asynchronous.wire import Rendezvous

#: host:port:run of the store, set by whoever started the workers
VARIABLE = "PACELINE_RENDEZVOUS"


def rendezvous() -> Rendezvous:
    """Where this run meets: `PACELINE_RENDEZVOUS`, or one port above torchrun's own, kept by rank 0."""
    named = os.environ.get(VARIABLE)
    if named:
        host, port, run = [*named.split(":"), "run"][:3]
        return Rendezvous(host=host, port=int(port), run=run)
    if "MASTER_ADDR" not in os.environ:
        raise RunError(f"no run to join: start workers with `paceline train`, torchrun, or set {VARIABLE}=HOST:PORT")
    place = Rendezvous(host=os.environ["MASTER_ADDR"], port=int(os.environ["MASTER_PORT"]) + 1)
    if os.environ.get("RANK", "0") == "0":
        from paceline.train.asynchronous.launch import keep

        keep(place)
    return place


def world(workers: int | None) -> int:
    """Workers of this run, as given or as the launcher says."""
    return workers if workers is not None else int(os.environ.get("PACELINE_WORKERS", os.environ.get("WORLD_SIZE", "1")))


def served(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, mode: str, rule: str = "gradient", workers: int | None = None, servers: int | None = None,
    staleness: int = 8, backups: int = 1, staleness_aware: bool = False, elasticity: float | None = None, period: int = 4, push_every: int = 1,
    fetch_every: int = 1, up: str = "none", down: str = "none", checkpoint: Path | str | None = None, checkpoint_every: int = 100, streams: int = 1,
    retry_s: float = 60.0, pace_Bps: float | None = None, overlap: bool = False,  # noqa: N803
) -> tuple[nn.Module, Distributed]:
    """Workers round parameter servers; see `Policy` for modes and rules.

    `up` and `down` name codecs; `checkpoint` is a folder in which servers save every `checkpoint_every` updates; `elasticity` is 0.9 / workers
    unless given, the stable choice of the paper; `overlap` sends each server's part during the backward pass, once its gradients are there.
    """
    policy = _checked(mode=mode, rule=rule, workers=world(workers), staleness=staleness, backups=backups, staleness_aware=staleness_aware,
                      elasticity=elasticity, period=period, push_every=push_every, fetch_every=fetch_every, up=up, down=down, streams=streams,
                      overlap=overlap)
    place = rendezvous()
    count = servers if servers is not None else int(os.environ.get("PACELINE_SERVERS", "1"))
    flat, store = Flat(optimizer), place.store()
    shards = flat.shards(count)
    if store.add("first", 1) == 1:  # whoever comes first says how the model starts
        folder = Path(checkpoint or os.environ.get("PACELINE_CHECKPOINT") or tempfile.mkdtemp(prefix="paceline-servers-"))
        folder.mkdir(parents=True, exist_ok=True)
        for number, (start, (_, parts)) in enumerate(zip(flat.values().split([size for size, _ in shards]), shards, strict=True)):
            server.publish(store, ServerSpec(
                number=number, rendezvous=place, start=start, parts=parts, optimizer=type(optimizer), policy=policy, up=up, down=down,
                checkpoint=folder / f"server{number}.pt", checkpoint_every=checkpoint_every, streams=streams, pace_Bps=pace_Bps,
            ))
        store.set("servers", str(count))
    client = Client(place, [size for size, _ in shards], up=up, down=down, retry_s=retry_s)
    wrapped: Distributed
    if rule == "elastic":
        wrapped = ElasticOptimizer(optimizer, client, period=period)
    else:
        wrapped = ServerOptimizer(optimizer, client, push_every=push_every, fetch_every=fetch_every, overlap=overlap)
    wrapped.recorder.describe(mode=mode, servers=count, staleness=staleness, backups=backups)
    return model, wrapped


def _checked(
    *, mode: str, workers: int, rule: str = "gradient", staleness: int = 8, backups: int = 1, staleness_aware: bool = False,
    elasticity: float | None = None, period: int = 4, push_every: int = 1, fetch_every: int = 1, up: str = "none", down: str = "none",
    streams: int = 1, overlap: bool = False, servers: int | None = None, **_: Any,
) -> Policy:
    """The policy that these options of `served` ask for; raises where they cannot be, before anything is started."""
    if min(period, push_every, fetch_every, streams, 1 if servers is None else servers) < 1:
        raise SpecError("servers, period, push_every, fetch_every and streams count from 1")
    if overlap and (rule == "elastic" or max(push_every, fetch_every) > 1):
        raise SpecError("overlap sends every gradient during its backward pass; it does not go with elastic averaging, push_every or fetch_every")
    codec(up), codec(down)
    return Policy(mode=mode, rule=rule, workers=workers, staleness=staleness, backups=backups, staleness_aware=staleness_aware,
                  elasticity=elasticity if elasticity is not None else min(0.5, 0.9 / workers))


def check(name: str, options: Mapping[str, Any], workers: int) -> None:
    """Raises what a strategy would say of its options on so many workers; nothing is started."""
    factory = FACTORIES[name]
    if isinstance(factory, partial):
        _checked(**{"workers": workers, **factory.keywords, **options})
    elif name == "gossip":
        check_period(options.get("period", 1))


FACTORIES: dict[str, Factory] = {
    "ps-async": partial(served, mode="async"),
    "ps-sync": partial(served, mode="sync"),
    "ps-bounded": partial(served, mode="bounded"),
    "ps-backup": partial(served, mode="backup"),
    "easgd": partial(served, mode="async", rule="elastic"),
    "easgd-sync": partial(served, mode="sync", rule="elastic"),
    "hogwild": hogwild,
    "gossip": gossip,
}


def options_of(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options that a strategy knows, so that one command line serves all of them."""
    import inspect

    factory = FACTORIES[name]
    known = inspect.signature(factory.func if isinstance(factory, partial) else factory).parameters
    return {key: value for key, value in options.items() if key in known and value is not None}
