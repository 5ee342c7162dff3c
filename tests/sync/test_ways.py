"""Gradients sent less, later or without waiting: limits, exact bytes, and what each has to grow or fall
with.
"""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="capture needs torch")

import paceline as pl
from paceline import sync
from paceline.catalog import clusters, devices, models, transformers
from paceline.cost.chip import chip
from paceline.cost.compression import decode_s, encode_s, model_bytes
from paceline.errors import PlanError
from paceline.predict import simulated
from paceline.predict.simulated import asked
from paceline.spec.plan import Plan
from paceline.spec.synchronisation import AVERAGES, Relaxation, compressions, relaxed_words
from paceline.spec.vocabulary import Mode
from paceline.sync.accuracy import _KNOWN, accuracy
from paceline.sync.overlapped import in_priority, traded
from paceline.sync.way import by_layer

ETHERNET = clusters.get("4xp100-node-10gbe")
NODE = clusters.get("p100-node-10gbe")
COMPRESSED = [f"compress={name}" for name in compressions()]
SYNCHRONOUS = [*COMPRESSED, "overlap", "priority", "ps-sync"]
NOW_AND_THEN = ["local-sgd", "diloco", "ps-async", "ps-bounded", "ps-backup", "easgd", "gossip"]
GPT, DGX = transformers.get("gpt3-1.3b"), clusters.get("4xdgx-a100")


@cache
def workload(model="resnet18", batch=8, image=64):
    return pl.capture(model, batch=batch, image=image, optimizer="sgd")


def step(words, cluster=ETHERNET, model="resnet18"):
    return simulated.predict(workload(model), cluster, Plan.parse(words))


def part(prediction, name):
    return sum(p.seconds for p in prediction.breakdown if p.name == name)


# -- words -----------------------------------------------------------------------------------------


relaxations = st.builds(
    Relaxation,
    compress=st.sampled_from(["", *compressions()]),
    ratio=st.sampled_from([0.0, 0.001, 0.25]),
    rank=st.integers(0, 8),
    average=st.sampled_from(AVERAGES),
    mode=st.sampled_from(Mode),
    period=st.integers(0, 600),
    island=st.integers(0, 8),
    servers=st.integers(0, 64),
    staleness=st.integers(0, 9),
    backup=st.integers(0, 9),
)


@given(relaxations)
def test_words_round_trip(relax):
    plan = Plan(mbs=2, relax=relax)
    assert Plan.parse(str(plan)) == plan


def test_every_relaxation_says_what_it_may_cost():
    assert set(_KNOWN) == {*Mode} - {"replicas"}
    for name in (*compressions(), "easgd"):
        found = accuracy(Plan.parse(name if name in relaxed_words() else f"compress={name}").relax)
        assert found.what and found.source
    for name in {*AVERAGES} - {"allreduce"}:
        found = sync.way_of(Plan.parse(name)).accuracy
        assert found.what and found.source


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("terngard", "did you mean 'terngrad'"),
        ("compress=zip", "expected one of fp16"),
        ("period=0", "whole number of 1 or more"),
        ("ratio=2", "above 0 and up to 1"),
        ("terngrad dgc", "gives compress twice"),
        ("servers=two", "whole number"),
    ],
)
def test_mistakes_in_words(words, message):
    with pytest.raises(PlanError, match=message):
        Plan.parse(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("fsdp terngrad", "shards them"),
        ("terngrad local-sgd", "averaged every step"),
        ("dgc overlap", "averaged every step"),
        ("terngrad servers=2", "servers=2 does not go with terngrad"),
        ("ps-sync staleness=2", "staleness=2 does not go"),
        ("local-sgd island=3", "do not divide"),
        ("hogwild", "shares the memory of one node"),
        ("ps-backup backup=16", "there are 16 workers"),
    ],
)
def test_plans_that_contradict_themselves(words, message):
    with pytest.raises(PlanError, match=message):
        step(words)


# -- all of them -----------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [*SYNCHRONOUS, *NOW_AND_THEN])
def test_answers_hold_together(words):
    p = step(words)
    assert sum(part.seconds for part in p.breakdown) == pytest.approx(p.step_s)
    assert p.step_s_low < p.step_s < p.step_s_high and 0 <= p.exposed_s < p.step_s
    assert p.accuracy is not None and p.accuracy.source and p.to_dict()["accuracy"]["what"] == p.accuracy.what
    assert Plan.parse(p.plan.replace("amp_", "")).relax == Plan.parse(words).relax.filled(p.devices)


@pytest.mark.parametrize("words", [*COMPRESSED, "overlap", "priority", "ps-sync", "gossip"])
def test_one_device_sends_nothing(words):
    one = clusters.get("1xp100-pcie")
    assert step(words, one).step_s == pytest.approx(step("", one).step_s)


@pytest.mark.parametrize("words", [*SYNCHRONOUS, *NOW_AND_THEN])
def test_an_infinite_network_leaves_computation(words):
    """Nothing is faster than a device by itself, and without networks little is left but encoders."""
    alone = step("", clusters.get("1xp100-pcie")).step_s
    tiers = tuple(
        replace(t, bandwidth_Bps=1e18, node_bandwidth_Bps=1e18 if t.node_bandwidth_Bps else None)
        for t in ETHERNET.tiers
    )
    free = step(words, replace(ETHERNET, tiers=tiers)).step_s
    assert free >= 0.9 * alone  # the update may be shared, or left to a server
    assert free <= step(words).step_s * 1.001


@pytest.mark.parametrize("words", ["overlap", "compress=fp16", "dgc", "powersgd", "local-sgd", "diloco"])
def test_what_is_meant_to_help_helps_on_a_slow_network(words):
    assert step(words, model="vgg11").throughput > step("", model="vgg11").throughput


# -- compression -----------------------------------------------------------------------------------


def sent(words, cluster, load):
    """Bytes that a rank contributes by collective, as the prediction sends them."""
    out = {}
    for message in asked(load, cluster, Plan.parse(words)).messages[0]:
        for label in message.reduce:
            out[label.op] = out.get(label.op, 0.0) + label.size
    return out


@pytest.mark.parametrize(
    "model",
    [
        name
        for name in models.names()
        if models.get(name).image or name in ("gpt2-124m", "lstm-650", "bert-base")
    ],
)
def test_predicted_bytes_are_those_of_the_encoders(model):
    load = pl.capture(model, batch=2, optimizer="sgd")
    trained = [(p.name, p.shape) for p in load.parameters if p.ready >= 0]
    for scheme in ("terngrad", "dgc", "powersgd", "qsgd", "onebit", "topk", "compress=fp16"):
        found = sent(scheme, ETHERNET, load)
        wanted = model_bytes(Plan.parse(scheme).relax.scheme, trained)
        assert (
            found.get("all_gather", 0.0) / ETHERNET.device_count + found.get("all_reduce", 0.0) == wanted
        ), scheme


def test_gathered_codes_grow_with_ranks_and_reduced_ones_do_not():
    more = clusters.get("16xp100-node-10gbe")
    load = workload("vgg11")
    assert sent("terngrad", more, load)["all_gather"] == 4 * sent("terngrad", ETHERNET, load)["all_gather"]
    assert sent("powersgd", more, load) == sent("powersgd", ETHERNET, load)


def test_encoders_cost_time_and_residuals_memory():
    fast = clusters.get("dgx-1-v100")
    plain, coded = step("", fast, "vgg11"), step("onebit", fast, "vgg11")
    assert part(coded, "encoding and decoding") > 0 == part(plain, "encoding and decoding")
    assert coded.memory.by_kind["optimizer"] - plain.memory.by_kind["optimizer"] == 4 * coded.parameters
    assert any("encoding" in e.what for e in coded.provenance)


@pytest.mark.parametrize(
    ("name", "encode", "decode"),
    [("terngrad", 6.8e-5, 3.9e-5), ("onebit", 2.72e-4, 1.5e-4), ("dgc", 1.3e-3, 6.6e-4)],
)
def test_encoders_take_what_was_measured_on_an_h200(name, encode, decode):
    """100 MB of gradients, two ranks (bench/data/h200_encoders.jsonl)."""
    h200, scheme = devices.get("h200"), Plan.parse(name).relax.scheme
    assert encode_s(scheme, 25_000_000, chip(h200), h200) == pytest.approx(encode, rel=0.1)
    assert decode_s(scheme, 25_000_000, 2, chip(h200), h200) == pytest.approx(decode, rel=0.1)
    assert decode_s(scheme, 25_000_000, 64, chip(h200), h200) > decode_s(
        scheme, 25_000_000, 2, chip(h200), h200
    )


def test_servers_take_codes_and_send_sums_of_them():
    plain, coded = step("ps-sync", model="vgg11"), step("ps-sync terngrad", model="vgg11")
    assert coded.exposed_s < plain.exposed_s / 3
    assert step("ps-sync dgc", model="vgg11").exposed_s > plain.exposed_s / 3  # whole parameters come back


# -- later -----------------------------------------------------------------------------------------


def test_fully_connected_layers_trade_gradients_for_activations():
    """VGG's first of them has 103 M weights and 25,088 inputs: a batch of 8 is far less to send."""
    made = asked(workload("vgg11", 8, 224), ETHERNET, Plan.parse("overlap"))
    layers = {layer[0].layer: layer for layer in by_layer(made.gradients[0])}
    trade = traded(made.side, layers["classifier.0"])
    whole = sum(gradient.bytes for gradient in layers["classifier.0"])
    assert (
        0 < sum(made.mesh.send(*sent) for sent in trade) < made.mesh.send("reduce_scatter", whole, "dp") / 5
    )
    assert traded(made.side, layers["features.0"]) == []


def test_priority_sends_nothing_for_a_stage_without_gradients():
    made = asked(workload(), ETHERNET, Plan.parse("priority"))
    assert list(in_priority(made.side, [])) == []


def test_priority_hides_what_is_left_behind_the_next_forward_pass():
    load = workload("vgg11", 8, 224)
    plain, first = (simulated.predict(load, ETHERNET, Plan.parse(words)) for words in ("", "priority"))
    assert first.step_s < plain.step_s and plain.step_s - first.step_s <= part(plain, "forward") * 1.01


@pytest.mark.parametrize("mode", ["local-sgd", "diloco", "easgd"])
def test_longer_periods_send_less(mode):
    steps = [step(f"{mode} period={h}") for h in (4, 8, 16, 4096)]
    assert all(a.exposed_s > b.exposed_s for a, b in pairwise(steps))
    if mode == "local-sgd":
        assert part(steps[0], "parameter averaging") == pytest.approx(
            2 * part(steps[1], "parameter averaging")
        )


def test_islands_average_inside_every_step():
    assert part(step("diloco"), "gradient reduction") > 0  # a node by default
    assert part(step("diloco island=1"), "gradient reduction") == 0


def test_gossip_does_not_depend_on_the_size_of_the_ring():
    assert step("gossip").step_s == pytest.approx(step("gossip", clusters.get("64xp100-node-10gbe")).step_s)


# -- servers ---------------------------------------------------------------------------------------


def test_more_servers_help_until_the_workers_links_are_full():
    rates = [step(f"ps-async servers={n}", model="vgg11").throughput for n in (1, 2, 4, 8, 64)]
    assert all(a < b * 1.0001 for a, b in pairwise(rates)) and rates[-1] / rates[0] > 2


def test_servers_never_serve_more_than_their_network_carries():
    p = step("ps-async servers=1", model="vgg11")
    updates = p.throughput / 8  # batch of a worker
    assert updates * 4 * p.parameters <= 1.25e9 and updates * 4 * p.parameters > 0.6 * 1.25e9


def test_one_worker_waits_for_nobody():
    lone = clusters.get("2x1xp100-pcie@10Gb/s")
    both, one = step("ps-async servers=1", lone), step("ps-async", clusters.get("1x1xp100-pcie"))
    assert both.step_s > one.step_s and one.accuracy.what.startswith("gradients are late")


def test_stragglers_hold_up_those_who_wait():
    late = replace(ETHERNET, straggler_cv=0.2)
    waits = {
        words: part(step(words, late), "stragglers")
        for words in (
            "ps-backup",
            "ps-backup backup=4",
            "ps-bounded",
            "ps-bounded staleness=1",
            "ps-async",
            "local-sgd",
            "local-sgd period=32",
        )
    }
    assert waits["ps-backup"] > waits["ps-backup backup=4"] > 0
    assert waits["ps-backup"] > waits["ps-bounded staleness=1"] > waits["ps-bounded"] > waits["ps-async"] == 0
    assert waits["local-sgd"] == pytest.approx(2 * waits["local-sgd period=32"])
    assert step("ps-backup backup=4", late).throughput < step("ps-backup", ETHERNET).throughput


def test_hogwild_shares_one_node():
    p = step("hogwild", NODE)
    assert part(p, "parameter servers") > 0 and p.devices == 4


# -- transformers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [*(w for w in relaxed_words() if w not in ("gossip", "hogwild", "allreduce")), "compress=fp16"]
)
def test_parts_of_transformers_add_up(words):
    p = simulated.predict(GPT, DGX, Plan.parse(f"{words} tp=2 mbs=1 gbs=64"))
    assert p.accuracy is not None and sum(part.seconds for part in p.breakdown) == pytest.approx(p.step_s)


def test_a_transformer_that_seldom_averages_is_as_fast_as_one_that_never_does():
    alone = simulated.predict(GPT, clusters.get("1xdgx-a100"), Plan.parse("tp=8 mbs=1 gbs=4"))
    seldom = simulated.predict(GPT, DGX, Plan.parse("diloco period=100000 tp=8 mbs=1 gbs=16"))
    assert seldom.step_s == pytest.approx(alone.step_s, rel=0.01) and seldom.throughput == pytest.approx(
        4 * alone.throughput, rel=0.01
    )


def test_what_transformers_cannot_do():
    with pytest.raises(PlanError, match="context-parallel"):
        simulated.predict(GPT, DGX, Plan.parse("local-sgd cp=2"))
    with pytest.raises(PlanError, match="whole replicas on one device"):
        simulated.predict(GPT, DGX, Plan.parse("gossip tp=2"))
