"""Headline results of papers: words become setups, and predictions are of the right size."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="capture needs torch")

import paceline.bench
from paceline.bench.validate.case import csv_rows, find
from paceline.bench.validate.literature import COLUMNS, cluster, literature, recalled, setup, why

FOLDER = Path(paceline.bench.__path__[0]) / "data"


@pytest.fixture(scope="module")
def rows():
    return {
        row["case_id"]: row
        for row in csv_rows(find(FOLDER / "published", "literature_scaling_results.csv"), COLUMNS)
    }


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("lit_0001", ("resnet50", "p100-sxm", 256, 32, 6.25e9, 8)),
        ("lit_0005", ("resnet50", "p100-sxm", 1024, 32, 7e9, 1)),
        ("lit_0012", ("resnet50", "p40", 2048, 32, 12.5e9, 1)),
        ("lit_0015", ("googlenet", "k20x", 128, 8, 6e9, 1)),
        ("lit_0020", ("vgg16", "haswell-cori", 256, 1, 10.2e9, 1)),
        ("lit_0022", ("vgg11", "haswell-cori", 128, 2, 10.2e9, 1)),
        ("lit_0026", ("vgg16", "p100-pcie", 512, 64, 3.125e9, 1)),
    ],
)
def test_words_become_setups(rows, case, expected):
    s = setup(rows[case])
    assert (s.model, s.device, s.count, s.batch, s.node_Bps, s.base_count) == expected
    made = cluster(s, s.count)
    assert made.device_count == s.count and made.tiers[-1].network


@pytest.mark.parametrize(
    ("case", "reason"),
    [("lit_0017", "NiN is not"), ("lit_0008", "hardware not in"), ("lit_0031", "not a vision model")],
)
def test_rows_without_a_setup_say_why(rows, case, reason):
    assert reason in setup(rows[case])


def test_lee_overlaps_and_others_do_not(rows):
    assert setup(rows["lit_0020"]).plan == "overlap" and setup(rows["lit_0001"]).plan == ""


def test_every_predicted_paper_has_a_remark(rows):
    for case in literature(FOLDER, False):
        assert case.skip or why(case.name), case.name


def test_recalled_rows_are_of_the_right_size():
    """TernGrad's three and two times, by our own model, within a third."""
    for case in list(recalled())[:2]:
        answer = case.predict()["speedup"]
        assert (
            answer.value == pytest.approx(case.measured["speedup"], rel=0.34)
            and answer.low < answer.value < answer.high
        )
