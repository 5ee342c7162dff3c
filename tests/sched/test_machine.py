"""The state machine: events in, decisions out, each with a reason; the log replays; a policy's mistakes are
one line.
"""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import SpecError, UnknownName
from paceline.sched import (
    ClusterShape,
    Ended,
    Job,
    NodeDown,
    NodeUp,
    Policy,
    Preempted,
    Report,
    ScaledSpeed,
    StateMachine,
    Submit,
    Tick,
    policies,
    replay,
)
from paceline.sched.decision import Resize, Start, Stop, devices
from paceline.sched.nodes import Nodes
from paceline.sched.placement import STRATEGIES
from paceline.sched.simulate import SimulationSettings, simulate


def job(name, seconds=100.0, devices=1, **more):
    return Job(
        name=name,
        work=seconds,
        speed=ScaledSpeed(devices, more.pop("overhead", 0.0)),
        devices=devices,
        **more,
    )


def test_start_end_and_reason():
    machine = StateMachine(ClusterShape.parse("1x2xv100"), policies.get("fifo"))
    [first] = machine.handle(Submit(time_s=0, job=job("a", devices=2)))
    assert isinstance(first, Start) and first.allocation == ((0, 2),) and first.reason == "first in the queue"
    assert machine.handle(Submit(time_s=1, job=job("b"))) == []
    [second] = machine.handle(Ended(time_s=50, name="a"))
    assert second.name == "b" and "\n" not in str(second)
    assert machine.state.jobs.keys() == {"b"} and machine.state.free == 1


def test_shorter_job_stops_a_longer_one():
    machine = StateMachine(ClusterShape.parse("1x1xv100"), policies.get("srtf"))
    machine.handle(Submit(time_s=0, job=job("long", 1000)))
    stop, start = machine.handle(Submit(time_s=100, job=job("short", 10)))
    assert (
        isinstance(stop, Stop) and stop.name == "long" and isinstance(start, Start) and start.name == "short"
    )
    assert machine.state.jobs["long"].done == pytest.approx(100 - 30)  # its restart took 30 s
    [again] = machine.handle(Ended(time_s=150, name="short"))
    assert again.name == "long" and machine.state.jobs["long"].restarts == 1


def test_a_checkpoint_takes_its_time_when_a_job_is_moved_not_when_it_crashes():
    jobs = [job("long", 1000, restart_s=30, checkpoint_s=20), job("short", 10, restart_s=0, submit_s=100)]
    ends = {
        done.name: done.end_s
        for done in simulate(jobs, ClusterShape.parse("1x1xv100"), policies.get("srtf")).done
    }
    assert ends == pytest.approx({"short": 110, "long": 110 + 20 + 30 + (1000 - 70)})
    machine = StateMachine(ClusterShape.parse("1x1xv100"), policies.get("srtf"))
    machine.handle(Submit(time_s=0, job=jobs[0]))
    machine.handle(Preempted(time_s=100, name="long", done=0.0))
    assert machine.state.jobs["long"].ready_s == 100 + 30


def test_rounds_ask_only_when_something_happened():
    machine = StateMachine(ClusterShape.parse("1x1xt4"), policies.get("las"))
    assert machine.handle(Submit(time_s=61, job=job("a"))) == [] and machine.wake_s == 120
    [start] = machine.handle(Tick(time_s=120))
    assert isinstance(start, Start)
    # the next round is when the job falls to the second level: 16 device-hours
    assert machine.wake_s == 120 + 16 * 3600


def test_node_down_and_up():
    machine = StateMachine(ClusterShape.parse("2x1xt4"), policies.get("fifo"))
    machine.handle(Submit(time_s=0, job=job("a", devices=2)))
    with pytest.raises(SpecError, match="preempted first"):
        machine.handle(NodeDown(time_s=1, node=1))
    machine.tell_quietly(Preempted(time_s=2, name="a", done=5.0))
    assert machine.handle(NodeDown(time_s=2, node=1)) == [] and machine.state.devices == 1
    [start] = machine.handle(NodeUp(time_s=9, node=1))
    assert devices(start.allocation) == 2 and machine.state.jobs["a"].done == 5.0


def test_report_corrects_what_is_believed():
    machine = StateMachine(ClusterShape.parse("1x1xt4"), policies.get("srtf"))
    machine.handle(Submit(time_s=0, job=job("a", 100)))
    machine.handle(Report(time_s=40, name="a", done=3.0))
    record = machine.state.jobs["a"]
    assert record.done_at(50) == pytest.approx(13.0) and record.attained_at(50) == 50


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([Submit(time_s=5, job=job("a")), Tick(time_s=1)], "in order of time"),
        ([Submit(time_s=0, job=job("a")), Submit(time_s=0, job=job("a"))], "submitted twice"),
        ([Ended(time_s=0, name="nobody")], "no job 'nobody'"),
        ([Submit(time_s=0, job=job("a", devices=9))], "needs 9 devices"),
    ],
)
def test_mistakes_of_a_driver(events, message):
    machine = StateMachine(ClusterShape.parse("1x2xt4"), policies.get("fifo"))
    with pytest.raises(SpecError, match=message):
        for event in events:
            machine.handle(event)


def test_mistakes_of_a_policy():
    class Twice(Policy):
        name = "twice"

        def decide(self, state):
            for record in list(state.jobs.values()):
                state.start(record, 1, "why not")

    machine = StateMachine(ClusterShape.parse("1x2xt4"), Twice())
    machine.handle(Submit(time_s=0, job=job("a")))
    with pytest.raises(SpecError, match="starts 'a', which is running"):
        machine.handle(Submit(time_s=0, job=job("b")))


@pytest.mark.parametrize(
    "policy",
    [
        "fifo",
        "easy",
        "srtf",
        "las",
        "gittins",
        "optimus",
        "marginal",
        "goodput",
        "maxmin",
        "gavel",
        "success",
    ],
)
def test_log_replays(policy):
    jobs = [
        job(f"j{i}", 50 + 37 * (i * 7 % 11), 1 + i % 3, submit_s=13.0 * i, least=1, most=8) for i in range(30)
    ]
    shape = ClusterShape.parse("2x4xt4")
    outcome = simulate(
        jobs, shape, policies.get(policy), SimulationSettings(node_mtbf_s=1500, node_repair_s=100), log=True
    )
    lines = [json.loads(json.dumps(entry.to_dict())) for entry in outcome.log]
    again = replay(lines, {j.name: j for j in jobs}, shape, policies.get(policy))
    assert [[d.to_dict() for d in batch] for batch in again] == [line["decisions"] for line in lines]
    assert sum(map(len, again)) == outcome.decisions >= 30
    assert all(d["reason"] for line in lines for d in line["decisions"])


@given(
    st.lists(st.tuples(st.floats(1, 500), st.integers(1, 8), st.floats(0, 300)), min_size=1, max_size=25),
    st.sampled_from(policies.names()),
    st.sampled_from(sorted(STRATEGIES)),
)
def test_every_job_ends_once_and_devices_suffice(rows, name, placement):
    """Whatever the policy and the placement, no device is given twice, every job ends, and none is faster
    than its work allows.
    """
    jobs = [
        job(f"j{i}", seconds, size, submit_s=at, least=1, most=8)
        for i, (seconds, size, at) in enumerate(rows)
    ]
    policy = policies.get(name)
    policy.placement = placement
    outcome = simulate(jobs, ClusterShape.parse("2x4xt4"), policy, gantt=True)
    assert sorted(d.name for d in outcome.done) == sorted(j.name for j in jobs)
    for done in outcome.done:
        assert done.end_s - done.submit_s >= 30 - 1e-6 and done.start_s >= done.submit_s
    edges = sorted({s.start_s for s in outcome.segments})
    for at in edges:
        held = [0] * 2
        for s in outcome.segments:
            if s.start_s <= at < s.end_s - 1e-9:
                for node, count in s.allocation:
                    held[node] += count
        assert max(held) <= 4


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 10)), max_size=40), st.sampled_from(sorted(STRATEGIES))
)
def test_nodes_are_consistent(steps, strategy):
    nodes = Nodes(ClusterShape.of([(3, 4, "t4")], rack_nodes=2))
    given_out = []
    for take, size in steps:
        if take:
            found = STRATEGIES[strategy](nodes, size, "t4")
            assert (found is None) == (size > nodes.free_devices)
            if found:
                assert sum(count for _, count in found) == size and len({node for node, _ in found}) == len(
                    found
                )
                nodes.take(found)
                given_out.append(found)
        elif given_out:
            nodes.give(given_out.pop(size % len(given_out)))
        held = [sum(c for a in given_out for n, c in a if n == node) for node in range(3)]
        assert [4 - h for h in held] == nodes.free and nodes.free_devices == 12 - sum(held)


def test_placements_differ_as_they_say():
    def place(strategy, taken, size):
        nodes = Nodes(ClusterShape.of([(4, 4, "t4")], rack_nodes=2))
        for allocation in taken:
            nodes.take(allocation)
        return STRATEGIES[strategy](nodes, size, "t4")

    taken = [((0, 1),), ((1, 2),)]
    assert place("consolidate", taken, 2) == ((1, 2),)
    assert place("widest", taken, 2) == ((2, 2),)
    assert sorted(place("spread", [], 4)) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert {n for n, _ in place("topology", [((0, 1),)], 6)} == {0, 1}
    busy = [((2, 2), (3, 2))]  # a job on two nodes
    assert {n for n, _ in place("quiet", busy, 8)} == {0, 1}


def test_resize_is_one_decision():
    machine = StateMachine(ClusterShape.parse("2x4xt4"), policies.get("marginal(interval_s=0,review_s=0)"))
    machine.handle(Submit(time_s=0, job=job("a", 10_000, 4, least=1, most=8, overhead=0.3)))
    assert machine.state.jobs["a"].devices == 8
    decisions = machine.handle(Submit(time_s=500, job=job("b", 10_000, 4, least=1, most=8, overhead=0.3)))
    assert {type(d) for d in decisions} == {Resize, Start}
    assert sum(r.devices for r in machine.state.running.values()) == 8


def test_policies_by_name_and_file(tmp_path):
    assert policies.get("las(interval_s=0)").interval_s == 0
    for text, message in (
        ("lass", "did you mean 'las'"),
        ("las(x=1)", "x"),
        ("las(", "parenthesis"),
        (f"{tmp_path}/p.py:P", "no file"),
    ):
        with pytest.raises((UnknownName, SpecError), match=message):
            policies.get(text)
    (tmp_path / "mine.py").write_text(
        "from paceline.sched import Policy\n\nclass Mine(Policy):\n    def decide(self, state):\n        for"
        " job in list(state.waiting.values()):\n            if state.fits(job.job.devices):\n               "
        " state.start(job, job.job.devices, 'it is next and fits')\n"
    )
    outcome = simulate(
        [job("a"), job("b")], ClusterShape.parse("1x1xt4"), policies.get(f"{tmp_path}/mine.py:Mine")
    )
    assert outcome.metrics()["avg_jct_s"] == pytest.approx(130 + 65)
    with pytest.raises(UnknownName, match="did you mean 'Mine'"):
        policies.get(f"{tmp_path}/mine.py:Mein")


def test_a_policy_that_starves_is_named():
    class Never(Policy):
        name = "never"

        def decide(self, state):
            pass

    with pytest.raises(SpecError, match="'never' leaves 1 jobs waiting for ever"):
        simulate([job("a")], ClusterShape.parse("1x1xt4"), Never())


def test_quotas_and_priorities():
    jobs = [job(f"q{i}", tenant="small") for i in range(4)] + [job("vip", priority=1, submit_s=1.0)]
    quota = policies.get("sjf", quotas={"small": 1})
    outcome = simulate(jobs, ClusterShape.parse("1x4xt4"), quota)
    ends = {d.name: d.end_s for d in outcome.done}
    assert [round(ends[f"q{i}"]) for i in range(4)] == [130, 260, 390, 520] and ends["vip"] == pytest.approx(
        131
    )
    first = simulate(
        [job("a"), job("b", submit_s=1), job("vip", priority=1, submit_s=2)],
        ClusterShape.parse("1x1xt4"),
        policies.get("sjf"),
    )
    assert [d.name for d in first.done] == ["a", "vip", "b"]


def test_backfill_does_not_delay_the_head():
    jobs = [
        job("wide", 1000, 3),
        job("head", 100, 4, submit_s=1),
        job("fits", 500, 1, submit_s=2),
        job("late", 2000, 1, submit_s=3),
    ]
    ends = {d.name: d for d in simulate(jobs, ClusterShape.parse("1x4xt4"), policies.get("easy")).done}
    assert (
        ends["fits"].start_s == 2
        and ends["head"].start_s == pytest.approx(1030)
        and ends["late"].start_s > 1030
    )
    assert math.isclose(ends["wide"].end_s, 1030)
