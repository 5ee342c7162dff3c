"""What `paceline.train` does with each field of a plan: it honours the field, or refuses it by name.

`TRAINED` has a line for every field of `Plan` and of its `Relaxation`; `refuse` raises for what training does
not run. Nothing here imports torch, so that emitters and commands say the same before anything is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paceline.errors import PlanError
from paceline.spec.compression import SCHEMES
from paceline.spec.defaults import NODE_DEVICES
from paceline.spec.plan import SHARED, SPREAD, Plan, resolve
from paceline.spec.synchronisation import AVERAGES, PLAIN, SETTINGS, Relaxation
from paceline.spec.vocabulary import ContextExchange, Mode, Offload, Precision, Sharding

#: field of a plan, or of its relaxation -> what training does with it
TRAINED: Mapping[str, str] = {
    **dict.fromkeys((*SPREAD, *SHARED), "refused"),  # but for these
    "dp": "with the other degrees, must be the ranks that were started",
    "tp": "attention and feed-forward are split, by torch's tensor parallelism",
    "pp": "stages of `paceline.train.Pipeline`; `parallelize` refuses it",
    "vpp": "chunks of each stage of a `Pipeline`",
    "mbs": "samples of a pass; compared with the first pass",
    "gbs": "samples of a step; compared with the passes of the first step",
    "seq": "tokens of a sample; compared with the first pass",
    "sharding": "DDP; ZeRO-1 as `overlap`; the others by FSDP2",
    "shard": "ranks of FSDP2's inner axis under hsdp",
    "sp": "refused",
    "schedule": "order of the passes of a `Pipeline`",
    "recompute": "checkpoints of the repeated blocks",
    "precision": "autocast, FSDP2's mixed precision, or float32 products in TF32; fp8 and fp4 are refused",
    "context": "refused, with cp",
    "bucket_bytes": "bytes of a bucket of gradients, where they are reduced in buckets",
    "prefetch": "blocks that FSDP2 gathers ahead",
    "reshard": "whether FSDP2 drops parameters after the forward pass",
    "offload": "activations in host memory; optimizer state is refused",
    "adapters": "refused",
    "framework": "torch runs as it is, torch-compile compiles the repeated blocks; others are refused",
    "relax": "the strategy, with its settings",
    "compress": "the compressor, or the codec of parameter servers",
    "ratio": "setting of the compressor",
    "rank": "setting of the compressor",
    "average": "the strategy of that name",
    "mode": "the strategy of that name",
    "period": "steps between two exchanges",
    "island": "ranks that average gradients in every backward pass, under local-sgd and diloco",
    "servers": "parameter servers, processes beside rank 0",
    "staleness": "bound of ps-bounded",
    "backup": "backup workers of ps-backup",
}
#: frameworks whose kernels training runs, the second compiled
FRAMEWORKS = ("torch", "torch-compile")
#: plans whose parameters, or gradients at least, FSDP2 shares out
SHARDED = (Sharding.FSDP, Sharding.HSDP, Sharding.ZERO2)
#: precisions in which training runs replicas, and sharded parameters
REPLICATED = (Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16)
SPLIT = (Precision.FP32, Precision.TF32, Precision.BF16)


def resolved(plan: Plan, ranks: int, node_devices: int = NODE_DEVICES) -> Plan:
    """The plan with its degrees and settings filled in for the ranks that were started; PlanError where
    training does not run it.
    """
    refuse(plan)
    degrees = plan.tp * plan.pp
    dp = plan.dp or ranks // degrees
    if dp * degrees != ranks:
        raise PlanError(
            f"the plan's dp {dp} x pp {plan.pp} x tp {plan.tp} = {dp * degrees} is not the {ranks} ranks that"
            " were started"
        )
    filled = resolve(plan, ranks, node_devices=min(node_devices, ranks))
    if plan.tp > 1 and filled.sharding not in SHARDED and dp > 1 and plan.pp == 1:
        raise PlanError(
            f"tp={plan.tp} with {plan.sharding} over dp={dp} is not run; use fsdp or hsdp with it"
        )
    return filled


def refuse(plan: Plan) -> None:
    """Raises with the first field that training does not honour."""
    for problem in (*_model(plan), *_state(plan), *_pipeline(plan), *_relaxation(plan)):
        raise PlanError(problem)


def _model(plan: Plan) -> Iterator[str]:
    """How one replica computes."""
    for name in (*SPREAD, *SHARED):
        if TRAINED[name] == "refused" and (size := getattr(plan, name)) > 1:
            yield f"{name}={size} is predicted but not run; leave it out"
    if plan.context is not ContextExchange.RING:
        yield f"context={plan.context} is of context-parallel ranks, which are not run; leave it out"
    if plan.sp:
        yield "sp is predicted but not run: norms see all tokens on every tensor-parallel rank; leave sp out"
    if plan.adapters:
        yield (
            "adapters is predicted but not run; leave it out, and pass a model of which only the adapters"
            " need gradients"
        )
    if plan.offload is Offload.OPTIMIZER:
        yield "offload=optimizer is predicted but not run; allowed: none, activations"
    if plan.framework and plan.framework not in FRAMEWORKS:
        yield (
            f"framework={plan.framework} is not what runs here; leave it out, or take"
            f" {' or '.join(FRAMEWORKS)}"
        )
    allowed = SPLIT if plan.sharding in SHARDED or plan.tp > 1 else REPLICATED
    if plan.precision not in allowed:
        what = " with sharded parameters" if allowed is SPLIT else ""
        yield f"precision {plan.precision}{what} is not run; allowed: {', '.join(allowed)}"


def _state(plan: Plan) -> Iterator[str]:
    """What data-parallel ranks share, and in what pieces."""
    gathers = plan.sharding.shards_parameters
    if plan.prefetch != Plan.prefetch and not gathers:
        yield f"prefetch={plan.prefetch} is of fsdp and hsdp, but the sharding is {plan.sharding}"
    if not plan.reshard and not gathers:
        yield f"no-reshard is of fsdp and hsdp, but the sharding is {plan.sharding}"
    if plan.bucket_bytes != Plan.bucket_bytes and not _has_buckets(plan):
        yield (
            f"bucket={plan.bucket_bytes / 1e6:g}MB is of gradients that travel in buckets (ddp, zero1,"
            f" compressed), which those of {_way(plan)} do not"
        )


def _has_buckets(plan: Plan) -> bool:
    relax = plan.relax
    everywhere = relax.mode is Mode.REPLICAS and relax.average == PLAIN.average
    return everywhere and plan.sharding not in SHARDED and plan.tp * plan.pp == 1


def _way(plan: Plan) -> str:
    """What brings gradients together, in a message."""
    if plan.sharding in SHARDED:
        return plan.sharding
    return f"tp={plan.tp} pp={plan.pp}" if plan.tp * plan.pp > 1 else plan.relax.label


def _pipeline(plan: Plan) -> Iterator[str]:
    """Stages, and what is of them."""
    if plan.pp == 1:
        if plan.vpp > 1:
            yield f"vpp={plan.vpp} is of a pipeline, but pp is 1"
        if plan.schedule:
            yield f"schedule={plan.schedule} is of a pipeline, but pp is 1"
    elif not plan.relax.plain:
        yield f"{plan.relax.label} with pp={plan.pp} is not run; a pipeline averages gradients in full"


def _relaxation(plan: Plan) -> Iterator[str]:
    """What is sent less of, later, or not waited for."""
    relax = plan.relax
    yield from _settings(relax)
    if relax.average != PLAIN.average and (relax.compress or relax.mode is not Mode.REPLICAS):
        yield f"{relax.average} goes with full gradients of replicas; got {relax.compress or relax.mode}, too"
    if relax.compress and relax.mode not in (Mode.REPLICAS, *SETTINGS["servers"]):
        yield f"{relax.compress} goes with gradients that are sent every step, which {relax.mode} does not"
    if relax.plain or (plan.sharding.whole and plan.tp == 1):
        return
    sharded_by_all = plan.sharding in (Sharding.FSDP, Sharding.ZERO2) and plan.tp == 1
    if not (relax.compress and sharded_by_all) or relax.mode is not Mode.REPLICAS:
        yield (
            f"{relax.label} goes with whole replicas, or where it compresses with fsdp over all ranks; got"
            f" {plan.sharding} and tp={plan.tp}"
        )


def _settings(relax: Relaxation) -> Iterator[str]:
    """Settings without what they set."""
    for name, modes in SETTINGS.items():
        if (value := getattr(relax, name)) and relax.mode not in modes:
            yield f"{name}={value} is of {', '.join(modes)}; got {relax.label}"
    for name in ("ratio", "rank"):
        value = getattr(relax, name)
        kind = SCHEMES.get(relax.compress)
        if value and (kind is None or name not in kind.__dataclass_fields__):
            having = [one for one, scheme in SCHEMES.items() if name in scheme.__dataclass_fields__]
            yield f"{name}={value:g} is of {', '.join(having)}; got {relax.label}"
    if relax.average not in AVERAGES:
        yield f"average={relax.average} is not known; allowed: {', '.join(AVERAGES)}"
