"""Scenarios: what moving a control does, and what they are as a link and as a command."""

import json
import shlex
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from paceline.errors import PacelineError, SpecError
from paceline.web.controls import controls
from paceline.web.scenario import Scenario, Sources, sized, sizes_text, with_word

FIRST = Scenario(model="llama3-70b", cluster="16xdgx-h100", plan="fsdp tp=8 gbs=512")
SOURCES = Sources(uploads=Path("/nonexistent"))


def test_word_of_a_plan_takes_the_place_of_the_old_one():
    assert with_word("fsdp tp=8 gbs=512", "tp", "tp=4") == "fsdp gbs=512 tp=4"
    assert with_word("fsdp tp=8", "sharding", "zero1") == "tp=8 zero1"
    assert with_word("ddp dgc ratio=0.01 tp=2", "sync", "") == "ddp tp=2"
    assert with_word("ddp terngrad", "sync", "local-sgd") == "ddp local-sgd"
    assert with_word("tp=8 sp", "sp", "") == "tp=8"


def test_change_sets_and_takes_back_an_edit():
    wide = FIRST.changed("network.inter.bandwidth", "100GB/s").changed("nodes", "32")
    assert wide.edits == ("network.inter.bandwidth=100GB/s", "nodes=32")
    assert wide.changed("network.inter.bandwidth", "25GB/s").edits[0] == "network.inter.bandwidth=25GB/s"
    assert wide.changed("nodes", "").edits == ("network.inter.bandwidth=100GB/s",)
    assert wide.changed("cluster", "8xdgx-a100").edits == ()


def test_every_value_of_every_control_is_one_that_the_library_takes():
    for scenario in (FIRST, Scenario(model="mixtral-8x22b", cluster="8xdgx-a100", plan="pp=4 tp=8 gbs=64")):
        subject = SOURCES.subject(scenario)
        for control in controls(scenario, subject, subject):
            for value in {control.values[0], control.values[-1], control.values[control.at]}:
                moved = scenario.changed(control.path, value)
                assert SOURCES.subject(moved) is not None, (control.path, value)


def test_slider_stands_where_its_edit_put_it():
    for path, value in (
        ("network.inter.bandwidth", 3),
        ("device.memory.size", 30),
        ("nodes", 5),
        ("plan.gbs", 7),
    ):
        base = SOURCES.subject(FIRST)
        control = next(c for c in controls(FIRST, base, base) if c.path == path)
        moved = FIRST.changed(path, control.values[value])
        found = next(c for c in controls(moved, SOURCES.subject(moved), base) if c.path == path)
        assert found.at == value
        assert found.edited or path.startswith("plan.")


def test_link_and_command_hold_everything():
    scenario = FIRST.changed("nodes", "32").changed("budget", "1T")
    assert parse_qs(scenario.link()) == {
        "model": ["llama3-70b"],
        "cluster": ["16xdgx-h100"],
        "plan": ["fsdp tp=8 gbs=512"],
        "budget": ["1T"],
        "set": ["nodes=32"],
    }
    words = shlex.split(scenario.command())
    assert words[:3] == ["paceline", "whatif", "llama3-70b"] and words[-2:] == ["--set", "nodes=32"]
    assert shlex.split(FIRST.command())[1] == "predict"


def test_sizes_of_a_model_travel_as_text():
    model = SOURCES.subject(FIRST).model
    assert sized(sizes_text(model)) == model


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"layers": "many"}', '{"layers": 2}', '{"layers": true}', '{"what": 1}', '{"name": 3}'],
)
def test_wrong_sizes_are_one_clear_line(text):
    with pytest.raises(SpecError, match="model"):
        sized(text)


def test_long_and_many_texts_are_refused():
    with pytest.raises(SpecError, match="4000 characters"):
        Scenario(model="x" * 4001, cluster="")
    with pytest.raises(SpecError, match="64 edits"):
        Scenario(model="x", cluster="", edits=("nodes=1",) * 65)


def test_nothing_of_the_page_is_opened_as_a_file(tmp_path):
    model = tmp_path / "model.json"
    model.write_text(json.dumps({}))
    for scenario in (
        Scenario(model=str(model), cluster="dgx-h100"),
        Scenario(model="llama3-8b", cluster=f"2x{tmp_path}/pod.toml"),
        Scenario(model="llama3-8b", cluster="dgx-h100", edits=(f"device={tmp_path}/chip.toml",)),
    ):
        with pytest.raises(PacelineError, match="unknown model|would name a file"):
            SOURCES.subject(scenario)
