"""The measurement sets, by name: each turns a data folder into cases, or None where it is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from paceline.bench.validate import collectives, distributed, literature, operators, steps
from paceline.bench.validate.case import Case

Reader = Callable[[Path, bool], Iterable[Case] | None]

SETS: dict[str, Reader] = {
    "h200_ops": operators.h200_ops,
    "h200_steps": steps.h200_steps,
    "kernels": operators.fp32_kernels,
    "kernels_fp16": operators.fp16_kernels,
    "kernels_fp16_nccl": collectives.fp16_nccl,
    "collectives_busbw": collectives.busbw,
    "gloo_loopback": collectives.gloo,
    "neusight_fp32_training": steps.neusight,
    "timm_train_rtx3090": steps.timm,
    "tf_cnn_benchmarks_2017": steps.tf_cnn,
    "dle_training_throughput": steps.dle,
    "vtrain_a100_multi": distributed.vtrain_multi,
    "vtrain_a100_single": distributed.vtrain_single,
    "megatron_gpt": distributed.common("megatron_gpt.csv"),
    "bloom_prequel_a100_topologies": distributed.common("bloom_prequel_a100_topologies.csv"),
    "llmfoundry_mpt_throughput": distributed.common("llmfoundry_mpt_throughput.csv"),
    "torchtitan_llama": distributed.common("torchtitan_llama.csv"),
    "dgxc_benchmarking_llm": distributed.common("dgxc_benchmarking_llm.csv"),
    "nemo_megatron_bridge": distributed.common("nemo_megatron_bridge.csv"),
    "simumax_b200_measured": distributed.common("simumax_b200_measured.csv"),
    "mlperf_llm_runs": distributed.common("mlperf_llm_runs.csv"),
    "jax_toolbox": distributed.common("jax_toolbox.csv"),
    "misc_published_training": distributed.common("misc_published_training.csv"),
    "literature_scaling_results": literature.literature,
}
