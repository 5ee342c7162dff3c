"""torchtitan's configurations: TOML, Python as far as it is literal, and overrides on the command line.

Format: `torchtitan/config/job_config.py` and `docs/` of pytorch/torchtitan, https://github.com/pytorch/torchtitan.
All three ways set the same sections (`training`, `parallelism`, ...). In Python a configuration is a
function that
returns a call with one keyword per section; what is computed there is named, not guessed.
"""

from __future__ import annotations

import ast
import tomllib
from typing import Any

from paceline.catalog import models, transformers
from paceline.errors import DataError
from paceline.readers import shell
from paceline.readers.configuration import Keys, Settings, ignored
from paceline.readers.stream import printable
from paceline.spec.schedules import SCHEDULES

_SCHEDULES = {schedule.torch.lower(): name for name, schedule in SCHEDULES.items() if schedule.torch}
_MODES = {"none": "none", "selective": "selective", "full": "full"}
_KINDS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def from_toml(text: str, path: str) -> Settings:
    """A `.toml` of torchtitan."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{path}: not TOML: {printable(error)}") from None
    if not {"training", "parallelism"} & set(data):
        raise DataError(
            f"{path}: no configuration of torchtitan: it has neither [training] nor [parallelism]"
        )
    return _settings(data, path)


def from_script(text: str, path: str) -> Settings:
    """Arguments of `torchtitan.train` in a script; `--a.no-b` says that `a.b` is false."""
    found = shell.options(shell.words(text, path))
    data: dict[str, Any] = {}
    for name, value in found.items():
        section, dot, leaf = name.partition(".")
        off = leaf.startswith(("no-", "no_"))
        data[f"{section}{dot}{leaf[3:] if off else leaf}".replace("-", "_")] = False if off else value
    out = _settings(data, path)
    for line in text.splitlines():
        # torchtitan takes it from its configuration; the emitted script says what the plan wants
        word = line.removeprefix("# activation checkpointing of the configuration: ")
        if word != line and word in _MODES:
            out.said["recompute"] = word
    each, nodes = data.get("nproc_per_node"), data.get("nnodes") or "1"
    if each and str(each).isdigit() and str(nodes).isdigit():
        out.devices = int(each) * int(nodes)
    return out


def from_python(text: str, path: str) -> Settings:
    """A configuration in Python: the only function that returns a call with sections, or the last of them."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise DataError(f"{path}: not Python: {printable(error)}") from None
    found = [data for node in tree.body if (data := _returned(node))]
    if not found:
        raise DataError(f"{path}: no function that returns a configuration of torchtitan")
    out = _settings(found[-1], path)
    if len(found) > 1:
        out.notes.append(f"{len(found)} configurations in the file: the last one was read")
    return out


def _returned(node: ast.stmt) -> dict[str, Any]:
    """Sections of the call that a function returns; empty where it returns none."""
    if not isinstance(node, ast.FunctionDef):
        return {}
    calls = [n.value for n in node.body if isinstance(n, ast.Return) and isinstance(n.value, ast.Call)]
    sections = _keywords(calls[-1]) if calls else {}
    return sections if {"training", "parallelism"} & set(sections) else {}


def _keywords(call: ast.Call) -> dict[str, Any]:
    """Keywords of a call: values where they are literal, keywords of calls within, else the code as it is."""
    out: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            out[f"**{ast.unparse(keyword.value)}"] = "not literal"
        elif isinstance(keyword.value, ast.Call):
            inner = _keywords(keyword.value)
            positional = [ast.unparse(argument) for argument in keyword.value.args]
            out[keyword.arg] = {**inner, **({"arguments": ", ".join(positional)} if positional else {})}
        else:
            out[keyword.arg] = _literal(keyword.value)
    return out


def _literal(node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return f"{ast.unparse(node)} (not literal)"
    return value if isinstance(value, bool | int | float | str | None) else ast.unparse(node)


def _settings(data: dict[str, Any], path: str) -> Settings:
    """What the sections say."""
    keys = Keys(data, path, ignored("torchtitan"))
    out = Settings("torchtitan", model=_model(keys))
    out.compiled = bool(keys.flag("compile.enable", "training.compile"))
    out.usual["framework"] = "torch-compile" if out.compiled else "torch"
    _degrees(keys, out)
    _batch(keys, out)
    _precision(keys, out)
    mode = keys.choice(_MODES, "activation_checkpoint.mode")
    if mode is not None:
        out.said["recompute"] = mode
    keys.word("activation_checkpoint.selective_ac_option")
    if keys.flag("training.enable_cpu_offload"):
        out.said["offload"] = "optimizer"
    optimizer = keys.word("optimizer.name")
    out.optimizer = optimizer or ""
    out.not_understood += keys.left()
    return out


def _degrees(keys: Keys, out: Settings) -> None:
    section = "parallelism"
    replicas = keys.whole(
        f"{section}.data_parallel_replicate_degree", "training.data_parallel_replicate_degree"
    )
    shard = keys.whole(f"{section}.data_parallel_shard_degree", "training.data_parallel_shard_degree")
    _data_parallel(replicas or 1, -1 if shard is None else shard, out)
    degrees = (
        ("tp", "tensor_parallel_degree"),
        ("pp", "pipeline_parallel_degree"),
        ("cp", "context_parallel_degree"),
        ("ep", "expert_parallel_degree"),
    )
    for field, name in degrees:
        if size := keys.whole(f"{section}.{name}", f"experimental.{name}", f"training.{name}"):
            out.said[field] = size
    reshard = keys.choice(
        {"always": True, "never": False, "default": None}, f"{section}.fsdp_reshard_after_forward"
    )
    if reshard is not None:
        out.said["reshard"] = reshard
    tokens = keys.flag(f"{section}.enable_sequence_parallel")
    if tokens is not None:
        out.said["sp"] = tokens
    elif out.said.get("tp", 1) > 1:
        out.usual["sp"] = True
    schedule = keys.choice(
        _SCHEDULES, f"{section}.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule"
    )
    if schedule is not None and out.said.get("pp", 1) > 1:
        out.said["schedule"] = schedule


def _data_parallel(replicas: int, shard: int, out: Settings) -> None:
    """`shard` is -1 where it takes all devices that are left."""
    if shard == 1:
        out.said["dp"] = replicas
        out.usual["sharding"] = "ddp" if replicas > 1 else "none"
        return
    if shard > 1:
        out.said["dp"] = replicas * shard
    if replicas > 1:
        out.said["sharding"] = "hsdp"
        if shard > 1:
            out.said["shard"] = shard
    else:
        out.said["sharding"] = "fsdp"


def _batch(keys: Keys, out: Settings) -> None:
    """Samples of a rank and of the step. Under a pipeline a rank's batch is cut into micro-batches."""
    local = keys.whole("training.local_batch_size", "training.batch_size")
    whole = keys.whole("training.global_batch_size")
    part = keys.whole("parallelism.pipeline_parallel_microbatch_size")
    seq = keys.whole("training.seq_len")
    pipelined = out.said.get("pp", 1) > 1
    mbs = part if pipelined and part else local
    if mbs and (part or not pipelined):
        out.said["mbs"] = mbs
    if whole and whole > 0:
        out.said["gbs"] = whole
    elif local and "dp" in out.said:
        out.said["gbs"] = local * out.said["dp"]
    if seq:
        out.said["seq"] = seq


def _precision(keys: Keys, out: Settings) -> None:
    kind = keys.choice(_KINDS, "training.mixed_precision_param")
    keys.choice(_KINDS, "training.mixed_precision_reduce")
    out.usual["precision"] = kind or "bf16"
    converters = str(keys.word("model.converters") or "").lower()
    float8 = keys.flag("float8.enable_float8_linear", "quantize.linear.float8.enable")
    if float8 or "float8" in converters:
        out.said["precision"] = "fp8"
    elif converters.strip("[]"):
        out.not_understood.append(f"model.converters = {converters}")


def _model(keys: Keys) -> str:
    """The model of the catalog that a name and a flavor, or the name of a configuration, stand for."""
    name, flavor = keys.word("model.name", "module"), keys.word("model.flavor")
    config = keys.word("config")
    wanted = config or (f"{name}-{flavor}" if name and flavor else "")
    if not wanted:
        return ""
    known = {models.fold(one): one for one in transformers.names()}
    found = known.get(models.fold(wanted), "")
    if not found:
        keys.put("model", wanted)
    return found
