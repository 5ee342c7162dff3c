"""Arguments of Megatron-LM in a script that starts it.

Format: `megatron/training/arguments.py` of NVIDIA/Megatron-LM and its user guide,
https://docs.nvidia.com/megatron-core/. Values that the script computes while it runs are named, not guessed.
"""

from __future__ import annotations

from paceline.catalog import transformers
from paceline.errors import DataError
from paceline.readers import shell
from paceline.readers.configuration import Keys, Settings, ignored
from paceline.spec.vocabulary import NormKind

_SIZES = {
    "num-layers": "layers",
    "hidden-size": "hidden",
    "ffn-hidden-size": "ffn",
    "num-attention-heads": "heads",
    "num-query-groups": "kv_heads",
    "vocab-size": "vocab",
    "num-experts": "experts",
    "moe-router-topk": "top_k",
}
_DEGREES = {
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep",
    "micro-batch-size": "mbs",
    "global-batch-size": "gbs",
    "seq-length": "seq",
    "num-virtual-stages-per-pipeline-rank": "vpp",
}
_STRATEGIES = {"no_shard": "ddp", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "fsdp"}
_EXCHANGES = {"p2p": "ring", "a2a": "all-to-all", "allgather": "ring"}


def settings(text: str, path: str) -> Settings:
    """What a script that starts Megatron-LM says."""
    found = shell.options(shell.words(text, path))
    if not set(_DEGREES) & set(found):
        raise DataError(f"{path}: no arguments of Megatron-LM in it, such as --tensor-model-parallel-size 8")
    computed = {name: value for name, value in found.items() if "$" in value}
    keys = Keys(
        {name: value for name, value in found.items() if name not in computed}, path, ignored("megatron")
    )
    out = Settings("megatron", usual={"framework": "megatron-core", "sharding": "ddp"})
    for name, field in _DEGREES.items():
        if size := keys.whole(name):
            out.said[field] = size
    out.sizes = {field: size for name, field in _SIZES.items() if (size := keys.whole(name))}
    _chunks(keys, out)
    _sharding(keys, out)
    _precision(keys, out, "fp8-format" in found)
    _memory(keys, out)
    _devices(keys, out)
    out.optimizer = keys.word("optimizer") or ""
    out.model = _model(
        out, gated=keys.flag("swiglu") is not None, rms=keys.word("normalization") == "RMSNorm"
    )
    keys.flag("disable-bias-linear")
    keys.word("position-embedding-type")
    out.not_understood += keys.left()
    wanted = (
        f"{name} = {value}" for name, value in computed.items() if not name.startswith(ignored("megatron"))
    )
    out.not_understood += [f"{line} (computed by the script)" for line in wanted]
    return out


def _chunks(keys: Keys, out: Settings) -> None:
    """Layers per virtual stage say the same as virtual stages; several are interleaved, as Megatron"
    " runs them."""
    layers = keys.whole("num-layers-per-virtual-pipeline-stage")
    whole, pp = out.sizes.get("layers", 0), out.said.get("pp", 1)
    if layers and whole and whole % (pp * layers) == 0:
        out.said["vpp"] = whole // (pp * layers)
    if pp > 1:
        out.usual["schedule"] = "interleaved" if out.said.get("vpp", 1) > 1 else "1f1b"


def _sharding(keys: Keys, out: Settings) -> None:
    strategy = keys.choice(_STRATEGIES, "data-parallel-sharding-strategy")
    own = keys.flag("use-megatron-fsdp", "use-custom-fsdp")
    distributed = keys.flag("use-distributed-optimizer")
    if own and strategy is not None:
        out.said["sharding"] = strategy
    elif keys.flag("use-torch-fsdp2"):
        out.said["sharding"] = "fsdp"
    elif distributed:
        out.said["sharding"] = "zero1"
    if keys.flag("sequence-parallel"):
        out.said["sp"] = True
    exchange = keys.choice(_EXCHANGES, "cp-comm-type")
    if exchange is not None:
        out.said["context"] = exchange


def _precision(keys: Keys, out: Settings, fp8: bool) -> None:
    half = keys.flag("fp16")
    brain = keys.flag("bf16")
    if fp8:
        out.said["precision"] = "fp8"
    elif half or brain:
        out.said["precision"] = "fp16" if half else "bf16"
    else:
        out.usual["precision"] = "fp32"


def _memory(keys: Keys, out: Settings) -> None:
    granularity = keys.choice({"full": "full", "selective": "selective"}, "recompute-granularity")
    if granularity is None and keys.flag("recompute-activations"):
        granularity = "selective"
    if granularity is not None:
        out.said["recompute"] = granularity
    if keys.flag("optimizer-cpu-offload"):
        out.said["offload"] = "optimizer"
    elif keys.flag("cpu-offloading"):
        out.said["offload"] = "activations"


def _devices(keys: Keys, out: Settings) -> None:
    """Devices of torchrun's arguments, and the data-parallel degree that they leave."""
    each = keys.whole("nproc-per-node", "nproc_per_node")
    nodes = keys.whole("nnodes") or 1
    if each:
        out.devices = nodes * each
        used = out.said.get("tp", 1) * out.said.get("pp", 1) * out.said.get("cp", 1)
        if out.devices % used == 0:
            out.said["dp"] = out.devices // used


def _model(out: Settings, gated: bool, rms: bool) -> str:
    """The model of the catalog that alone has these sizes; empty where none or several have."""
    wanted = {name: size for name, size in out.sizes.items() if name != "vocab"}
    if not {"layers", "hidden", "heads"} <= set(wanted):
        return ""
    wanted.setdefault("ffn", 4 * wanted["hidden"])
    wanted.setdefault("experts", 0)
    found = []
    for name in transformers.names():
        model = transformers.get(name)
        sizes = {size: getattr(model, size) for size in wanted}
        if sizes["experts"] == 0 and "kv_heads" in wanted:
            sizes["kv_heads"] = model.kv_heads or model.heads
        if sizes == wanted and model.gated == gated and (model.norm == NormKind.RMS) == rms:
            found.append(name)
    return found[0] if len(found) == 1 else ""
