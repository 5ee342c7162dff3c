"""DeepSpeed's JSON."""

from __future__ import annotations

import json
from typing import Any

from paceline.plan.emit.facts import Facts

_STAGES = {"none": 0, "ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}


def config(f: Facts) -> dict[str, Any]:
    """Batch, precision and ZeRO; DeepSpeed takes pipelines and tensor parallel layers from the model's
    code.
    """
    f.refuse("deepspeed", pp=(1,), tp=(1,), cp=(1,), sharding=tuple(_STAGES))
    p = f.plan
    zero: dict[str, Any] = {"stage": _STAGES[p.sharding]}
    if zero["stage"]:
        zero |= {"overlap_comm": True, "reduce_bucket_size": int(p.bucket_bytes / 2)}
    if p.offload == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    precision = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True}}}.get(
        p.precision, {}
    )
    recompute = {
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": p.offload == "activations",
        }
    }
    return {
        "train_batch_size": p.gbs,
        "train_micro_batch_size_per_gpu": p.mbs,
        "gradient_accumulation_steps": f.accumulate,
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        **precision,
        **(recompute if p.recompute != "none" else {}),
    }


def to_do(f: Facts) -> list[str]:
    """What the JSON cannot say."""
    if not f.compiled:
        return []
    return ["call engine.compile() after deepspeed.initialize: the plan counts on what torch.compile fuses"]


def files(f: Facts) -> dict[str, str]:
    """The JSON takes no comments; what is predicted stands in plan.json beside it."""
    return {"deepspeed.json": json.dumps(config(f), indent=2) + "\n"}
