"""Published training steps of captured models on several devices, against the bars they are held to (on the
rows that ship).
"""

from importlib.util import find_spec

import pytest

from paceline.bench import frameworks, models
from paceline.bench.validate import run
from paceline.errors import SpecError

needs_models = pytest.mark.skipif(
    not all(map(find_spec, ("torch", "torchvision", "timm"))),
    reason="the models are torchvision's and timm's",
)


@needs_models
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["tf_cnn_benchmarks_2017", "dle_training_throughput"])
def test_steps_on_several_devices(name):
    scores = {score.metric: score for score in run([name])}
    several, scaling = scores["step_multi_s"], scores["scaling"]
    assert (
        several.rows > 80
        and several.median_abs_pct <= 12
        and several.mean_abs_pct < 0.5 * several.naive_mean_abs_pct
    )
    assert 85 <= several.coverage_pct <= 97
    assert scaling.rows > 50 and scaling.median_abs_pct <= 5


def row(**columns):
    return {
        "gpu": "V100-SXM (DGX-1)",
        "gpu_mem_gb": "16",
        "n_gpus": "16",
        "micro_batch": "32",
        "global_batch": "1024",
        "grad_accum": "1",
        "framework": "PyTorch",
        "precision": "FP32",
        "options": "",
        **columns,
    }


def test_rows_describe_their_cluster():
    cluster = models.published_cluster(row())
    assert (cluster.nodes, cluster.node_devices, cluster.device.name) == (2, 8, "v100-sxm-16gb")
    part = models.published_cluster(row(n_gpus="4", gpu="A100-SXM (DGX A100)", gpu_mem_gb="80"))
    assert (part.device_count, part.device.name, part.tiers[0].kind) == (4, "a100-sxm-80gb", "nvswitch")
    with pytest.raises(SpecError, match="do not fill"):
        models.published_cluster(row(n_gpus="12"))
    with pytest.raises(SpecError, match="no node"):
        models.published_cluster(row(gpu="GTX 1080"))


def test_the_batch_says_how_much_is_accumulated():
    assert (
        models.accumulation(row()) == 2 and models.accumulation(row(global_batch="1000", grad_accum="3")) == 3
    )


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({}, "ddp"),
        ({"framework": "TensorFlow1 (Horovod)"}, "horovod-half"),
        ({"framework": "MXNet (NGC)"}, "kvstore"),
        ({"options": "variable_update=parameter_server; local_parameter_device=cpu"}, "parameter-server"),
        ({"options": "variable_update=parameter_server; local_parameter_device=gpu"}, "replicated"),
        ({"options": "variable_update=replicated (with NCCL); local_parameter_device=n/a"}, "replicated"),
        (
            {"options": "variable_update=distributed_replicated; local_parameter_device=n/a"},
            "parameter-server",
        ),
    ],
)
def test_frameworks_synchronise_in_their_own_way(columns, name):
    assert frameworks.of_module(row(**columns)).sync == name
