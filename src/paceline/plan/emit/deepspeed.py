"""DeepSpeed's JSON."""

from __future__ import annotations

import json
from typing import Any

from paceline.plan.emit.facts import Facts
from paceline.spec.vocabulary import Offload, Precision, Recompute

#: sharding -> stage of ZeRO
_STAGES = {"none": 0, "ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}


def config(f: Facts) -> dict[str, Any]:
    """Batch, precision and ZeRO; DeepSpeed takes pipelines and tensor parallel layers from the model's
    code.
    """
    f.refuse("deepspeed", pp=(1,), tp=(1,), cp=(1,), sharding=tuple(_STAGES))
    p = f.plan
    zero: dict[str, Any] = {"stage": _STAGES[p.sharding]}
    if not p.sharding.whole:
        zero |= {"overlap_comm": True, "reduce_bucket_size": int(p.bucket_bytes / 2)}
    if p.offload is Offload.OPTIMIZER:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    out = {
        "train_batch_size": p.gbs,
        "train_micro_batch_size_per_gpu": p.mbs,
        "gradient_accumulation_steps": p.micro_batches,
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
    }
    if p.precision in (Precision.BF16, Precision.FP16):
        out[p.precision.value] = {"enabled": True}
    if p.recompute is not Recompute.NONE:
        to_host = p.offload is Offload.ACTIVATIONS
        out["activation_checkpointing"] = {"partition_activations": False, "cpu_checkpointing": to_host}
    return out


def to_do(f: Facts) -> list[str]:
    """What the JSON cannot say."""
    if not f.compiled:
        return []
    return ["call engine.compile() after deepspeed.initialize: the plan counts on what torch.compile fuses"]


def files(f: Facts) -> dict[str, str]:
    """The JSON takes no comments; what is predicted stands in plan.json beside it."""
    return {"deepspeed.json": json.dumps(config(f), indent=2) + "\n"}
