"""DeepSpeed's JSON."""

from __future__ import annotations

import json
import tomllib
from typing import Any

from paceline.plan.emit.facts import Facts, filled
from paceline.spec.vocabulary import Offload

#: sharding -> stage of ZeRO
_STAGES = {"none": 0, "ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}


#: the configuration as TOML
_CONFIG = """\
train_batch_size = {p.gbs}
train_micro_batch_size_per_gpu = {p.mbs}
gradient_accumulation_steps = {p.micro_batches}
zero_optimization.stage = {stage}
zero_optimization.overlap_comm = true                                       #if p.sharding.whole = False
zero_optimization.reduce_bucket_size = {elements}                           #if p.sharding.whole = False
zero_optimization.offload_optimizer.device = "cpu"                          #if p.offload = optimizer
zero_optimization.offload_optimizer.pin_memory = true                       #if p.offload = optimizer
gradient_clipping = 1.0
bf16.enabled = true                                                         #if p.precision = bf16
fp16.enabled = true                                                         #if p.precision = fp16
activation_checkpointing.partition_activations = false                      #if p.recompute != none
activation_checkpointing.cpu_checkpointing = {to_host}                      #if p.recompute != none
"""


def config(f: Facts) -> dict[str, Any]:
    """Batch, precision and ZeRO; DeepSpeed takes pipelines and tensor parallel layers from the model's
    code.
    """
    f.refuse("deepspeed", pp=(1,), tp=(1,), cp=(1,), sharding=tuple(_STAGES))
    p = f.plan
    to_host = "true" if p.offload is Offload.ACTIVATIONS else "false"
    elements = int(p.bucket_bytes / 2)
    lines = filled(_CONFIG, p=p, stage=_STAGES[p.sharding], elements=elements, to_host=to_host)
    return tomllib.loads("\n".join(lines))


def to_do(f: Facts) -> list[str]:
    """What the JSON cannot say."""
    if not f.compiled:
        return []
    return ["call engine.compile() after deepspeed.initialize: the plan counts on what torch.compile fuses"]


def files(f: Facts) -> dict[str, str]:
    """The JSON takes no comments; what is predicted stands in plan.json beside it."""
    return {"deepspeed.json": json.dumps(config(f), indent=2) + "\n"}
