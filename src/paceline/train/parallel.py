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
from paceline.spec.plan import Plan
from paceline.train import asynchronous, strategies
from paceline.train.comm import TIMEOUT_S, Engine
from paceline.train.strategies.base import Strategy
from paceline.train.strategies.foreign import Foreign
from paceline.train.strategies.hooked import within_ddp

if TYPE_CHECKING:
    from paceline.train.pipeline import Pipeline

_DDP = nn.parallel.DistributedDataParallel
_attached: WeakKeyDictionary[nn.Module, Strategy] = WeakKeyDictionary()


def parallelize(
    model: nn.Module,
    optimizer: Optimizer,
    plan: str | Plan | Strategy,
    *,
    timeout_s: float = TIMEOUT_S,
    **options: Any,
) -> tuple[nn.Module, Optimizer]:
    """The model and optimizer to use in the loop, kept one model on all ranks of the default process group in
    the way that `plan` says.

    `plan` is a name of `paceline.train.strategies` or of an asynchronous one (options as keywords), a plan of
    the planner (also in its words: "fsdp tp=2 bf16"), or a strategy object. Plans with pipeline stages run
    through `paceline.train.Pipeline`.
    """
    if not dist.is_initialized() and not (
        isinstance(plan, str) and plan.partition(":")[0] in asynchronous.NAMES
    ):
        raise RunError(
            "torch.distributed has no process group yet; call torch.distributed.init_process_group before"
            " parallelize"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise SpecError("the model has no parameter that needs a gradient; there is nothing to keep the same")
    name = plan.partition(":")[0] if isinstance(plan, str) else ""
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


def check(text: str, world: int) -> None:
    """Raises what `parallelize` on so many ranks would say of a name with its options, or of a plan in words;
    nothing is started or touched.
    """
    name = text.partition(":")[0]
    if name not in strategies.names():
        _check(_parse(text), world)
    elif name in asynchronous.NAMES:
        from paceline.train.asynchronous import wrap

        wrap.check(name, _words(text), world)
    else:
        strategies.make(text)


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


def _check(plan: Plan, world: int) -> None:
    """Raises where a plan cannot be run by `parallelize`."""
    from paceline.train.sharded import SHARDED

    if plan.pp > 1:
        raise PlanError(
            f"a plan with pp={plan.pp} has no single model to return; run it with paceline.train.Pipeline"
        )
    if plan.cp > 1 or plan.ep > 1:
        raise PlanError(
            f"context and expert parallelism are predicted but not run; got cp={plan.cp}, ep={plan.ep}"
        )
    if plan.sharding not in SHARDED and plan.tp == 1:
        return
    dp = plan.dp or world // plan.tp
    if plan.sharding not in SHARDED and dp > 1:
        raise PlanError(
            f"tp={plan.tp} with {plan.sharding} over dp={dp} is not run; use fsdp or hsdp with it"
        )
    if plan.precision not in ("bf16", "fp32", "tf32"):
        raise PlanError(f"precision {plan.precision} with sharded parameters is not run; allowed: bf16, fp32")
    if plan.relax.compress and (plan.sharding == "hsdp" or plan.tp > 1):
        raise PlanError(
            f"{plan.relax.compress} goes with fsdp over all ranks; got {plan.sharding} and tp={plan.tp}"
        )
    if plan.relax.compress:
        from paceline.train.scatter import check

        check(plan.relax.scheme)


def _planned(
    model: nn.Module, optimizer: Optimizer, plan: Plan, timeout_s: float, options: dict[str, Any]
) -> tuple[nn.Module, Optimizer]:
    """Memory, precision, then sharding or a strategy."""
    from paceline.train.memory import offload, recompute
    from paceline.train.precision import autocast
    from paceline.train.sharded import SHARDED, shard

    _check(plan, dist.get_world_size())
    offload(recompute(model, plan.recompute), plan.offload if plan.offload != "optimizer" else "none")
    if plan.sharding in SHARDED or plan.tp > 1:
        undo = shard(model, optimizer, plan)
        _attached[model] = Foreign(str(plan), model, optimizer, undo)
        if plan.relax.compress:
            from paceline.train.scatter import compress

            compress(model, plan.relax.scheme)
        return model, optimizer
    autocast(model, plan.precision)
    return parallelize(model, optimizer, _name(plan), timeout_s=timeout_s, **options)


def _name(plan: Plan) -> str:
    """The strategy of a plan without model parallelism."""
    relax = plan.relax
    if relax.compress:
        return str(relax.scheme)
    if relax.mode in ("local-sgd", "diloco"):
        return {"local-sgd": "local", "diloco": "diloco"}[relax.mode]
    if relax.mode != "replicas":
        return relax.mode
    if plan.sharding == "zero1":
        return "overlap"  # optimizer state shared out, parameters gathered under the next forward pass
    return relax.average


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
    strategy = _attached.pop(model, None)
    if strategy is None:
        return
    with contextlib.ExitStack() as rest:
        if strategy.own_engine:
            rest.callback(strategy.engine.close)
        rest.callback(strategy.detach)
        strategy.finish()
