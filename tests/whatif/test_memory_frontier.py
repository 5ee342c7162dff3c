"""`paceline analyze --memory`: lifetimes add up to the predicted peak, points are what their policies do."""

import json
from functools import cache

import pytest

torch = pytest.importorskip("torch", reason="modules are captured")
from torch import nn  # noqa: E402

import paceline as pl  # noqa: E402
from paceline.capture.lifetimes import step_memory  # noqa: E402
from paceline.catalog import devices  # noqa: E402
from paceline.cli import main  # noqa: E402
from paceline.cost.host_link import link_rate  # noqa: E402
from paceline.cost.memory import memory  # noqa: E402
from paceline.errors import SpecError  # noqa: E402
from paceline.predict.step import Conditions  # noqa: E402
from paceline.spec.recomputation import RecomputePolicy  # noqa: E402
from paceline.train import recompute  # noqa: E402
from paceline.whatif.memory_chain import StepChain, live  # noqa: E402
from paceline.whatif.memory_frontier import memory_frontier  # noqa: E402

MODELS = {
    "resnet18": {"batch": 32, "image": 64},
    "gpt2-124m": {"batch": 8, "seq": 256},
    "lstm-650": {"batch": 3},
    "googlenet": {"batch": 2},
}


@cache
def lifetimes(name):
    return step_memory(name, **MODELS[name])


@cache
def frontier(name, device="h200"):
    return memory_frontier(name, devices.get(device), **MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_lifetimes_add_up_to_the_predicted_peak(name):
    found = lifetimes(name)
    device = devices.get("haswell-cori")
    there = sum(found.workload.resident.values())
    peak = int(live(found.lives, found.operators).max()) + there
    assert peak == memory(found.workload, device).peak_bytes


@pytest.mark.parametrize("name", MODELS)
def test_units_are_the_forward_pass_without_gaps(name):
    found = lifetimes(name)
    edges = [0, *(unit.end for unit in found.units)]
    assert [unit.start for unit in found.units] == edges[:-1] and edges[-1] == found.forward
    ops = list(found.ops())
    assert len(ops) == found.operators
    for unit in found.units:
        modules = {op.module for op in ops[unit.start : unit.end]}
        assert not unit.path or all(m == unit.path or m.startswith(f"{unit.path}.") for m in modules)


def test_blocks_are_units_and_containers_are_not():
    paths = [unit.path for unit in lifetimes("resnet18").units]
    assert paths[:6] == ["stem.conv", "stem.norm", "stem.act", "stem_pool", "stage1.0", "stage1.1"]
    gpt = lifetimes("gpt2-124m").units
    assert [unit.path for unit in gpt if unit.composite] == [f"blocks.{i}" for i in range(12)]
    assert all(unit.follows for unit in gpt if unit.composite)
    # dropout runs twice: no checkpoint can be told from the other
    assert [unit.spannable for unit in lifetimes("lstm-650").units if unit.path == "drop"] == [False, False]
    acts = [unit for unit in lifetimes("resnet18").units if unit.path == "stem.act"]
    assert acts[0].mutates and acts[0].follows


def test_what_a_module_keeps_is_what_it_made_and_backward_needs():
    chain = StepChain.of(lifetimes("gpt2-124m"), devices.get("h200"), Conditions())
    total = sum(life.bytes for life in chain.memory.lives if life.kind == "activations")
    assert sum(link.saved for link in chain.links) == total
    blocks = [link for link, unit in zip(chain.links, chain.units, strict=True) if unit.composite]
    assert len({link.saved for link in blocks}) == 1
    width, tokens = 768, 8 * 256
    assert all(link.output == 4 * width * tokens for link in blocks)
    assert sum(link.gradients for link in chain.links) == pytest.approx(
        4 * chain.memory.workload.parameter_count, rel=1e-3
    )


@pytest.mark.parametrize("name", ["resnet18", "gpt2-124m"])
def test_a_point_is_the_prediction_of_its_policy(name):
    found = frontier(name)
    names = [point.name for point in found.points]
    assert {"keep all", "every block", "square root", "offload 100 %"} <= set(names)
    assert sum(n.startswith("optimal") for n in names) >= 4
    plain = next(p for p in found.points if p.name == "keep all")
    for point in found.points[::2]:
        workload = pl.capture(name, **MODELS[name], recompute=point.policy, fold=False)
        again = pl.predict(workload, "h200")
        copies = 2 * point.offloaded_bytes / link_rate(devices.get("h200"), 1)
        assert again.memory.peak_bytes == point.peak_bytes
        assert again.step_s + copies == pytest.approx(point.step_s)
        assert point.overhead == pytest.approx(point.step_s / plain.step_s - 1)
    assert (
        plain.peak_bytes
        == found.peak.bytes + memory(lifetimes(name).workload, devices.get("h200")).by_kind["workspace"]
    )


@pytest.mark.parametrize("name", ["resnet18", "gpt2-124m"])
def test_marked_points_beat_the_others(name):
    points = frontier(name).points
    best = [p for p in points if p.best]
    assert [p.peak_bytes for p in best] == sorted((p.peak_bytes for p in best), reverse=True)
    assert [p.step_s for p in best] == sorted(p.step_s for p in best)
    for point in points:
        better = [b for b in best if b.peak_bytes <= point.peak_bytes and b.step_s <= point.step_s]
        assert better
    lean = [p for p in best if p.name.startswith("optimal")]
    blocks = next(p for p in points if p.name == "every block")
    assert any(p.step_s < blocks.step_s and p.peak_bytes <= 1.1 * blocks.peak_bytes for p in lean)


def test_offload_is_for_devices_with_a_host_beside():
    assert not any(p.policy.offload for p in frontier("resnet18", "haswell-cori").points)
    sent = [p for p in frontier("gpt2-124m").points if p.policy.offload]
    assert sent and all(p.hidden_s is not None and p.hidden_s < p.step_s for p in sent)
    assert [p.offloaded_bytes for p in sent] == sorted(p.offloaded_bytes for p in sent)


def test_the_fastest_within_a_limit():
    found = frontier("resnet18")
    assert found.within(1e12).name == "keep all"
    least = min(p.peak_bytes for p in found.points)
    assert found.within(least).peak_bytes == least
    with pytest.raises(SpecError, match=r"no policy for resnet18 needs 1 MB or less.*smaller batch"):
        found.within(1e6)


def test_a_frontier_of_a_module_of_ones_own():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(9)))
    found = memory_frontier((net, (torch.randn(256, 64),)), devices.get("haswell-cori"), batch=256)
    assert found.modules[0].path == "0.0" and len(found.points) > 3
    assert not found.notes
    lean = min(found.points, key=lambda p: p.peak_bytes)
    plain = next(p for p in found.points if p.name == "keep all")
    assert lean.passing_bytes < 0.6 * plain.passing_bytes


# -- the command -----------------------------------------------------------------------------------


def run(*words):
    """Exit code of the command."""
    try:
        main(["analyze", *words])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


GPT = ("gpt2", "--batch", "8", "--seq", "256", "--memory", "--device", "h200")


def test_the_chosen_policy_can_be_run(tmp_path, capsys):
    file = tmp_path / "policy.json"
    page = tmp_path / "memory.html"
    plain = next(p for p in frontier("gpt2-124m").points if p.name == "keep all")
    limit = f"{0.8 * plain.peak_bytes / 1e9}GB"
    assert run(*GPT, "--within", limit, "--apply", str(file), "--html", str(page)) == 0
    shown = capsys.readouterr().out
    assert "chosen: " in shown and "recompute(model, " in shown and "forward pass" in shown
    assert "<svg" in page.read_text(encoding="utf-8")
    assert RecomputePolicy.load(file) == frontier("gpt2-124m").within(0.8 * plain.peak_bytes).policy
    with torch.device("meta"):
        net = pl.models.build(pl.models.get("gpt2"), batch=2, seq=64)[0]
    recompute(net, file)


def test_json_is_whole(capsys):
    assert run(*GPT, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    found = frontier("gpt2-124m")
    assert [p["name"] for p in data["points"]] == [p.name for p in found.points]
    assert RecomputePolicy.from_dict(data["points"][3]["policy"]) == found.points[3].policy
    assert sum(data["peak"]["by_kind"].values()) == found.peak.bytes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("resnet18",), "say what to look at: --concurrency, --memory"),
        (("resnet18", "--memory"), "--memory needs a device"),
        (("resnet18", "--memory", "--device", "h20o"), "did you mean"),
        (("step.json", "--memory", "--device", "h200"), "name the model itself"),
        (("resnet18", "--memory", "--device", "h200", "--within", "3 parsecs"), "parsecs"),
        (("resnet18", "--memory", "--device", "h200", "--compile"), "compile does not go"),
        (("resnet18", "--memory", "--device", "h200", "--within", "1MB"), "no policy for resnet18"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    assert run(*words) == 2
    assert message in capsys.readouterr().err
