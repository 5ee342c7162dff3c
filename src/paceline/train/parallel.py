"""`parallelize`: two added lines in a training loop."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.errors import PlanError, RunError, SpecError
from paceline.spec import trained
from paceline.spec.plan import Plan
from paceline.spec.synchronisation import PLAIN, Relaxation
from paceline.spec.vocabulary import ALIASES, Mode, Sharding
from paceline.train import asynchronous, strategies
from paceline.train.comm import TIMEOUT_S, Engine, agree
from paceline.train.first_step import FirstStep
from paceline.train.launch import local_ranks
from paceline.train.precision import autocast, multiply_in
from paceline.train.strategies.base import Strategy
from paceline.train.strategies.foreign import Foreign
from paceline.train.strategies.hooked import within_ddp

if TYPE_CHECKING:
    from paceline.train.pipeline import Pipeline

_DDP = nn.parallel.DistributedDataParallel
_attached: WeakKeyDictionary[nn.Module, Strategy] = WeakKeyDictionary()
#: first steps of loops whose plans say a batch
_watched: WeakKeyDictionary[nn.Module, FirstStep] = WeakKeyDictionary()


def parallelize(
    model: nn.Module,
    optimizer: Optimizer,
    plan: str | Plan | Strategy,
    *,
    timeout_s: float = TIMEOUT_S,
    **options: Any,
) -> tuple[nn.Module, Optimizer]:
    """The model and optimizer to use in the loop, kept in sync on all ranks of the default process group in
    the way that `plan` says.

    `plan` is a name of `paceline.train.strategies` or of an asynchronous one (options as keywords), a plan of
    the planner (also in its words: "fsdp tp=2 bf16"), or a strategy object. Plans with pipeline stages run
    through `paceline.train.Pipeline`.
    """
    if not dist.is_initialized() and not _meets_elsewhere(plan):
        raise RunError(
            "torch.distributed has no process group yet; call torch.distributed.init_process_group before"
            " parallelize"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise SpecError("the model has no parameter that needs a gradient; there is nothing to keep the same")
    name = name_of(plan) if isinstance(plan, str) else ""
    if name in asynchronous.NAMES:
        return _joined(model, optimizer, name, {"timeout_s": timeout_s, **_words(str(plan)), **options})
    if model in _attached:
        raise RunError(
            f"this model is kept the same by {_attached[model].name!r} already; "
            "call paceline.train.close(model) first"
        )
    if isinstance(plan, str) and name not in strategies.names():
        plan = _parse(plan)
    if isinstance(plan, Plan):
        return _planned(model, optimizer, plan, timeout_s, options)
    strategy = strategies.make(plan, **options) if isinstance(plan, str) else plan
    if not isinstance(strategy, Strategy):
        raise SpecError(f"plan is a name, a plan or a strategy; got {plan!r}")
    if options and not isinstance(plan, str):
        raise SpecError(
            f"options go to the strategy where it is made; got {', '.join(options)} beside a {strategy.name}"
            " strategy"
        )
    if isinstance(model, _DDP):
        strategy = within_ddp(strategy)
    device = next(model.parameters()).device
    engine = None
    if strategy.own_engine:
        engine = Engine(timeout_s=timeout_s, device=device if device.type == "cuda" else torch.device("cpu"))
    try:
        strategy.attach(model, optimizer, engine)
    except Exception:
        if engine is not None:
            engine.close()
        raise
    _attached[model] = strategy
    return model, optimizer


def _meets_elsewhere(plan: str | Plan | Strategy) -> bool:
    """Whether ranks need no process group: workers of servers and of neighbours find each other by
    themselves.
    """
    if isinstance(plan, str):
        if name_of(plan) in strategies.names():
            return name_of(plan) in asynchronous.NAMES
        plan = _parse(plan)
    return isinstance(plan, Plan) and plan.relax.mode in asynchronous.NAMES


def check(text: str, world: int) -> None:
    """Raises what `parallelize` on so many ranks would say of a name with its options, or of a plan in words;
    nothing is started or touched.
    """
    name = name_of(text)
    if name not in strategies.names():
        name, settings = strategy_of(_filled(_parse(text), world, world))
        if name in asynchronous.NAMES:
            from paceline.train.asynchronous import wrap

            wrap.check(name, settings, world)
    elif name in asynchronous.NAMES:
        from paceline.train.asynchronous import wrap

        wrap.check(name, _words(text), world)
    else:
        strategies.make(text)


def name_of(text: str) -> str:
    """The name in `text`, with the word that plans have for it; options and settings are left out."""
    name = text.partition(":")[0]
    return ALIASES.get(name, name)


def strategy_in(text: str) -> str:
    """The strategy that a name with its options, or a plan in words, runs; empty for sharded parameters."""
    name = name_of(text)
    if name in strategies.names():
        return name
    plan = _parse(text)
    return "" if plan.sharding in trained.SHARDED or plan.tp > 1 else strategy_of(plan)[0].partition(":")[0]


def batch_in(text: str) -> int:
    """Samples of a step that a plan in words says; 0 where it, or a name, does not."""
    return 0 if name_of(text) in strategies.names() else _parse(text).gbs


def _words(text: str) -> dict[str, Any]:
    """Options of an asynchronous strategy."""
    name, _, given = text.partition(":")
    return strategies.words(name, given, asynchronous.strategies()[name], 2)


def _joined(
    model: nn.Module, optimizer: Optimizer, name: str, options: dict[str, Any]
) -> tuple[nn.Module, Optimizer]:
    """An asynchronous strategy: a run that this process joins, and that `close` leaves."""
    model, joined = strategies.called(name, asynchronous.strategies()[name], model, optimizer, **options)
    before = _attached.get(model)
    if isinstance(before, Foreign):  # several optimizers are several runs
        before.also(joined.close)
    else:
        _attached[model] = Foreign(name, model, joined, joined.close)
    return model, joined


def _parse(text: str) -> Plan:
    """A plan in words; where those are not, a strategy was meant, and the message names the nearest."""
    try:
        return Plan.parse(text)
    except PlanError:
        if not {" ", "="} & set(text.partition(":")[0]):
            strategies.make(text)
        raise


def _filled(plan: Plan, world: int, node_devices: int) -> Plan:
    """A plan for the ranks that were started; PlanError where `parallelize` cannot run it."""
    if plan.pp > 1:
        raise PlanError(
            f"a plan with pp={plan.pp} has no single model to return; run it with paceline.train.Pipeline"
        )
    filled = trained.resolved(plan, world, node_devices)
    if plan.relax.compress and plan.sharding in trained.SHARDED:
        from paceline.train.scatter import check

        check(plan.relax.scheme)
    return filled


def _planned(
    model: nn.Module, optimizer: Optimizer, plan: Plan, timeout_s: float, options: dict[str, Any]
) -> tuple[nn.Module, Optimizer]:
    """Memory, precision and kernels, then sharding or a strategy."""
    from paceline.train.memory import compiled, offload, recompute

    world = dist.get_world_size() if dist.is_initialized() else asynchronous.world()
    here = agree(local_ranks(world)) if dist.is_initialized() else world
    filled = _filled(plan, world, here)
    multiply_in(plan.precision)
    compiled(offload(recompute(model, plan.recompute), plan.offload), plan.framework)
    if plan.sharding in trained.SHARDED or plan.tp > 1:
        _shard(model, optimizer, filled, options)
    else:
        autocast(model, plan.precision)
        name, settings = strategy_of(filled)
        model, optimizer = parallelize(model, optimizer, name, timeout_s=timeout_s, **{**settings, **options})
    watching = FirstStep(model, optimizer, plan, filled)
    if not watching.done:
        _watched[model] = watching
    return model, optimizer


def _shard(model: nn.Module, optimizer: Optimizer, plan: Plan, options: dict[str, Any]) -> None:
    """Splits a model by FSDP2 and by tensor parallelism."""
    from paceline.train.scatter import compress
    from paceline.train.sharded import shard

    strategies.known(str(plan), options, ())
    undo = shard(model, optimizer, plan)
    _attached[model] = Foreign(str(plan), model, optimizer, undo)
    if plan.relax.compress:
        compress(model, plan.relax.scheme)


def strategy_of(plan: Plan) -> tuple[str, dict[str, Any]]:
    """Name and options of the strategy that runs a resolved plan without sharded parameters."""
    relax = plan.relax
    if relax.mode.averages_rarely:
        return relax.mode, {"period": relax.every, "island": relax.island or None}
    if relax.mode is not Mode.REPLICAS:
        return relax.mode, _asynchronous(relax)
    if relax.compress:
        return str(relax.scheme), _engine_buckets(plan)
    if relax.average != PLAIN.average:
        return relax.average, {}
    if plan.sharding is Sharding.ZERO1:
        # optimizer state shared out, parameters gathered under the next forward pass
        size = int(plan.bucket_bytes)
        return "overlap", {"least_bytes": size, "most_bytes": size}
    return "ddp", {"bucket_cap_mb": plan.bucket_bytes / 2**20}


def _engine_buckets(plan: Plan) -> dict[str, Any]:
    """Sizes of the buckets of our own engine, where they are not its default: with that it also looks at the
    cores.
    """
    usual = plan.relax.defaults
    if plan.bucket_bytes == usual.bucket_bytes:
        return {}
    first = min(usual.first_bucket_bytes, plan.bucket_bytes)
    return {"bucket_bytes": plan.bucket_bytes, "first_bytes": first}


def _asynchronous(relax: Relaxation) -> dict[str, Any]:
    """Options of an asynchronous strategy."""
    names = {"period": "period", "servers": "servers", "staleness": "staleness", "backup": "backups"}
    options = {option: value for field, option in names.items() if (value := getattr(relax, field))}
    if relax.compress:
        options["up"] = f"{relax.compress}:{relax.ratio:g}" if relax.ratio else relax.compress
    return options


def of(model: nn.Module) -> Strategy:
    """The strategy that a model was given: whatever the plan, it has `synchronize()` and `no_sync()`."""
    if model not in _attached:
        raise SpecError("this model was not parallelized by paceline.train; pass what parallelize was given")
    return _attached[model]


def close(model: nn.Module | Pipeline) -> None:
    """Lets go of a model; all ranks do together. Threads, process groups and hooks are gone then, parameters
    and the optimizer's state as the last step left them, all of them on every rank (of a pipeline, those of
    its own stages). Where a rank has died, the others do not wait for it: what was on its way is lost, and an
    error says so; models that are split, and pipelines, wait as long as their collectives do.
    """
    if not isinstance(model, nn.Module):
        model.close()
        return
    if (watching := _watched.pop(model, None)) is not None:
        watching.close()
    strategy = _attached.pop(model, None)
    if strategy is None:
        return
    with contextlib.ExitStack() as rest:
        if strategy.own_engine:
            rest.callback(strategy.engine.close)
        rest.callback(strategy.detach)
        strategy.finish()
