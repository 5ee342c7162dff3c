"""Sweeps, scaling curves, comparisons and break-even points; and how long they take."""

import math
import time
from itertools import pairwise

import pytest

pytest.importorskip("torch", reason="capture needs torch")

from paceline.errors import PlanError, SpecError
from paceline.whatif.compare import compare, find_break_even
from paceline.whatif.edits import apply
from paceline.whatif.subject import Subject
from paceline.whatif.sweep import sweep, values

TEN = ["ddp", "overlap", "terngrad", "dgc", "powersgd", "local-sgd", "diloco", "ps-sync", "ps-async", "easgd"]


@pytest.fixture(scope="module")
def large():
    return Subject.of("gpt3-175b", "128xdgx-a100", "tp=8 pp=8 mbs=1 gbs=1536")


@pytest.fixture(scope="module")
def vgg():
    return Subject.of("vgg11", "4xp100-node-10gbe", "ddp", batch=8, image=64)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1..8", ["1", "2", "4", "8"]),
        ("1..6", ["1", "2", "4", "6"]),
        ("1..9:3", ["1", "5", "9"]),
        ("3", ["3"]),
        ("a, b", ["a", "b"]),
        ("100Gb/s..400Gb/s", ["100Gb/s", "200Gb/s", "400Gb/s"]),
        ("1..2Gb/s:3", ["1Gb/s", "1.5Gb/s", "2Gb/s"]),
        ("1..3:9", ["1", "2", "3"]),
    ],
)
def test_values(text, found):
    assert values(text) == found


@pytest.mark.parametrize(
    "text", ["nodes", "nodes=", "nodes=9..1", "nodes=a..b", "nodes=0..4", "nodes=1..4:x"]
)
def test_sweeps_that_cannot_be_read(vgg, text):
    with pytest.raises(SpecError, match="a sweep"):
        sweep(vgg, text)


def test_two_hundred_points_of_a_large_plan_take_seconds(large):
    began = time.process_time()
    found = sweep(large, "network.inter.bandwidth=50Gb/s..1600Gb/s:200")
    assert time.process_time() - began < 10
    steps = [p.step_s for _, p in found.found]
    assert len(steps) == 200 and all(a >= b for a, b in pairwise(steps))


def test_ten_plans_on_sixty_four_devices_take_less_than_a_second():
    subject = Subject.of("vgg16", "16xp100-node-10gbe", batch=32)
    began = time.process_time()
    found = compare(subject, TEN)
    assert time.process_time() - began < 1
    assert [row.plan for row in found.rows] == TEN and all(row.prediction.devices == 64 for row in found.rows)


def test_a_sweep_is_predictions_of_edits(large):
    point = sweep(large, "tp=4,8").points[0]
    assert point.prediction.step_s == apply(large, ["tp=4"]).predict().step_s


def test_points_that_cannot_run_say_why(large):
    found = sweep(large, "tp=8,7")
    assert (
        found.points[0].prediction is not None
        and "7" in found.points[1].why_not
        and found.points[1].prediction is None
    )
    with pytest.raises(PlanError, match="no value of tp can run"):
        sweep(large, "tp=7,11")


# -- scaling ---------------------------------------------------------------------------------------


def test_weak_scaling_keeps_the_batch_of_a_replica(large):
    found = sweep(large, "nodes=16..128")
    assert [p.batch for _, p in found.found] == [192, 384, 768, 1536] and found.scaling.kind == "weak"


def test_strong_scaling_keeps_the_whole_batch(vgg):
    found = sweep(vgg, "nodes=1..8", strong=True)
    assert {p.batch for _, p in found.found} == {128} and found.scaling.kind == "strong"


def test_lines_beside_a_curve(vgg):
    curve = sweep(vgg, "nodes=1..64").scaling
    assert curve.ideal[0] == curve.throughput[0] and curve.efficiency[0] == 1
    assert all(
        i == pytest.approx(curve.throughput[0] / curve.devices[0] * n)
        for i, n in zip(curve.ideal, curve.devices, strict=True)
    )
    assert all(low < t < high for low, t, high in zip(curve.low, curve.throughput, curve.high, strict=True))
    assert curve.naive[-1] < curve.ideal[-1] and curve.pays_to == 4  # 10 Gb/s between nodes


def test_where_another_node_always_pays():
    curve = sweep(Subject.of("resnet18", "dgx-h100", batch=256, precision="amp_bf16"), "nodes=1..8").scaling
    assert curve.pays_to is None and curve.efficiency[-1] > 0.8


# -- compare ---------------------------------------------------------------------------------------


def test_the_best_is_the_fastest_that_fits(vgg):
    found = compare(vgg, TEN)
    assert found.best.prediction.throughput == max(row.prediction.throughput for row in found.rows)
    huge = compare(Subject.of("llama3-70b", "2xdgx-h100", "mbs=1"), ["ddp", "fsdp tp=8 recompute=full"])
    assert not huge.rows[0].prediction.fit.fits and huge.best is not huge.rows[0]


def test_words_that_all_plans_share():
    found = compare(Subject.of("gpt3-1.3b", "4xdgx-a100", "tp=2 gbs=64"), ["ddp", "fsdp", "tp=4", "dgc"])
    assert ["tp=2" in row.prediction.plan for row in found.rows] == [True, True, False, True]


def test_a_plan_that_cannot_run_is_a_row_and_one_that_cannot_be_read_an_error(vgg):
    assert "one node" in compare(vgg, ["ddp", "hogwild"]).rows[1].why_not
    with pytest.raises(PlanError, match="ps-async"):
        compare(vgg, ["ddp", "ps-asnyc"])


@pytest.mark.parametrize("words", ["terngrad", "dgc", "powersgd", "qsgd", "onebit", "compress=fp16", "topk"])
def test_compression_pays_below_the_break_even_and_not_above(words):
    subject = Subject.of("vgg11", "4x1xv100-sxm-16gb@10Gb/s", words, batch=8)
    even = find_break_even(subject).bandwidth_Bps
    assert even is not None

    def gain(rate):
        edit = f"network.inter.bandwidth={rate}B/s"
        coded, plain = (
            apply(s, [edit]).predict().step_s
            for s in (subject, Subject.of("vgg11", subject.cluster, "", batch=8))
        )
        return math.log(plain / coded)

    assert gain(even / 1.1) > 0 > gain(even * 1.1)


def test_gathered_codes_never_pay_among_many():
    many = Subject.of("vgg11", "128x1xv100-sxm-16gb@10Gb/s", "qsgd", batch=8)
    assert find_break_even(many).bandwidth_Bps is None and not find_break_even(many).always
