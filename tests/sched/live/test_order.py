"""What users write, and what they are told when it is wrong."""

import pytest

from paceline.errors import SpecError
from paceline.sched.live import Order, read

GOOD = {"name": "a", "command": ["true"], "seconds": "2 h", "devices": 2, "least": 1, "most": 4}


def test_a_length_becomes_a_speed(tmp_path):
    job = Order.of(GOOD, tmp_path).job(("a100",))
    assert job.work == 7200 and job.speed.rate((2,), "a100", 0, False) == 1
    assert 1.95 > job.speed.rate((4,), "a100", 0, False) / job.speed.rate((2,), "a100", 0, False) > 1.5
    steps = Order.of({**GOOD, "work": 720}, tmp_path).job(("a100",))
    assert steps.work == 720 and steps.speed.rate((2,), "a100", 0, False) == pytest.approx(0.1)


def test_rates_are_for_every_kind(tmp_path):
    order = Order.of({"name": "a", "command": "true", "work": 10, "rates": {"1": 2.0, "2": 3.0}, "most": 2}, tmp_path)
    job = order.job(("a100", "cpu"))
    assert job.speed.rate((1, 1), "cpu", 0, False) == 3 and job.least == 1
    assert Order.of(order.given, tmp_path / "elsewhere") == order, "what is stored reads as the same"


@pytest.mark.parametrize(("change", "message"), [
    ({"name": "a b"}, "a name has up to 64 letters"),
    ({"name": "../a"}, "a name has up to 64 letters"),
    ({"comand": "x"}, "unknown key 'comand'; did you mean 'command'"),
    ({"command": []}, "command must be a list of words or one line"),
    ({"command": "sh -c 'x"}, "No closing quotation"),
    ({"seconds": "2 parsecs"}, "unknown unit 'parsecs'"),
    ({"seconds": 0}, "seconds must be above zero"),
    ({"devices": 2.5}, "devices must be a whole number"),
    ({"devices": 9}, "sizes must satisfy"),
    ({"seconds": 5, "rates": {"1": 1}}, "give either rates"),
    ({"rates": {"one": 1}, "seconds": None}, "rates are written"),
    ({"rates": {"1": 0}, "seconds": None}, "rates are written"),
    ({"rates": {"1": 3}, "seconds": None}, "with rates goes work"),
    ({"rates": {"2": 3}, "seconds": None, "work": 5}, "no speed is known on 1 devices"),
    ({"environment": "A=1"}, "environment is written"),
])
def test_mistakes_are_one_line(tmp_path, change, message):
    given = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    with pytest.raises(SpecError, match=message) as error:
        Order.of(given, tmp_path, "jobs.toml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "message"), [
    ("[[job]]\nname = 'a'\ncommand = 'true'\nseconds = 1\n[[job]]\nname = 'a'\ncommand = 'true'\nseconds = 1\n", "two jobs are named 'a'"),
    ("name = ", "not valid TOML"),
    ("job = 3", "write one job at the top level"),
    ("x = 1\n[[job]]\nname = 'a'", "write one job at the top level"),
])
def test_files_that_are_wrong(tmp_path, text, message):
    path = tmp_path / "jobs.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        read(path)
    with pytest.raises(SpecError, match="cannot read job file"):
        read(tmp_path / "none.toml")


def test_one_job_at_the_top_level(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("name = 'a'\ncommand = 'python train.py'\nseconds = '3 min'\nfolder = 'here'\n")
    (order,) = read(path)
    assert order.command == ("python", "train.py") and order.folder == str(tmp_path / "here") and order.submit_s == 0
