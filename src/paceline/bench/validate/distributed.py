"""Sets of training steps of transformers on many devices: each row is predicted from its columns alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

from paceline import api
from paceline.bench import frameworks
from paceline.bench.validate.case import Case, PredictedValue, Row, csv_rows, find
from paceline.catalog import architectures, clusters, devices, models, transformers
from paceline.errors import PacelineError, PlanError, SpecError
from paceline.spec.cluster import Cluster, Tier
from paceline.spec.device import Device
from paceline.spec.framework import Framework
from paceline.spec.plan import Plan
from paceline.spec.prediction import Memory
from paceline.spec.transformer import Transformer, from_columns
from paceline.spec.vocabulary import Precision, Recompute

GBIT = 1e9 / 8
#: Gbit/s of a node's network where neither a row nor its device's architecture says
DEFAULT_GBPS = 800.0
#: stages
LONG_PIPELINE = 8


@cache
def cluster_of(
    device: str, count: int, per_node: int, gbps: float, domain: int, kind: str = "infiniband"
) -> Cluster:
    """Nodes as a row describes them: `per_node` devices on their own links, and a network of `gbps` Gbit/s
    per node.
    """
    target = devices.get(device)
    each = min(per_node, count)
    tiers = []
    if count > 1:
        tiers.append(clusters.link(target, min(domain, count)))
    if count > domain:
        node = gbps * GBIT
        tiers.append(
            Tier(name="network", kind=kind, bandwidth_Bps=min(node, node / each * 2), node_bandwidth_Bps=node)
        )
    if count % each:
        raise SpecError(f"{count} devices do not fill nodes of {each}")
    return Cluster(
        name=f"{count}x{device}",
        title=device,
        device=target,
        node_devices=each,
        nodes=count // each,
        tiers=tuple(tiers),
    )


Made = tuple[Transformer, Cluster, Plan, Framework | None]


def _case(
    name: str,
    device: str,
    measured: dict[str, float],
    make: Callable[[], Made],
    meter: str = "allocated",
    sweep: str = "",
    ran: bool = True,
) -> Case:
    """A case; `meter` says whose figure of memory was published: torch's allocated or reserved bytes, or the
    whole device's.

    `oom` is 1 where it was foreseen whether the step `ran` or ended without memory: its mean error is the
    share of wrong calls.
    """

    def answers() -> dict[str, PredictedValue]:
        model, cluster, plan, framework = make()
        p = api.predict(model, plan, cluster, framework=framework)
        right = float(p.fit.fits == ran)
        return {
            "step_s": PredictedValue(p.step_s, p.step_s_low, p.step_s_high),
            "peak_bytes": _held(p.memory, cluster.device, meter),
            "oom": PredictedValue(right, right, right),
        }

    def naive() -> dict[str, float]:
        model, cluster, plan, _ = make()
        peak = cluster.device.peak("bf16" if plan.precision.scaled else plan.precision)
        return {
            "step_s": model.flops(plan.gbs * plan.seq, plan.seq) / peak / cluster.device_count,
            "peak_bytes": 16.0 * model.parameters,
        }

    return Case(name=name, device=device, measured=measured, predict=answers, naive=naive, sweep=sweep)


def _held(memory: Memory, device: Device, meter: str) -> PredictedValue:
    """Bytes as a row's meter counts them."""
    if meter == "allocated":
        return PredictedValue(memory.peak_bytes, memory.peak_low_bytes, memory.peak_high_bytes)
    outside = device.memory_bytes - memory.available_bytes if meter == "device" else 0.0
    return PredictedValue(
        *(
            size + outside
            for size in (memory.reserved_bytes, memory.reserved_low_bytes, memory.reserved_high_bytes)
        )
    )


# -- vtrain ----------------------------------------------------------------------------------------

#: of GPT-2's tokenizer, which vTrain's scripts train with, and most others
GPT_VOCABULARY = 50257
#: four HDR InfiniBand ports per node (VIA-Research/vTrain)
VTRAIN_GBPS = 800.0
_VTRAIN = (
    "# GPUs",
    "global batch",
    "micro batch",
    "hidden size",
    "attention heads",
    "# layers",
    "sequence length",
    "tensor parallelism",
    "data parallelism",
    "pipeline parallelism",
    "iteration time (ms)",
)


def vtrain_multi(folder: Path, leave_out: bool) -> Iterable[Case] | None:
    """64 to 512 A100, Megatron-DeepSpeed, 1F1B, all activations recomputed."""
    return _vtrain(folder, "vtrain_a100_multi.csv", Recompute.FULL, frameworks.vtrain())


def vtrain_single(folder: Path, leave_out: bool) -> Iterable[Case] | None:
    """2 to 8 A100 of one node, activations kept: steps take three times the forward pass, not four."""
    return _vtrain(folder, "vtrain_a100_single.csv", Recompute.NONE, frameworks.vtrain_single())


def _vtrain(folder: Path, file: str, recompute: Recompute, framework: Framework) -> Iterable[Case] | None:
    path = find(folder / "published", file)
    if path is None:
        return None
    out = []
    for number, row in enumerate(csv_rows(path, _VTRAIN), 1):
        gpus, batch, micro, hidden, heads, layers, seq, tp, dp, pp = (
            int(float(row[column])) for column in _VTRAIN[:-1]
        )
        name = f"{number} {hidden}x{layers} gpus {gpus} tp {tp} dp {dp} pp {pp} mbs {micro} gbs {batch}"

        def make(
            sizes: tuple[int, ...] = (gpus, batch, micro, hidden, heads, layers, seq, tp, dp, pp),
        ) -> Made:
            gpus, batch, micro, hidden, heads, layers, seq, tp, dp, pp = sizes
            model = Transformer(
                name="gpt",
                layers=layers,
                hidden=hidden,
                heads=heads,
                ffn=4 * hidden,
                vocab=GPT_VOCABULARY,
                seq=seq,
            )
            plan = Plan(
                dp=dp,
                tp=tp,
                pp=pp,
                mbs=micro,
                gbs=batch,
                seq=seq,
                recompute=recompute,
                precision=Precision.FP16,
            )
            return model, cluster_of("a100-sxm-80gb", gpus, 8, VTRAIN_GBPS, 8), plan, framework

        out.append(
            _case(
                name,
                "a100-sxm-80gb",
                {"step_s": float(row["iteration time (ms)"]) * 1e-3},
                make,
                sweep=f"{hidden}x{layers}x{heads} seq {seq} gpus {gpus} gbs {batch}",
            )
        )
    return out


# -- tables in the common schema -------------------------------------------------------------------

_NEEDED = (
    "case_id",
    "model",
    "gpu",
    "n_gpus",
    "gpus_per_node",
    "step_time_s",
    "precision",
    "micro_batch",
    "global_batch",
    "tp",
    "pp",
    "framework",
)


def common(file: str) -> Callable[[Path, bool], Iterable[Case] | None]:
    """The reader of a table in the common schema."""

    def read(folder: Path, leave_out: bool) -> Iterable[Case] | None:
        path = find(folder / "published", file)
        return None if path is None else [_row_case(row) for row in csv_rows(path, _NEEDED)]

    return read


def _row_case(row: Row) -> Case:
    name = f"{row['case_id']} {row['model']} {row['gpu']} x{row['n_gpus']} {row['precision']}"
    measured, ran = {}, not _out_of_memory(row)
    if ran and row["step_time_s"]:
        measured["step_s"] = float(row["step_time_s"])
    if ran and row.get("peak_mem_gib"):
        measured["peak_bytes"] = float(row["peak_mem_gib"]) * 2**30
    try:
        made = _read(row)
        if ran and not measured:
            measured["step_s"] = _from_flops(row, made)
    except PacelineError as error:
        return Case(name=name, device=row["gpu"], skip=str(error).splitlines()[0][:100])
    if not ran or row.get("recompute"):  # a row that leaves open what is recomputed says nothing of memory
        measured["oom"] = 1.0
    return _case(name, made[1].device.name, measured, lambda: made, _meter(row), _sweep(row), ran)


def _meter(row: Row) -> str:
    """Whose figure of memory a row gives."""
    if "nvidia-smi" in (row.get("inferred_fields") or ""):
        return "device"
    return "reserved" if "torchtitan" in row["framework"] else "allocated"


def _out_of_memory(row: Row) -> bool:
    """Whether a row says that its step ended for lack of memory; one that has a time and speaks of another's
    is none.
    """
    try:
        ran = float(row.get("step_time_s") or 0) > 0
    except ValueError:
        ran = False
    columns = ("step_time_s", "peak_mem_gib", "throughput", "tflops_per_gpu", "options", "notes")
    return not ran and any(
        re.search(r"\bOOM\b|out of memory", row.get(column) or "", re.IGNORECASE) for column in columns
    )


#: days of 2022 from which on the rows of bigscience's sweeps compare with one another: its cluster was
#: repaired, its precision changed
_ERAS = ("02-25", "02-28")


def _sweep(row: Row) -> str:
    """Model, devices, batch and sequence of a row of bigscience's sweeps, and the days that it compares with;
    other tables hold no sweeps.
    """
    if "bigscience" not in (row.get("source_id") or ""):
        return ""
    era = sum((row.get("notes") or "")[:5] >= day for day in _ERAS)
    sizes = " ".join(
        f"{column} {row[column]}"
        for column in ("n_layers", "hidden", "heads", "seq_len", "n_gpus", "global_batch")
    )
    return f"{sizes} era {era}"


def _from_flops(row: Row, made: Made) -> float:
    """Seconds of a step of which only the model's FLOP/s per device were published, recomputation not
    counted.
    """
    model, _, plan, _ = made
    if not row.get("tflops_per_gpu"):
        raise SpecError("no step time given")
    return model.flops(plan.gbs * plan.seq, plan.seq) / (float(row["tflops_per_gpu"]) * 1e12 * plan.ranks)


def _usual_micro_batch(row: Row, pp: int) -> int:
    """One sequence, where a long pipeline's row says nothing: more would lengthen the bubble. torchtitan
    makes a micro-batch for each stage.
    """
    local = re.search(r"local batch (\d+)", row.get("options") or "")
    if local and pp > 1 and "torchtitan" in row["framework"]:
        return max(1, int(local[1]) // pp)
    return 1 if pp >= LONG_PIPELINE and not row.get("step_time_s") else 0


#: the column `gpu` -> catalog name, where its own aliases do not do
_DEVICES = (
    ("H100-SXM 9", "h100-96gb-hbm2e"),
    ("A100", "a100-sxm-{gb}gb"),
    ("V100", "v100-sxm-{gb}gb"),
    ("B200-SXM", "b200"),
    ("B300-SXM", "b300"),
    ("GB200", "gb200"),
    ("GB300", "gb300"),
    ("H200-SXM", "h200"),
    ("H100-SXM", "h100-sxm"),
    ("MI300X", "mi300x"),
)


def _device(row: Row) -> str:
    name = next((known for word, known in _DEVICES if word in row["gpu"]), row["gpu"])
    memory = _number(row, "gpu_mem_gb")
    if memory not in (16, 32, 40, 80):
        memory = 80 if "a100" in name else 16
    return name.format(gb=memory)


def _number(row: Row, column: str, default: int = 0) -> int:
    text = row.get(column) or ""
    try:
        return int(float(text)) if text else default
    except ValueError:
        raise SpecError(f"{column} is {text!r}, not a number") from None


def _plain_name(row: Row) -> str:
    """The model's name without what is said of it in brackets."""
    return re.sub(r" *[(\[].*$", "", row["model"])


def _known(name: str) -> bool:
    return models.fold(name) in {models.fold(known) for known in transformers.names()}


def _experts(row: Row) -> Transformer:
    """Tables give no sizes of experts: the catalog's model of that name, with as many layers as the row
    says.
    """
    name = _plain_name(row)
    # "Grok-1-314B" is Grok-1
    model = transformers.get(name if _known(name) else re.sub(r"[- ]\d+B$", "", name))
    return replace(model, layers=_number(row, "n_layers", model.layers))


def _complete(row: Row) -> Row:
    """The row with sizes that it leaves out, where the catalog has its model; models called GPT have GPT-2's
    vocabulary.
    """
    name = _plain_name(row)
    if row.get("hidden") and row.get("vocab"):
        return row
    if _known(name):
        found = transformers.get(name)
        known = {
            "n_layers": found.layers,
            "hidden": found.hidden,
            "heads": found.heads,
            "kv_heads": found.kv_heads,
            "ffn_hidden": found.ffn,
            "vocab": found.vocab,
        }
        return {**row, **{column: str(value) for column, value in known.items() if not row.get(column)}}
    return {**row, "vocab": str(GPT_VOCABULARY)} if name.startswith("GPT") and row.get("hidden") else row


def _read(row: Row) -> Made:
    """Model, cluster, plan and framework of a row, or SpecError with what is missing."""
    if row.get("family", "transformer-lm") not in ("transformer-lm", "moe-lm"):
        raise SpecError(f"family {row['family']}: only decoders of language models are read from tables")
    model = _experts(row) if row["family"] == "moe-lm" else from_columns(_complete(row))
    count = _number(row, "n_gpus")
    framework = frameworks.distributed(row)
    whole_batch = framework is not None and framework.whole_batch
    device = devices.get(_device(row))
    tp, pp, cp = (_number(row, axis, 1) for axis in ("tp", "pp", "cp"))
    if count > 1 and (not row.get("tp") or not row.get("pp")):
        raise SpecError("no tensor- or pipeline-parallel degree given")
    dp = count // (tp * pp * cp)
    if _number(row, "dp", dp) != dp or dp * tp * pp * cp != count:
        raise PlanError(f"dp {row.get('dp')} x tp {tp} x pp {pp} x cp {cp} is not {count} devices")
    batch = _number(row, "global_batch")
    micro = _number(row, "micro_batch") or (
        batch // dp if pp == 1 and whole_batch else _usual_micro_batch(row, pp)
    )
    if not batch or not micro:
        raise SpecError("no global batch or micro-batch given")
    chunk = framework.chunk_layers if framework is not None else 0
    vpp = _number(row, "vpp") or (max(1, model.layers // (pp * chunk)) if chunk and pp > 1 else 1)
    plan = Plan(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=_number(row, "ep", 1),
        vpp=vpp if pp > 1 else 1,
        mbs=micro,
        gbs=batch,
        seq=_number(row, "seq_len"),
        sharding=frameworks.sharding(row),
        sp=frameworks.sequence_parallel(row),
        recompute=frameworks.recompute(row),
        precision=frameworks.precision(row),
        adapters=frameworks.adapters(row),
        reshard=frameworks.reshard(row),
    )
    cluster = _cluster(row, device, count)
    if whole_batch and not row.get("recompute"):
        plan = _least_recomputed(model, cluster, plan, framework)
    return model, cluster, plan, framework


def _cluster(row: Row, device: Device, count: int) -> Cluster:
    """The nodes of a row."""
    per_node = _number(row, "gpus_per_node", 8)
    usual = architectures.get(device.architecture).node_Bps or DEFAULT_GBPS * GBIT
    gbps = float(row.get("inter_node_gbps_per_node") or usual / GBIT)
    domain = 72 if device.name.startswith("gb") else per_node
    kind = "omnipath" if "Omni-Path" in (row.get("inter_node") or "") else "infiniband"
    return cluster_of(device.name, count, per_node, gbps, domain, kind)


def _least_recomputed(model: Transformer, cluster: Cluster, plan: Plan, framework: Framework | None) -> Plan:
    """The plan with as little computed again as its memory allows, for frameworks whose micro-batch cannot be
    smaller.
    """
    kinds = (replace(plan, recompute=kind) for kind in (Recompute.NONE, Recompute.SELECTIVE))
    return next(
        (p for p in kinds if api.predict(model, p, cluster, framework=framework).fit.fits),
        replace(plan, recompute=Recompute.FULL),
    )
