"""Schedules of recomputation: the optimal ones against all there are, on chains small enough to list them."""

import itertools
import math
import random

import pytest

from paceline.cost.recompute_schedules import ChainLink, ChainSpan, OptimalSchedules, all_pieces, square_root


def link(**changes):
    usual = {
        "forward_s": 1.0,
        "backward_s": 2.0,
        "saved": 4,
        "output": 1,
        "bare": 2,
        "forward_extra": 0,
        "backward_extra": 1,
    }
    return ChainLink(**{**usual, **changes})


def uniform(count):
    return [link() for _ in range(count)]


def schedules(chain, first, last, top=True):
    """Every schedule of links from `first` to `last`: ("keep", i), ("select", i), ("span", i, k, inner)."""
    if first > last:
        yield ()
        return
    for rest in schedules(chain, first + 1, last, top):
        yield (("keep", first), *rest)
        if top and math.isfinite(chain[first].selective):
            yield (("select", first), *rest)
    end = first
    while end < last and chain[first].spannable and chain[first].opens:
        if end > first and not (chain[end].follows and chain[end].spannable):
            break
        for rest in schedules(chain, end + 1, last, top):
            for inner in schedules(chain, first, end, False):
                if inner != (("span", first, end),):
                    yield (("span", first, end, inner), *rest)
        end += 1


def run(chain, schedule, live=0, beside=0):
    """(seconds, peak bytes) of both passes of a schedule, step by step."""
    seconds, peak, held = 0.0, 0, []
    for step in schedule:
        one = chain[step[1]]
        if step[0] == "span":
            before = 0
            for passed in chain[step[1] : step[2] + 1]:
                peak = max(peak, live + before + passed.bare + beside)
                seconds += passed.forward_s
                before = passed.output
            held.append(before)
            live += before
            continue
        held.append(one.saved if step[0] == "keep" else one.selective)
        peak = max(peak, live + held[-1] + one.forward_extra + beside)
        live += held[-1]
        seconds += one.forward_s
    for step, size in zip(reversed(schedule), reversed(held), strict=True):
        live -= size
        if step[0] == "span":
            behind = sum(other.gradients for other in chain[step[2] + 1 :])
            inner = run(chain, step[3], live, behind + chain[step[2]].output)
            seconds, peak = seconds + inner[0], max(peak, inner[1])
            continue
        one = chain[step[1]]
        gradients = sum(other.gradients for other in chain[step[1] :])
        peak = max(peak, live + one.saved + one.backward_extra + gradients)
        seconds += one.backward_s + (one.selective_s if step[0] == "select" else 0.0)
    return seconds, peak


def any_chain(seed):
    draw = random.Random(seed)
    return [
        link(
            forward_s=float(draw.randint(1, 5)),
            backward_s=float(draw.randint(1, 5)),
            saved=draw.randint(2, 9),
            output=draw.randint(1, 3),
            bare=draw.randint(1, 4),
            forward_extra=draw.randint(0, 2),
            backward_extra=draw.randint(0, 4),
            gradients=draw.randint(0, 2),
            selective=draw.choice([math.inf, draw.randint(1, 3)]),
            selective_s=0.5,
            spannable=draw.random() < 0.8,
            opens=draw.random() < 0.9,
            follows=draw.random() < 0.9,
        )
        for _ in range(5)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_optimal_is_the_best_of_all_schedules(seed):
    chain = any_chain(seed)
    every = [run(chain, schedule) for schedule in schedules(chain, 0, len(chain) - 1)]
    most = 80
    found = OptimalSchedules(chain, most, steps=most)
    assert found.least() == min(peak for _, peak in every)
    for memory in range(int(found.least()) - 2, most + 1):
        best = min((seconds for seconds, peak in every if peak <= memory), default=math.inf)
        assert found.seconds(memory) == pytest.approx(best)


def tree(spans, first, last):
    """The schedule that spans stand for."""
    out, at = [], first
    while at <= last:
        mine = [span for span in spans if span.first == at and span.last <= last]
        outer = max(mine, key=lambda span: span.last, default=None)
        if outer is None:
            out.append(("keep", at))
            at += 1
        elif outer.selective:
            out.append(("select", at))
            at += 1
        else:
            within = [s for s in spans if s != outer and outer.first <= s.first and s.last <= outer.last]
            out.append(("span", at, outer.last, tree(within, at, outer.last)))
            at = outer.last + 1
    return tuple(out)


@pytest.mark.parametrize("seed", range(12))
def test_spans_are_the_schedule_that_was_counted(seed):
    chain = any_chain(seed)
    found = OptimalSchedules(chain, 80, steps=80)
    for memory in range(int(found.least()), 81, 3):
        seconds, peak = run(chain, tree(found.spans(memory), 0, len(chain) - 1))
        assert seconds == pytest.approx(found.seconds(memory)) and peak <= memory


def test_a_long_chain_fits_into_little_more_than_its_largest_link():
    chain = uniform(32)
    everything = sum(one.saved for one in chain)
    found = OptimalSchedules(chain, everything + 2, steps=everything + 2)
    assert found.seconds(everything + 2) == 96.0
    # one more forward pass of nearly the whole chain halves its memory many times over
    assert found.seconds(40) < 96 + 32 and found.least() < 12
    times = [found.seconds(m) for m in range(int(found.least()), everything)]
    assert times == sorted(times, reverse=True)


def test_square_root_leaves_the_last_piece_out():
    spans = square_root(uniform(16))
    assert spans == (ChainSpan(0, 3), ChainSpan(4, 7), ChainSpan(8, 11))
    assert all_pieces(uniform(5), 2) == (ChainSpan(0, 1), ChainSpan(2, 3), ChainSpan(4, 4))


def test_pieces_end_where_modules_do_not_follow_one_another():
    chain = uniform(6)
    chain[2] = link(spannable=False)
    chain[4] = link(follows=False)
    assert all_pieces(chain, 9) == (ChainSpan(0, 1), ChainSpan(3, 3), ChainSpan(4, 5))
    chain[3] = link(opens=False)
    assert all_pieces(chain, 9) == (ChainSpan(0, 1), ChainSpan(4, 5))


def test_no_schedule_is_no_time():
    found = OptimalSchedules(uniform(3), 4, steps=4)
    assert math.isinf(found.least()) and math.isinf(found.seconds(4)) and found.spans(4) == ()


def test_schedules_listed_here_are_distinct():
    chain = uniform(4)
    every = list(schedules(chain, 0, 3))
    assert len(every) == len(set(every)) > 20
    assert any(step[0] == "span" and len(step[3]) == 2 for step in itertools.chain(*every))
