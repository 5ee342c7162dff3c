"""Edits: every field can be changed, mistakes are named, and what changed is told with reasons."""

import pytest

pytest.importorskip("torch", reason="capture needs torch")

from paceline.cost.curves import curves_for
from paceline.errors import PacelineError, PlanError, SpecError, UnknownName
from paceline.spec.plan import Plan
from paceline.whatif.change import change
from paceline.whatif.edits import BOUNDLESS, Edit, apply, paths
from paceline.whatif.subject import Subject


@pytest.fixture(scope="module")
def gpt():
    return Subject.of("gpt3-1.3b", "4xdgx-a100", "tp=2 mbs=1 gbs=64")


@pytest.fixture(scope="module")
def cnn():
    return Subject.of("resnet18", "2xp100-node-10gbe", "ddp", batch=8, image=64)


@pytest.mark.parametrize(
    ("text", "of", "value"),
    [
        ("nodes=8", lambda s: s.cluster.device_count, 64),
        ("nodes=x2", lambda s: s.cluster.nodes, 8),
        ("nodes=8", lambda s: s.cluster.name, "8xdgx-a100"),
        ("network.inter.bandwidth=800Gb/s", lambda s: s.cluster.tiers[-1].bandwidth_Bps, 100e9),
        ("network.rails.bandwidth=x2", lambda s: s.cluster.tiers[-1].bandwidth_Bps, 50e9),
        ("network.intra.latency=2us", lambda s: s.cluster.tiers[0].latency_s, 2e-6),
        ("stragglers.cv=5%", lambda s: s.cluster.straggler_cv, 0.05),
        ("device=h200", lambda s: s.cluster.device.name, "h200"),
        ("device.memory.bandwidth=3TB/s", lambda s: s.cluster.device.memory_bandwidth_Bps, 3e12),
        ("device.peak.bf16=x2", lambda s: s.cluster.device.peak("bf16"), 624e12),
        ("device.arithmetic=x2", lambda s: s.cluster.device.peak("bf16"), 624e12),
        ("device.chip.sms=200", lambda s: s.cluster.device.sm_count, 200),
        ("host.speed=x3", lambda s: s.host_speed, 3.0),
        ("tp=4", lambda s: s.plan.tp, 4),
        ("plan.gbs=128", lambda s: s.plan.gbs, 128),
        ("sharding=fsdp", lambda s: s.plan.sharding, "fsdp"),
        ("dp=zero1", lambda s: s.plan.sharding, "zero1"),
        ("bucket=1MB", lambda s: s.plan.bucket_bytes, 1e6),
        ("sp=true", lambda s: s.plan.sp, True),
        ("compress=dgc", lambda s: s.plan.relax.compress, "dgc"),
        ("plan.period=9", lambda s: s.plan.relax.period, 9),
        ("model.layers=30", lambda s: s.model.layers, 30),
        ("model.hidden=4096", lambda s: s.model.head_dim, 256),
        ("model.gated=true", lambda s: s.model.gated, True),
        ("model.norm=rms", lambda s: s.model.norm, "rms"),
    ],
)
def test_edits_of_a_transformer(gpt, text, of, value):
    assert of(apply(gpt, [text])) == value
    assert of(gpt) != value


@pytest.mark.parametrize(
    ("text", "share"), [("weights=2:4", 2 / 3), ("weights=50%", 2 / 3), ("activations=0.4", 2.2 / 3)]
)
def test_declared_zeros_are_skipped_in_products(gpt, cnn, text, share):
    """Two of three products have the operand that is sparse; nothing else is faster."""
    for subject in (gpt, cnn):
        before, after = subject.predict(), apply(subject, [f"sparsity.{text}"]).predict()
        assert before.step_s * share < after.step_s < before.step_s
    curves = apply(gpt, [f"sparsity.{text}"]).curves
    assert curves.scale_of("gemm.bf16") / gpt_curves(gpt).scale_of("gemm.bf16") == pytest.approx(share)
    assert curves.scale_of("norm.forward") == gpt_curves(gpt).scale_of("norm.forward")


def gpt_curves(subject):
    return curves_for(subject.cluster.device)


def test_what_a_node_shares_grows_with_a_device(cnn):
    tier = apply(cnn, ["network.inter.bandwidth=40Gb/s"]).cluster.tiers[-1]
    assert (tier.bandwidth_Bps, tier.node_bandwidth_Bps) == (5e9, 5e9)
    assert (
        apply(cnn, ["network.inter.bandwidth=inf"]).cluster.tiers[-1].node_bandwidth_Bps == 1.25e9 * BOUNDLESS
    )


def test_modules_are_captured_again(cnn):
    larger = apply(cnn, ["batch=16", "workload.precision=amp_fp16"])
    assert (larger.model.batch, larger.model.precision) == (
        16,
        "amp_fp16",
    ) and larger.predict().batch == 2 * cnn.predict().batch
    assert apply(cnn, ["batch=16"]).model is apply(cnn, ["batch=16"]).model  # once


def test_edited_facts_say_where_they_come_from(gpt):
    fact = apply(gpt, ["network.inter.bandwidth=800Gb/s"]).cluster.facts["tier.rails.bandwidth"]
    assert (fact.kind, fact.value) == ("declared", 100e9) and "--set" in fact.source


def test_a_degree_that_follows_from_the_nodes_is_filled_in_again():
    fixed = Subject.of("gpt3-1.3b", "4xdgx-a100", "dp=16 tp=2 gbs=64")
    assert apply(fixed, ["nodes=8"]).predict().devices == 64


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("network.intre.bandwidth=1Gb/s", UnknownName, "network.inter.bandwidth"),
        ("nodez=2", UnknownName, "nodes"),
        ("layers=3", UnknownName, "model.layers"),
        ("device.memory.bandwith=1TB/s", UnknownName, "device.memory.bandwidth"),
        ("device=h20x", UnknownName, "h20"),
        ("nodes=2.5", SpecError, "whole number"),
        ("sparsity.weights=4:2", SpecError, "so many of so many"),
        ("nodes", SpecError, "path=value"),
        ("nodes=", SpecError, "path=value"),
        ("network.inter.bandwidth=-3Gb/s", SpecError, "above zero"),
        ("network.inter.bandwidth=3 apples", SpecError, "unknown unit"),
        ("device.link.peer=x2x", SpecError, "device.link.peer"),
        ("tp=none", PlanError, "whole number"),
        ("compress=zip", PlanError, "expected one of"),
        ("network.inter.latency=x2", SpecError, "no figure to multiply"),
    ],
)
def test_mistakes(gpt, text, error, message):
    with pytest.raises(error) as found:
        apply(gpt, [text])
    assert message in str(found.value) and "\n" not in str(found.value)


def test_saved_workloads_cannot_be_captured_again(cnn, tmp_path):
    cnn.model.save(tmp_path / "w.json")
    with pytest.raises(SpecError, match="captured workload, whose batch is fixed"):
        apply(Subject.of(str(tmp_path / "w.json"), "2xp100-node-10gbe"), ["batch=4"])


def test_every_listed_path_is_known(gpt, cnn):
    """Each path either takes a factor, or complains about the value; never about its name."""
    for subject in (gpt, cnn):
        for path in paths(subject):
            try:
                apply(subject, [Edit(path=path, value="x2")])
            except PacelineError as error:
                assert "unknown field" not in str(error), path


@pytest.mark.parametrize(
    "text",
    ['plan = "fsdp tp=2"', "tp = 2\nsharding = 'fsdp'", "[plan]\ntp = 2\nsharding = 'fsdp'\nreshard = true"],
)
def test_plans_in_files(tmp_path, text):
    (tmp_path / "p.toml").write_text(text)
    assert Plan.parse(str(tmp_path / "p.toml")) == Plan.parse("fsdp tp=2")


def test_plan_files_with_mistakes(tmp_path):
    (tmp_path / "p.toml").write_text("tp = ")
    with pytest.raises(PlanError, match="not valid TOML"):
        Plan.parse(str(tmp_path / "p.toml"))
    with pytest.raises(SpecError, match="cannot read plan file"):
        Plan.parse(str(tmp_path / "none.toml"))


# -- changes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edits",
    [["network.inter.bandwidth=x4"], ["nodes=4"], ["device=h200"], ["compress=dgc"], ["host.speed=0.1"]],
)
def test_reasons_add_up_to_the_change(cnn, edits):
    found = change(cnn, edits)
    told = sum(reason.saved_s for reason in found.reasons)
    assert told == pytest.approx(found.before.step_s - found.after.step_s, abs=0.02 * found.before.step_s)
    assert found.speedup == found.after.throughput / found.before.throughput


def test_reasons_read_well(cnn):
    texts = [str(reason) for reason in change(cnn, ["network.inter.bandwidth=x4"]).reasons]
    assert any(
        text.startswith("exposed gradient reduction fell by") and text.endswith("ms") for text in texts
    )
    slower = change(cnn, ["network.inter.bandwidth=x0.25"])
    assert any("rose by" in str(reason) for reason in slower.reasons) and slower.speedup < 1


def test_nothing_changed_has_no_reasons(cnn):
    assert change(cnn, ["device.price.unit=1USD"]).reasons == ()
