"""The space holds plans that can run, all of them that the limits leave."""

import pytest

from paceline.errors import PlanError
from paceline.plan.space import Limits, Space
from paceline.spec.plan import problems


def test_every_plan_of_a_space_can_run(tiny, mixed, node):
    for model in (tiny, mixed):
        space = Space(model, (node,), 16, model.seq, Limits.of())
        assert len(space) == sum(len(block) for block in space.blocks) > 1000
        for block in space.blocks[:: max(1, len(space.blocks) // 40)]:
            for index in {0, len(block) // 2, len(block) - 1}:
                plan = block.plan(index)
                assert list(problems(plan, node.device_count, model)) == []


def test_plans_are_all_different(tiny, node):
    space = Space(tiny, (node,), 8, 1024, Limits.of())
    plans = [block.plan(i) for block in space.blocks for i in range(len(block))]
    assert len(set(plans)) == len(plans)


def test_limits_narrow_the_space(tiny, node):
    def plans(**words):
        space = Space(tiny, (node,), 8, 1024, Limits.of(**words))
        return [block.plan(i) for block in space.blocks for i in range(len(block))]

    assert {p.tp for p in plans(fix=["tp=2"])} == {2}
    assert {p.sharding for p in plans(fix=["fsdp"])} == {"fsdp"}
    assert {p.pp for p in plans(forbid=["pp"])} == {1}
    assert {p.offload for p in plans(forbid=["offload"])} == {"none"}
    assert "full" not in {p.recompute for p in plans(forbid=["recompute=full"])}
    assert {p.precision for p in plans()} == {"bf16"} and {p.precision for p in plans(allow=["fp8"])} == {
        "bf16",
        "fp8",
    }
    assert {p.framework for p in plans(fix=["framework=torch"])} == {"torch"}


def test_schedules_are_those_that_a_framework_has(tiny, node):
    space = Space(tiny, (node,), 16, 1024, Limits.of())
    by_family = {}
    for block in space.blocks:
        by_family.setdefault(block.kernels.framework, set()).update(order.schedule for order in block.orders)
    assert by_family["megatron-core"] == {"", "1f1b", "interleaved"}  # none without a pipeline
    assert "zb-v" in by_family["torch-compile"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"fix": ["tp=3x"]}, "tp must be a whole number"),
        ({"forbid": ["nonsense"]}, "unknown 'nonsense'"),
        ({"allow": ["fp9"]}, "did you mean 'fp8'"),
        ({"fix": ["tp=2"], "forbid": ["tp=2"]}, "both fixed and forbidden"),
        ({"fix": ["pp=2"], "forbid": ["pp"]}, "both fixed and forbidden"),
    ],
)
def test_bad_limits(words, message):
    with pytest.raises(PlanError, match=message):
        Limits.of(**words)


def test_an_empty_space_says_why(tiny, node):
    space = Space(tiny, (node,), 8, 1024, Limits.of(fix=["tp=3"]))
    assert len(space) == 0 and "tp 3" in space.why_empty()
