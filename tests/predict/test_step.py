"""A prediction as a whole: what it contains, that it adds up, and that better hardware is never worse."""

import json
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="capture needs torch")

import paceline as pl
from paceline.errors import SpecError
from paceline.predict.step import Conditions, predict
from paceline.spec.device import parse
from paceline.spec.workload import Workload

CASES = {
    "cnn": ("resnet18", {"batch": 16, "image": 64, "precision": "amp_bf16"}),
    "plain": ("resnet18", {"batch": 16, "image": 64}),
    "lm": ("gpt2-124m", {"batch": 8, "seq": 256, "precision": "amp_bf16"}),
    "depthwise": ("mobilenet_v2", {"batch": 4, "image": 64, "precision": "fp16"}),
    "rnn": ("lstm-650", {"batch": 4, "seq": 8}),
    "tables": ("dlrm-small", {"batch": 64}),
    "vit": ("vit_b_16", {"batch": 4, "precision": "tf32"}),
}
cases = st.sampled_from(list(CASES))
named = st.sampled_from(
    ["h200", "b200", "a100-sxm-80gb", "rtx3090", "v100-sxm-16gb", "t4", "p100-pcie", "mi300x", "tpu-v5e"]
).map(pl.devices.get)


@cache
def captured(case, **changes):
    model, options = CASES[case]
    return pl.capture(model, **{**options, **changes})


@given(
    cases,
    named,
    st.floats(1, 8),
    st.sampled_from(["memory_bandwidth_Bps", "peak_flops", "l2_bytes", "clock_hz"]),
)
def test_a_better_device_is_never_slower(case, device, factor, what):
    value = getattr(device, what)
    if value is None:
        return
    better = replace(
        device,
        **{what: {k: v * factor for k, v in value.items()} if what == "peak_flops" else value * factor},
    )
    one, other = predict(captured(case), device), predict(captured(case), better)
    assert other.step_s <= one.step_s * (1 + 1e-9) and other.kernel_s <= one.kernel_s * (1 + 1e-9)


@given(cases, named, st.floats(0, 1))
def test_fewer_bytes_are_never_slower(case, device, share):
    def lighter(op):
        if op.kind == "cast":  # which kernel casts follows from the bytes
            return op
        return replace(
            op,
            reads=tuple(replace(a, bytes=int(a.bytes * share)) for a in op.reads),
            writes=tuple(replace(a, bytes=int(a.bytes * share)) for a in op.writes),
        )

    workload = captured(case)
    less = replace(
        workload, segments=tuple(replace(s, ops=tuple(map(lighter, s.ops))) for s in workload.segments)
    )
    assert predict(less, device).step_s <= predict(workload, device).step_s * (1 + 1e-9)


@settings(max_examples=15)
@given(cases, named, st.integers(0, 3))
def test_twice_the_batch_is_never_faster(case, device, power):
    one, other = (predict(captured(case, batch=2**p), device) for p in (power + 1, power + 2))
    assert other.step_s >= one.step_s * (1 - 1e-9) and other.kernel_s >= one.kernel_s * (1 - 1e-9)
    assert other.peak_bytes >= one.peak_bytes and other.flops == pytest.approx(2 * one.flops, rel=0.01)


@given(cases, named, st.floats(0.1, 10))
def test_a_slower_host_is_never_faster(case, device, factor):
    one, other = (
        predict(captured(case), device, Conditions(host_speed=1 / scale)).step_s
        for scale in sorted((1.0, factor))
    )
    assert other >= one * (1 - 1e-9)


@given(cases, named)
def test_it_adds_up(case, device):
    workload = captured(case)
    p = predict(workload, device)
    assert 0 < p.step_s_low < p.step_s < p.step_s_high and 0 < p.kernel_s_low < p.kernel_s < p.kernel_s_high
    assert sum(part.seconds for part in p.breakdown) == pytest.approx(p.kernel_s)
    assert sum(part.share for part in p.breakdown) == pytest.approx(1) and sum(
        p.phases.values()
    ) == pytest.approx(p.kernel_s)
    assert sum(part.flops for part in p.breakdown) == pytest.approx(workload.flops) == p.flops
    assert [part.seconds for part in p.breakdown] == sorted(
        (part.seconds for part in p.breakdown), reverse=True
    )
    assert {part.bound_by for part in p.breakdown} <= {"compute", "memory", "latency"}
    assert p.bound_by in {"compute", "memory", "latency", "host"} and 0 < p.mfu < 1
    assert p.throughput == pytest.approx(workload.units_per_step / p.step_s)
    # parallel streams within a recurrent layer overlap
    assert p.step_s >= max(0.999 * p.host_s, 0.5 * p.kernel_s)
    assert sum(p.memory.by_kind.values()) == p.peak_bytes == p.memory.peak_bytes
    assert p.memory.by_kind["parameters"] >= sum(parameter.bytes for parameter in workload.parameters)
    assert {e.kind for e in p.provenance} <= {
        "measured",
        "datasheet",
        "fitted",
        "derived",
        "declared",
        "guessed",
    }
    assert p.timeline is None


@pytest.mark.parametrize("case", CASES)
def test_a_saved_workload_predicts_the_same(case, tmp_path):
    captured(case).save(tmp_path / "w.json")
    assert predict(Workload.load(tmp_path / "w.json"), pl.devices.get("a100")) == predict(
        captured(case), pl.devices.get("a100")
    )


def test_fields_of_the_json():
    p = pl.predict(captured("lm"), "h200")
    data = json.loads(json.dumps(p.to_dict()))
    wanted = (
        "step_s step_s_low step_s_high kernel_s throughput peak_bytes memory breakdown bound_by provenance"
        " fits"
    )
    assert set(wanted.split()) <= set(data)
    assert data["step_s"] == p.step_s and data["memory"] == dict(p.memory.by_kind) and data["fits"] is True
    assert {"name", "seconds", "share", "count", "bound_by", "flops"} <= set(data["breakdown"][0])
    assert {"what", "kind", "source"} <= set(data["provenance"][0]) and "timeline" not in data


def test_bound_by():
    bounds = {
        name: pl.predict(name, "h200", **options).bound_by
        for name, options in (
            ("resnet18", {"batch": 1}),
            ("llama3-8b", {"precision": "bf16", "seq": 4096}),
            ("dlrm-small", {"batch": 32768}),
        )
    }
    assert bounds == {"resnet18": "host", "llama3-8b": "compute", "dlrm-small": "memory"}


def test_what_does_not_fit_is_a_value_with_remedies():
    p = pl.predict("vit_l_16", "a100-sxm-40gb", batch=512)
    assert (
        not p.fit.fits and not p.memory.fits and p.fit.needed_bytes > p.fit.available_bytes and p.step_s > 0
    )
    remedies = dict(p.fit.remedies)
    smaller = next(name for name in remedies if name.startswith("batch "))
    taken = pl.predict("vit_l_16", "a100-sxm-40gb", batch=int(smaller.split()[1]))
    assert taken.fit.fits and taken.memory.reserved_bytes == pytest.approx(remedies[smaller], rel=0.05)
    assert pl.predict("vit_l_16", "a100-sxm-40gb", batch=512, checkpointing=True).fit.fits == (
        remedies["--checkpointing"] <= p.fit.available_bytes
    )


def test_less_is_known_of_an_unmeasured_device():
    def width(device):
        p = predict(captured("lm", batch=64), device)
        return p.kernel_s_high / p.kernel_s_low

    new = parse('name = "new"\nlike = "h200"\narchitecture = "unheard-of"\n', "new.toml", pl.devices.get)
    assert width(pl.devices.get("h200")) < width(new)


def test_provenance_names_sources_and_guesses():
    text = (
        'name = "new"\n[peak]\nbf16 = "2 PFLOP/s"\nfp32 = "80 TFLOP/s"\n[memory]\nsize = "192 GB"\nbandwidth'
        ' = "8 TB/s"\n'
    )
    known, new = (
        predict(captured("lm"), d).provenance
        for d in (pl.devices.get("h200"), parse(text, "new.toml", pl.devices.get))
    )
    assert any(e.kind == "datasheet" and "H200" in e.source for e in known) and not any(
        e.kind == "guessed" for e in known
    )
    assert [e.what for e in new if e.kind == "guessed"] == [
        "new chip.clock",
        "new chip.sms",
        "new cache.l2",
        "new power limit of matrix units",
        "never measured: operators of architecture generic",
    ]
    assert any(e.kind == "declared" and e.source == "new.toml" for e in new)
    assert any(e.kind == "fitted" for e in known) and any("captured with" in e.source for e in known)


def test_options_of_a_captured_workload_are_fixed(tmp_path):
    captured("cnn").save(tmp_path / "w.json")
    assert pl.predict(str(tmp_path / "w.json"), "h200").batch == 16
    with pytest.raises(SpecError, match="captured workload, whose batch is fixed"):
        pl.predict(str(tmp_path / "w.json"), "h200", batch=2)
