"""Prices carry a date that answers with money say; `plan` takes --price; a missing price is said."""

import datetime
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

import paceline as pl
from paceline import cli
from paceline.catalog import clusters, devices
from paceline.cost import money
from paceline.cost.money import price
from paceline.errors import SpecError
from paceline.spec import device as spec

#: the catalog has a price of the one, and none of the other
PRICED, UNPRICED = "1xdgx-h100", "1xdgx-h200"
DOLLAR = ("--price", "1USD/h")
PLAN = ("--gbs", "64", "--fix", "dp=8", "--top", "1")
CHIP = """peak = {{ bf16 = "1 PFLOP/s" }}
memory = {{ size = "80 GB", bandwidth = "3 TB/s" }}
price = {{ hour = {} }}
"""
TODAY = datetime.date(2026, 11, 19)
#: how old the price of July 2023 is on the day of the test
AGE = money.as_of("2023-07").removeprefix(" as of 2023-07, ")
MISSING = "no price is known of h200; give it as"


def run(capsys, *words):
    """What a command prints, on one line: output, then errors; and its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    found = capsys.readouterr()
    return " ".join((found.out + found.err).split()), ended.value.code or 0


def chip(hour):
    return spec.parse(CHIP.format(hour), "chip.toml", devices.get)


def test_every_price_of_the_catalog_has_a_date():
    priced = [device for name in devices.names() if (device := devices.get(name)).price_per_s is not None]
    assert len(priced) > 10
    for device in priced:
        assert getattr(device.facts["price.hour"], "date", "")[:2] == "20", device.name
        assert price(device).date == device.facts["price.hour"].date


@pytest.mark.parametrize("date", ["2023", "2023-07", "2023-07-26"])
def test_a_date_is_a_year_a_month_or_a_day(date):
    assert price(chip(f'{{ value = "2 USD/h", date = "{date}" }}')).date == date
    assert price(chip('"2 USD/h"')).date == ""


@pytest.mark.parametrize("date", ['"July 2023"', '"2023-13"', '"2023-7"', "2023", "2023-07-26"])
def test_another_date_is_refused(date):
    with pytest.raises(SpecError, match=r"chip.toml: line 3, price.hour: date: expected a year, month"):
        chip(f'{{ value = "2 USD/h", date = {date} }}')


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "gpt2", "--cluster", PRICED, "--plan", "gbs=64", "--tokens", "1B"),
        ("plan", "gpt2", "--cluster", PRICED, *PLAN, "--tokens", "1B"),
        ("plan", "gpt2", "--cluster", PRICED, *PLAN, "--objective", "cost"),
        (
            "plan",
            "gpt2",
            "--cluster",
            f"{PRICED},2xdgx-h100",
            "--gbs",
            "64",
            "--fix",
            "tp=1",
            "--tokens",
            "1B",
        ),
    ],
)
def test_money_says_of_what_date_its_price_is(words, capsys):
    text, code = run(capsys, *words)
    assert code == 0 and text.count(f"price 12.29 USD/h a device as of 2023-07, {AGE} [AWS") == 1
    text, code = run(capsys, *words, "--price", "2.5USD/h")
    assert code == 0 and text.count("price 2.5 USD/h a device [--price]") == 1 and "12.29" not in text


def test_a_price_that_is_given_is_what_counts(capsys):
    def plan(where, *more):
        words = ("plan", "gpt2", "--cluster", where, *PLAN, "--tokens", "1B", "--json", *more)
        return json.loads(run(capsys, *words)[0])

    catalog, given, elsewhere = plan(PRICED), plan(PRICED, *DOLLAR), plan(UNPRICED, *DOLLAR)
    assert catalog["price"]["date"] == "2023-07" and catalog["price"]["usd_per_hour"] == pytest.approx(12.29)
    assert given["price"].pop("usd_per_hour") == pytest.approx(1)
    assert given["price"] == {"kind": "declared", "source": "--price", "date": None}
    assert given["best"]["job_cost"] == pytest.approx(catalog["best"]["job_cost"] / 12.29)
    assert elsewhere["best"]["job_cost"] == pytest.approx(8 * elsewhere["best"]["job_s"] / 3600)
    same = pl.plan("gpt2", PRICED, gbs=64, fix=["dp=8"], tokens="1B", price_per_s="1USD/h")
    assert same.best.cost == pytest.approx(given["best"]["cost_per_step"])
    with pytest.raises(SpecError, match="a price is above zero"):
        pl.plan("gpt2", PRICED, gbs=64, price_per_s=0)


def test_the_cheapest_plan_of_a_device_without_a_price(capsys):
    text, code = run(capsys, "plan", "gpt2", "--cluster", UNPRICED, *PLAN, "--objective", "cost", *DOLLAR)
    assert code == 0 and "price 1 USD/h a device" in text
    for flag in (("--objective", "cost"), ("--pareto", "time,cost")):
        text, code = run(capsys, "plan", "gpt2", "--cluster", UNPRICED, *PLAN, *flag)
        assert code == 2 and "h200 has no price; give --price, such as --price 2.5USD/h" in text


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "gpt2", "--cluster", UNPRICED, "--plan", "gbs=64", "--tokens", "1B"),
        ("plan", "gpt2", "--cluster", UNPRICED, *PLAN, "--tokens", "1B"),
        ("plan", "gpt2", "--cluster", f"{UNPRICED},{PRICED}", *PLAN, "--tokens", "1B"),
    ],
)
def test_answers_without_a_price_say_so(words, capsys):
    text, code = run(capsys, *words)
    assert code == 0 and text.count(f"{MISSING} --price, such as --price 2.5USD/h") == 1


def test_plain_data_of_predictions_says_what_its_money_rests_on():
    priced = pl.predict("gpt2", cluster=PRICED, plan="gbs=8")
    assert priced.price.startswith(f"12.29 USD/h a device as of 2023-07, {AGE} [AWS")
    unknown = pl.predict("gpt2", cluster=UNPRICED, plan="gbs=8").to_dict()
    assert unknown["cost_per_unit"] is None and unknown["price"].startswith(MISSING)


def test_all_devices_of_a_cluster_take_a_price():
    mixed = replace(clusters.get("2xdgx-h100"), mix=((devices.get("h200"), 1),)).priced(1 / 3600)
    assert {device.price_per_s for device, _ in mixed.devices} == {1 / 3600}


def test_a_study_takes_a_price(tmp_path, capsys):
    study = tmp_path / "study.toml"
    study.write_text(
        'models = ["gpt2"]\nclusters = ["1xdgx-h200"]\ngbs = [64]\nfix = ["dp=8"]\n'
        'tokens = 1e9\nprice_per_s = "2.5USD/h"\n'
    )
    text, code = run(capsys, "plan", str(study))
    assert code == 0 and "price 2.5 USD/h a device [--price]" in text


def test_devices_show_the_date(capsys):
    assert f"12.29 USD/h as of 2023-07, {AGE}" in run(capsys, "devices", "h100-sxm")[0]
    [found] = json.loads(run(capsys, "devices", "h100-sxm", "--json")[0])
    assert found["facts"]["price.hour"]["date"] == "2023-07" and "date" not in found["facts"]["peak.bf16"]


@pytest.mark.parametrize(
    ("date", "said"),
    [
        ("", ""),
        ("2026-11", " as of 2026-11"),
        ("2026-10-30", " as of 2026-10-30, 1 month old"),
        ("2025-01", " as of 2025-01, 22 months old"),
        ("2023", " as of 2023, 3 years old"),
        ("2027-01", " as of 2027-01"),
    ],
)
def test_a_date_comes_with_its_age(date, said, monkeypatch):
    monkeypatch.setattr(money, "datetime", SimpleNamespace(date=SimpleNamespace(today=lambda: TODAY)))
    assert money.as_of(date) == said


def test_an_option_of_a_plan_that_is_misspelt_brings_the_nearest():
    with pytest.raises(SpecError, match="plan: unknown option 'price'; did you mean 'price_per_s'"):
        pl.plan("gpt2", PRICED, price=4)
