"""Which features of plans were ever held against a measured step, and which were not.

The one list of it: a feature that stands in neither table below was never measured, and a plan that wins by
it says so. Degrees, micro-batches, buckets and gathers ahead are sizes, not features; the precision is the
user's choice, not the search's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.spec.plan import Plan

#: field -> value -> where steps of transformers with it are: sets of `paceline validate`
TRANSFORMERS: Mapping[str, Mapping[str, str]] = {
    "sharding": {
        "none": "vtrain_a100_single",
        "ddp": "vtrain_a100_multi",
        "zero1": "nemo_megatron_bridge",
        "zero2": "llmfoundry_mpt_throughput",
        "fsdp": "torchtitan_llama",
    },
    "schedule": {
        "": "vtrain_a100_single",
        "1f1b": "vtrain_a100_multi",
        "interleaved": "nemo_megatron_bridge",
    },
    "recompute": {
        "none": "nemo_megatron_bridge",
        "selective": "torchtitan_llama",
        "full": "bloom_prequel_a100_topologies",
    },
    "context": {"ring": "mlperf_llm_runs"},
    "offload": {"none": "vtrain_a100_multi"},
}
#: the same of captured modules: sets of `paceline validate`, or files of `bench/data`
MODULES: Mapping[str, Mapping[str, str]] = {
    "sharding": {"none": "h200_steps", "ddp": "tf_cnn_benchmarks_2017"},
    "schedule": {"": "tf_cnn_benchmarks_2017"},
    "recompute": {"none": "tf_cnn_benchmarks_2017", "full": "h200_steps"},
    "relax": {
        "allreduce": "literature_scaling_results",
        "overlap": "emulated_steps.jsonl",
        "priority": "emulated_steps.jsonl",
        "terngrad": "emulated_steps.jsonl",
        "dgc": "emulated_steps.jsonl",
        "fp16": "emulated_steps.jsonl",
        "ps-sync": "throughput/parameter_server.csv",
        "ps-async": "throughput/parameter_server.csv",
    },
}


def unmeasured(
    choice: Mapping[str, Any], evidence: Mapping[str, Mapping[str, str]] = TRANSFORMERS
) -> tuple[str, ...]:
    """Of some fields of a plan, the words that no measured step had."""
    values = {field: getattr(choice[field], "label", choice[field]) for field in evidence if field in choice}
    return tuple(
        f"offload={value}" if field == "offload" else str(value)
        for field, value in values.items()
        if value not in evidence[field]
    )


def of_plan(plan: Plan, evidence: Mapping[str, Mapping[str, str]] = TRANSFORMERS) -> tuple[str, ...]:
    """The words of a plan that no measured step had."""
    return unmeasured(vars(plan), evidence)
