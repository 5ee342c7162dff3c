"""`optimizer.state_dict()` where state lies in pieces, or is shared out: all of it, on any rank that asks."""

import os
from pathlib import Path

import pytest

from paceline.train.launch import run

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
PLANS = [
    ("overlap", {"fc": "gradient"}),
    ("overlap", {"fc": "rows"}),
    ("overlap", {"fc": "factors"}),
    ("priority", {}),
    ("lazy", {"interval": 1, "adapt": False}),
]
#: plans under which ranks hold parts of the model; of the last one, the same part
SPLIT = ["fsdp fp32", "zero2 fp32", "hsdp shard=1 fp32"]
REFUSED = {
    "ended": "RunError: rank 0 of 2: the optimizer's state is shared out over the ranks, and rank 1 has",
    "between": "RunError: rank 0 of 2 asked for the optimizer's state between backward() and step()",
}


def called(calls, world):
    """Results of each call, by rank; one start of Python for all of them."""
    ranks = run("workers_02:several", world=world, arguments={"calls": calls}, environment=HERE, timeout_s=99)
    return list(zip(*ranks, strict=True))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two ranks found, by what was done under which plan."""
    folder = str(tmp_path_factory.mktemp("saved"))
    calls = {
        ("states", plan, *options.values()): ("states", {"plan": plan, "options": options})
        for plan, options in PLANS
    }
    for plan, options in PLANS:
        for waits in (True, False):
            calls["resumed", waits, plan, *options.values()] = (
                "resumed",
                {"folder": folder, "plan": plan, "options": options, "waits": waits},
            )
    for plan in SPLIT:
        calls["split", plan] = ("split", {"folder": folder, "plan": plan})
    calls["taken back",] = ("taken_back", {})
    for how in REFUSED:
        calls["refused", how] = ("refused", {"how": how})
    return dict(zip(calls, called(list(calls.values()), 2), strict=True))


def check_states(ranks):
    for rank in ranks:
        assert rank["entries"] == [4, 4] and rank["steps"] and rank["alone"], rank
        assert rank["together"] < 1e-6 and rank["trained on"] < 1e-5, rank


@pytest.mark.parametrize(("plan", "options"), PLANS)
def test_it_is_the_state_of_one_process(found, plan, options):
    check_states(found["states", plan, *options.values()])


def test_of_three_ranks_too():
    for ranks in called([("states", {"plan": plan, "options": options}) for plan, options in PLANS[:2]], 3):
        check_states(ranks)


@pytest.mark.parametrize(("plan", "options"), PLANS)
@pytest.mark.parametrize("waits", [True, False])
def test_a_plain_save_on_one_rank_keeps_the_moments(found, plan, options, waits):
    assert all(apart < 2e-6 for apart in found["resumed", waits, plan, *options.values()])


def test_a_state_is_taken_back_in_the_middle_of_a_run(found):
    assert found["taken back",] == (0, 0)


@pytest.mark.parametrize("plan", SPLIT)
def test_a_split_model_goes_on_from_a_whole_checkpoint_and_not_from_a_part(found, plan):
    for rank in found["split", plan]:
        said = rank.pop("said")
        assert rank == {"at": 3, "apart": 0, "whole": 20 * 64 + 64 + 64 * 10 + 10}, (plan, rank)
        if "shard=1" in plan:
            assert not said
        else:
            assert said.startswith("RunError: this state holds the same part of the model for every rank")
            assert "paceline.train.Checkpoints" in said and "\n" not in said


@pytest.mark.parametrize("how", REFUSED)
def test_who_cannot_be_answered_is_told_at_once(found, how):
    first, _ = found["refused", how]
    assert first.startswith(REFUSED[how]) and "optimizer.state_dict()" in first and "\n" not in first
