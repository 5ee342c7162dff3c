"""Bottlenecks: elasticities are finite differences, promises are kept, and both agree with the critical
path.
"""

import pytest

pytest.importorskip("torch", reason="capture needs torch")

from paceline.whatif.edits import Edit, apply
from paceline.whatif.explain import explain
from paceline.whatif.resources import elasticity, knobs, resources
from paceline.whatif.subject import Subject

SUBJECTS = {
    "pipeline": ("gpt3-13b", "8xdgx-a100", "tp=8 pp=2 mbs=1 gbs=64", {}),
    "fsdp": ("llama3-8b", "2xdgx-h100", "fsdp seq=4096", {}),
    "slow": ("vgg11", "4xp100-node-10gbe", "ddp", {"batch": 8, "image": 64}),
    "coded": ("vgg11", "4xp100-node-10gbe", "terngrad", {"batch": 8, "image": 64}),
    "late": ("resnet18", "4xp100-node-10gbe", "ps-sync", {"batch": 8, "image": 64}),
}


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request):
    model, cluster, plan, options = SUBJECTS[request.param]
    return Subject.of(model, cluster, plan, **options)


@pytest.fixture(scope="module")
def found(subject):
    return resources(subject)


def test_elasticities_are_finite_differences(subject, found):
    """Of other sizes, and one-sided: within one per cent of the step."""
    base = subject.predict().step_s
    for bottleneck in found.bottlenecks:
        knob = knobs(subject)[bottleneck.name]
        for step in (0.001, 0.01):
            assert elasticity(subject, knob, step) == pytest.approx(bottleneck.elasticity, abs=0.01)
        faster = knob.turned(subject, 1.01).predict().step_s
        assert 100 * (1 - faster / base) == pytest.approx(bottleneck.elasticity, abs=0.01)


def test_promises_are_kept(subject, found):
    """The edit that a bottleneck names gives the time that it promises."""
    for bottleneck in found.bottlenecks:
        after = apply(subject, [bottleneck.edit]).predict().step_s
        assert after == pytest.approx(bottleneck.step_s, rel=0.01)
        assert found.step_s - after == pytest.approx(bottleneck.saved_s, abs=0.01 * found.step_s)


def test_elasticities_add_up_to_the_step(subject, found):
    """With 1 % more of everything, a step is shorter by the sum of the elasticities; the rest is latency."""
    better = subject
    for knob in knobs(subject).values():
        better = knob.turned(better, 1.01)
    saved = 100 * (1 - better.predict().step_s / found.step_s)
    assert saved == pytest.approx(sum(b.elasticity for b in found.bottlenecks), abs=0.03)
    assert -0.02 <= found.fixed <= 1


def test_networks_save_no_more_than_the_critical_path_holds_of_them(subject, found):
    p = subject.predict()
    shown = sum(part.seconds for part in p.breakdown if part.bound_by in ("communication", "bubble"))
    for bottleneck in found.bottlenecks:
        if bottleneck.edit.startswith("network."):
            assert bottleneck.saved_s <= shown * 1.01 + 0.001 * p.step_s
    assert sum(part.seconds for part in p.breakdown) == pytest.approx(p.step_s)


def test_the_worst_bottleneck_comes_first(found):
    saved = [b.saved_s for b in found.bottlenecks]
    assert saved == sorted(saved, reverse=True) and all(
        b.then and b.then != b.name for b in found.bottlenecks
    )


def test_a_slow_network_is_named():
    worst = resources(Subject.of("vgg11", "4xp100-node-10gbe", "ddp", batch=8, image=64)).bottlenecks[0]
    assert worst.name == "ethernet bandwidth" and worst.elasticity > 0.5


def test_the_next_bottleneck_is_the_one_that_saves_most_then():
    slow = Subject.of("vgg11", "4xp100-node-10gbe", "ddp", batch=8, image=64)
    worst = resources(slow).bottlenecks[0]
    free = apply(slow, [worst.edit])
    assert resources(free).bottlenecks[0].name == worst.then


def test_stragglers_are_a_resource():
    late = apply(Subject.of("gpt3-1.3b", "4xdgx-a100", "tp=2"), [Edit(path="stragglers.cv", value="0.1")])
    found = {b.name: b for b in resources(late).bottlenecks}["stragglers"]
    assert found.elasticity > 0 and apply(late, [found.edit]).predict().step_s == pytest.approx(found.step_s)


# -- explain ---------------------------------------------------------------------------------------


def test_no_resource_is_busier_than_the_step_is_long(subject):
    a = explain(subject).anatomy
    assert all(roof.seconds <= 1.02 * a.step_s for roof in a.roofs)
    assert a.achieved <= min(roof.ceiling for roof in a.roofs) * 1.02


def test_flops_are_those_of_the_model():
    e = explain(Subject.of("resnet18", "2xp100-node-10gbe", "ddp", batch=8, image=64))
    assert e.anatomy.flops * e.prediction.devices == pytest.approx(e.prediction.flops)
    lm = explain(Subject.of("llama3-8b", "2xdgx-h100", "fsdp seq=4096"))
    assert lm.anatomy.flops * lm.prediction.devices == pytest.approx(lm.prediction.flops, rel=0.05)


def test_readings_of_a_step():
    e = explain(Subject.of("vgg11", "4xp100-node-10gbe", "ddp", batch=8, image=64))
    sent, bsp = e.anatomy.sent, e.anatomy.bsp
    assert bsp["h_bytes"] == pytest.approx(2 * 15 / 16 * 4 * e.prediction.parameters)  # a ring of sixteen
    assert bsp["supersteps"] == sum(s.count for s in sent) and bsp["seconds"] >= e.prediction.step_s * 0.9
    assert bsp["seconds"] == pytest.approx(
        bsp["w_s"] + bsp["h_bytes"] * bsp["g_s_per_byte"] + bsp["supersteps"] * bsp["l_s"]
    )


def test_work_and_depth():
    e = explain(Subject.of("resnet18", "2xp100-node-10gbe", "ddp", batch=8, image=64))
    # a multiply-add is one operation and two FLOPs
    assert 2 * sum(layer.work * layer.count for layer in e.anatomy.layers) >= e.anatomy.flops
    assert all(layer.depth >= 1 and layer.parallelism > 1 for layer in e.anatomy.layers if layer.work > 1e6)
    double = explain(Subject.of("resnet18", "2xp100-node-10gbe", "ddp", batch=16, image=64))
    # samples are independent: work doubles, depth hardly grows
    assert double.forms[-1].most > 1.7 * e.forms[-1].most


def test_forms_of_parallelism():
    forms = {
        form.name: form
        for form in explain(Subject.of("gpt3-13b", "8xdgx-a100", "tp=8 pp=2 mbs=1 gbs=64")).forms
    }
    assert {name: form.used for name, form in forms.items() if name != "operator"} == {
        "data": 4,
        "tensor": 8,
        "pipeline": 2,
        "context": 1,
    }
    assert forms["tensor"].most == 40 and forms["tensor"].sent_bytes > forms["pipeline"].sent_bytes > 0
    assert "5.9 %" in forms["pipeline"].limit  # 1 / (16 + 1)
