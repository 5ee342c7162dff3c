"""Answers for people: in a terminal of any width and in a notebook."""

from html.parser import HTMLParser

import pytest
from rich.console import Console

pytest.importorskip("torch", reason="capture needs torch")

import paceline as pl


@pytest.fixture(scope="module")
def fits():
    return pl.predict("gpt2-124m", "h200", batch=4, seq=128, precision="amp_bf16")


@pytest.fixture(scope="module")
def too_large():
    return pl.predict("vit_l_16", "t4", batch=256)


def rendered(thing, width=160):
    console = Console(width=width)
    with console.capture() as shown:
        console.print(thing)
    return shown.get()


def test_terminal(fits):
    text = rendered(fits)
    first, answer, bottleneck, *_ = text.splitlines()
    assert first == "gpt2-124m on h200, batch 4, sequence 128, amp_bf16, adamw"
    assert "per step  (90 %:" in answer and "tokens/s" in answer and "% of peak" in answer
    assert bottleneck.startswith(f"bottleneck: {fits.bound_by}: ")
    for expected in (
        "where the time goes",
        "matrix products",
        "fused attention",
        "memory: ",
        "optimizer 996 MB",
        "rests on:",
        "datasheet",
    ):
        assert expected in text
    assert "does not fit" not in text


def test_terminal_says_what_would_make_it_fit(too_large):
    text = rendered(too_large)
    assert "does not fit: needs" in text and "with batch" in text and "with --checkpointing" in text
    offers = [line.rstrip() for line in text.splitlines() if line.startswith("  with ")]
    assert len(offers) == len(too_large.fit.remedies) and all(
        line.endswith((", fits", ", still too much")) for line in offers
    )


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(fits, too_large, width):
    for prediction in (fits, too_large):
        assert max(map(len, rendered(prediction, width).splitlines())) <= width


def test_the_bar_has_one_length(fits, too_large):
    bars = [
        line.strip()
        for p in (fits, too_large)
        for line in rendered(p).splitlines()
        if line.strip() and set(line) <= set("█░ ")
    ]
    assert len(bars) == 2 and all(46 <= len(bar) <= 51 for bar in bars)  # each kind's share is rounded


class Checked(HTMLParser):
    """Collects text, and fails on tags that do not close in order."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(html):
    parser = Checked()
    parser.feed(html)
    assert not parser.open
    return "".join(parser.text)


def test_html(fits, too_large):
    text = read(fits._repr_html_())
    assert (
        "gpt2-124m on h200" in text
        and "per step (90 %:" in text
        and "matrix products" in text
        and "does not fit" not in text
    )
    assert "<script" not in fits._repr_html_()
    assert "does not fit: needs" in read(too_large._repr_html_())


def test_html_escapes_names():
    import torch

    workload = pl.capture((torch.nn.Linear(2, 2), torch.randn(1, 2)))
    object.__setattr__(workload, "name", "<b>&'")
    assert "<b>&'" in read(pl.predict(workload, "h200")._repr_html_())


def test_html_of_many_devices():
    p = pl.predict("llama3-8b", "tp=2 pp=4 gbs=32 mbs=1", "2xdgx-h100")
    text = read(p._repr_html_())
    for expected in (
        "llama3-8b on 2xdgx-h100, 16 devices: ",
        "per step (90 %:",
        "pipeline bubble",
        "exposed communication",
        "stage",
        "backward",
    ):
        assert expected in text
    assert p._repr_html_().count("<tr>") >= 4 + len([part for part in p.breakdown if part.share >= 0.001])
