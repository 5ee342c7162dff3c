"""Peak memory along the segments of a step, and what to do when it does not fit."""

import pytest

from paceline.catalog import devices
from paceline.cost.memory import fit, memory
from paceline.spec.workload import Parameter, Segment, Workload

GB = 10**9


def workload(scale=1, **changes):
    """Two blocks that keep 3 and 5 GB until their backward passes, in which 1 GB comes and goes."""
    segments = (
        Segment(
            "a",
            "forward",
            (),
            {"activations": 3 * GB * scale},
            {"activations": 3 * GB * scale, "temporary": GB},
        ),
        Segment("b", "forward", (), {"activations": 5 * GB * scale}, {"activations": 5 * GB * scale}),
        Segment(
            "b",
            "backward",
            (),
            {"activations": -5 * GB * scale, "gradients": GB},
            {"temporary": GB, "gradients": GB},
        ),
        Segment("a", "backward", (), {"activations": -3 * GB * scale, "gradients": GB}, {"temporary": GB}),
        Segment("optimizer", "optimizer", (), {}, {}),
    )
    fields = {
        "name": "two",
        "batch": 16,
        "seq": None,
        "unit": "samples",
        "units_per_step": 16,
        "precision": "fp32",
        "optimizer": "sgd",
        "segments": segments,
        "order": (0, 1, 2, 3, 4),
        "parameters": (Parameter("w", (GB // 2,), "fp32", 0),),
        "resident": {"parameters": 2 * GB, "optimizer": 2 * GB},
    }
    return Workload(**{**fields, **changes})


def test_the_peak_is_where_most_is_live():
    found = memory(workload(), devices.get("h200"))
    live = {
        "parameters": 2 * GB,
        "gradients": GB,
        "optimizer": 2 * GB,
        "activations": 8 * GB,
        "temporary": GB,
    }
    assert found.by_kind == {**live, "workspace": found.by_kind["workspace"]}
    assert found.peak_bytes == sum(found.by_kind.values()) and found.peak_at == "b, backward"
    assert found.peak_bytes < found.reserved_bytes <= found.available_bytes < devices.get("h200").memory_bytes


def test_repetitions_add_up():
    once, thrice = (
        memory(workload(order=(0, *[1] * n, *[2] * n, 3, 4)), devices.get("h200")).by_kind["activations"]
        for n in (1, 3)
    )
    assert thrice - once == 2 * 5 * GB


def test_a_cpu_has_no_workspace_and_no_context():
    device = devices.get("haswell-cori")
    found = memory(workload(), device)
    assert (
        found.by_kind["workspace"] == 0
        and found.available_bytes == device.memory_bytes
        and found.reserved_bytes == found.peak_bytes
    )


def test_what_fits_has_no_remedies():
    one = workload()
    found = memory(one, devices.get("h200"))
    assert fit(one, found).fits and fit(one, found).remedies == ()


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ["batch", "--checkpointing", "--precision", "sharding"]),
        ({"batch": 1}, ["--checkpointing", "--precision", "sharding"]),
        ({"options": {"checkpointing": True}}, ["batch", "--precision", "sharding"]),
        ({"precision": "bf16"}, ["batch", "--checkpointing", "sharding"]),
    ],
)
def test_remedies(changes, names):
    one = workload(scale=4, **changes)
    answer = fit(one, memory(one, devices.get("t4")))
    assert not answer.fits and answer.needed_bytes > answer.available_bytes
    assert [name.split()[0] for name, _ in answer.remedies] == names
    assert all(0 < size < answer.needed_bytes for _, size in answer.remedies)


def test_a_smaller_batch_is_offered_only_where_one_sample_fits():
    one = workload(resident={"parameters": 100 * GB})
    assert not [
        name for name, _ in fit(one, memory(one, devices.get("t4"))).remedies if name.startswith("batch")
    ]
