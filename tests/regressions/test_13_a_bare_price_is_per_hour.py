"""A price without a unit is in USD per device-hour."""

import json

import pytest

from paceline import units
from paceline.catalog import devices
from paceline.cli import main
from paceline.spec.device import parse

JOB = (
    "predict",
    "gpt3-1.3b",
    "--cluster",
    "1xdgx-h100",
    "--plan",
    "gbs=64 mbs=1",
    "--tokens",
    "1G",
    "--json",
)


def money(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main([*JOB, *words])
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out)["job"]


def test_on_the_command_line(capsys):
    bare, hourly = money(capsys, "--price", "4"), money(capsys, "--price", "4USD/h")
    assert bare["money"] == hourly["money"]
    assert bare["money"]["value"] == pytest.approx(4 * bare["device_hours"]["value"])


def test_everywhere_that_a_price_is_read():
    assert units.parse("4", "price_rate") == units.parse(4, "price_rate") == pytest.approx(4 / 3600)
    assert units.parse("1 USD/s", "price_rate") == 1.0
    text = 'name = "mine"\nlike = "h200"\n[price]\nhour = 4\n'
    assert parse(text, "mine.toml", devices.get).price_per_s == pytest.approx(4 / 3600)


@pytest.mark.parametrize("command", ["predict", "plan"])
def test_help_says_so(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "USD per device-hour" in said
