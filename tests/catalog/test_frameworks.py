"""Frameworks as files: what is inherited, what is refused."""

from dataclasses import fields

import pytest

import paceline as pl
from paceline.catalog import frameworks
from paceline.errors import PlanError, SpecError, UnknownName
from paceline.spec.framework import Framework


@pytest.mark.parametrize("name", frameworks.names())
def test_every_file_is_complete(name):
    found = frameworks.get(name)
    assert found.name == name and found.title and found.source
    assert found.kind in ("derived", "fitted", "measured")


def test_a_file_takes_the_rest_from_the_one_it_is_like(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nlike = "nemo"\nsource = "my code"\n[step]\ndp_overlap = false\n')
    mine, base = frameworks.get(str(path)), frameworks.get("nemo")
    differ = {f.name for f in fields(Framework) if getattr(mine, f.name) != getattr(base, f.name)}
    assert differ == {"name", "title", "kind", "source", "dp_overlap"}
    slow, fast = (
        pl.predict("gpt2-1.5b", plan=f"gbs=64 framework={f}", cluster="8xdgx-h100").step_s
        for f in (path, "nemo")
    )
    assert slow > fast


@pytest.mark.parametrize(
    "name", [name for name in frameworks.names() if frameworks.get(name).runs != "modules"]
)
def test_every_framework_runs_a_transformer(name):
    p = pl.predict("gpt2-124m", plan=f"fsdp gbs=64 framework={name}", cluster="2xdgx-h100")
    assert 0 < p.step_s_low < p.step_s < p.step_s_high and p.memory.peak_bytes > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("contention = 1.0", "below 1"),
        ("dp_overlp = false", "did you mean 'dp_overlap'"),
        ("dp_overlap = 3", "expected bool"),
        ("slack = -1.0", "zero or more"),
        ("slack = true", "expected float"),
        ('runs = "all"', "not one of transformers"),
        ("slack = nan", "zero or more"),
    ],
)
def test_what_a_field_cannot_be_is_said_with_its_line(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "mine"\nlike = "nemo"\n[step]\n{text}\n')
    with pytest.raises(SpecError, match=message) as raised:
        frameworks.get(str(path))
    assert "line 4" in str(raised.value) and "\n" not in str(raised.value)


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(UnknownName, match="megatron-core"):
        frameworks.get("megatron-cor")


def test_a_framework_runs_what_it_is_described_for():
    with pytest.raises(PlanError, match="transformers only"):
        pl.predict("resnet18", plan="framework=nemo", cluster="1xdgx-h100", batch=2, image=64)
    with pytest.raises(PlanError, match="modules only"):
        pl.predict("gpt2-1.5b", plan="framework=horovod", cluster="1xdgx-h100")


def test_a_framework_is_given_once():
    with pytest.raises(SpecError, match="not both"):
        pl.predict("gpt2-1.5b", plan="framework=nemo", cluster="1xdgx-h100", framework="torch")
