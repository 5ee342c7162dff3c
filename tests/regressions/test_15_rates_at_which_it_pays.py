"""`compare --break-even` and the table beside it agree: what gains at some rate does not pay at "no rate"."""

import math
from dataclasses import replace

import pytest

from paceline.cli import main
from paceline.spec.synchronisation import PLAIN
from paceline.spec.whatif import BreakEven
from paceline.whatif.compare import find_break_even
from paceline.whatif.edits import Edit, apply
from paceline.whatif.subject import Subject

WORDS = (
    "overlap",
    "terngrad",
    "dgc",
    "local-sgd",
    "diloco",
    "ps-sync",
    "ps-async",
    "easgd",
    "gossip",
    "priority",
)
#: factors of the cluster's rate, and the logarithm of the gain that counts as one
FACTORS, PAYS = [10.0**power for power in (-4, -3, -2, -1, 0, 1, 2, 3)], 1e-3
CLUSTER = "4x1xv100-sxm-16gb@10Gb/s"


def subject(words):
    return Subject.of("vgg11", CLUSTER, words, batch=8)


def gain(which, factor):
    """Logarithm of the throughput over that of the plan without the relaxation."""
    plain = replace(which, plan=replace(which.plan, relax=PLAIN))
    edit = Edit(path="network.network.bandwidth", value=f"x{factor!r}")
    slow, fast = (apply(s, [edit]).predict() for s in (plain, which))
    return math.log(fast.throughput / slow.throughput)


def inside(found, rate):
    return any((low is None or low < rate) and (high is None or rate < high) for low, high in found.ranges)


@pytest.mark.parametrize("words", WORDS)
def test_the_ranges_are_where_it_gains(words):
    which = subject(words)
    found = find_break_even(which)
    rate = which.cluster.tiers[-1].bandwidth_Bps
    for factor in FACTORS:
        assert inside(found, factor * rate) == (gain(which, factor) > PAYS), factor
    assert found.always == all(gain(which, factor) > PAYS for factor in FACTORS)


def test_what_pays_on_fast_networks_only_says_so(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "vgg16", "--cluster", "8xp100-node-10gbe", "--plans", "ddp,gossip", "--break-even"])
    said = capsys.readouterr().out
    assert "above" in said and "no rate" not in said


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        (((None, None),), "any rate"),
        ((), "no rate"),
        (((None, 1.25e9),), "below 10 Gb/s"),
        (((1.25e9, None),), "above 10 Gb/s"),
        (((1.25e8, 1.25e9),), "1 Gb/s to 10 Gb/s"),
        (((None, 1.25e8), (1.25e9, None)), "below 1 Gb/s and above 10 Gb/s"),
    ],
)
def test_in_words(ranges, words):
    from paceline.report.whatif import _even

    assert _even(BreakEven(ranges=ranges)) == words
