"""The optimizer's step: kernels, traffic and state of each implementation."""

import pytest

from paceline.capture import optimizer
from paceline.errors import UnknownName

#: 100 small tensors and a large one of 80 chunks
SHAPES = [((1000,), "fp32")] * 100 + [((80, 65536), "fp32")]
ELEMENTS = 100 * 1000 + 80 * 65536


@pytest.mark.parametrize(
    ("name", "steps", "how"),
    [
        ("adamw", 1, "fused"),
        ("adamw-fused", 1, "fused"),
        ("adamw-foreach", 8, "foreach"),
        ("adamw-single", 8, "single"),
        ("adam-foreach", 7, "foreach"),
        ("sgd", 3, "foreach"),
        ("sgd-fused", 1, "fused"),
        ("sgd-single", 3, "single"),
        ("sgd-plain", 1, "foreach"),
        ("sgd-plain-single", 1, "single"),
    ],
)
def test_steps_and_kernels(name, steps, how):
    segment, _ = optimizer.segment(name, SHAPES)
    assert len(segment.ops) == steps and {op.tags for op in segment.ops} == {(how,)}
    for op in segment.ops:
        tensors, elements, kernels = op.dims
        assert (tensors, elements, op.kind, op.phase, op.flops) == (
            101,
            ELEMENTS,
            "optimizer",
            "optimizer",
            0,
        )
        assert kernels == 101 if how == "single" else 1 <= kernels <= 5
        assert op.bytes_read % (4 * ELEMENTS) == 0 and op.bytes_written % (4 * ELEMENTS) == 0


@pytest.mark.parametrize(("name", "states"), [("sgd-plain", 0), ("sgd", 1), ("adam", 2), ("adamw", 2)])
@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_state(name, states, dtype, size):
    _, state = optimizer.segment(name, [((1024, 1024), dtype)])
    assert state == states * size * 2**20


def test_traffic_falls_from_single_steps_to_fused():
    steps = [optimizer.segment(f"adamw-{how}", SHAPES)[0].ops for how in optimizer.IMPLEMENTATIONS]
    fused, foreach, single = (sum(op.bytes_read + op.bytes_written for op in ops) for ops in steps)
    assert fused == 7 * 4 * ELEMENTS < foreach == single


def test_only_foreach_needs_temporaries():
    assert [optimizer.segment(f"adamw-{how}", SHAPES)[0].peak for how in optimizer.IMPLEMENTATIONS] == [
        {},
        {"temporary": 4 * ELEMENTS},
        {},
    ]


def test_each_dtype_has_its_own_kernels():
    segment, _ = optimizer.segment("adamw", [((10,), "fp32"), ((10,), "bf16"), ((20,), "fp32")])
    assert [(op.dtype, op.dims[:2]) for op in segment.ops] == [("fp32", (2, 30)), ("bf16", (1, 10))]


@pytest.mark.parametrize(
    ("count", "elements", "lists", "launches"),
    [
        (1, 1, 4, 1),
        (36, 10, 4, 1),
        (37, 10, 4, 2),
        (110, 10, 1, 1),
        (111, 10, 1, 2),
        (1, 320 * 65536, 4, 1),
        (1, 320 * 65536 + 1, 4, 2),
        (2, 160 * 65536, 4, 1),
        (0, 0, 4, 0),
    ],
)
def test_launches_of_a_multi_tensor_kernel(count, elements, lists, launches):
    assert optimizer.launches([(elements,)] * count, lists) == launches


@pytest.mark.parametrize("name", ["adan", "adamw-", "adamw-slow", "fused", ""])
def test_unknown_optimizer(name):
    with pytest.raises(UnknownName, match="unknown optimizer.*allowed: sgd-plain, sgd, adam, adamw"):
        optimizer.check(name)


def test_every_name_is_known():
    assert all(optimizer.check(name) for name in optimizer.names())
