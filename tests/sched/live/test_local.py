"""The local engine under the daemon: real processes, the same decisions as in a simulation."""

import os
import signal
import time

import pytest

from paceline.errors import RunError, SpecError, UnknownName
from paceline.sched.live import JobSpec

ELASTIC = "marginal(interval_s=0,worth=0,review_s=0)"


def until(daemon, done, limit_s=30.0):
    end = time.monotonic() + limit_s
    while not done():
        daemon.turn()
        time.sleep(0.02)
        assert time.monotonic() < end, daemon.queue()


@pytest.mark.parametrize("policy", [ELASTIC, ELASTIC.replace("marginal", "marginal-ends"), "srtf"])
def test_decides_as_a_simulation(daemon, tools, policy):
    specs = tools.mixed(
        tools.counter("a", 120, least=1, most=4, devices=2, ends={"at": [0.5], "chance": [0.9]})
    )
    live = daemon(policy=policy, clock="model")
    states = tools.run(live, specs)
    expected = tools.simulated(specs, policy, live.ledger.nodes)
    assert [d for _, d in tools.decided(live)] == [d for _, d in expected]
    assert [t for t, _ in tools.decided(live)] == pytest.approx([t for t, _ in expected])
    assert len(expected) > len(specs)
    assert set(states.values()) == {"completed"}
    tools.once(daemon.state)


def test_a_killed_worker_goes_on_from_its_checkpoint(daemon, tools):
    live = daemon()
    live.submit([tools.counter("a", 60)])
    until(live, lambda: live.queue()[0]["done"] >= 25)
    folder = tools.attempt(daemon.state, "a") / "0"
    child = tools.child(int((folder / "pid").read_text()))
    os.kill(child, signal.SIGKILL)
    assert tools.run(live) == {"a": "completed"}
    assert live.queue()[0]["attempts"] == 2
    assert any("killed by signal 9; it goes on from its checkpoint" in line for line in daemon.lines)
    tools.once(daemon.state)


def test_a_killed_watcher_takes_its_job_with_it(daemon, tools):
    live = daemon()
    live.submit([tools.counter("a", 60, devices=2)])
    until(live, lambda: live.queue()[0]["done"] >= 25)
    os.kill(int((tools.attempt(daemon.state, "a") / "1/pid").read_text()), signal.SIGKILL)
    assert tools.run(live) == {"a": "completed"}
    tools.once(daemon.state)


def test_a_job_that_keeps_dying_is_given_up(daemon, tools):
    spec = JobSpec.of(
        {"name": "a", "command": ["sh", "-c", "kill -9 $$"], "seconds": 5, "retries": 2}, tools.here
    )
    assert tools.run(daemon(), [spec]) == {"a": "failed"}
    assert any("3 times in a row without coming further: given up" in line for line in daemon.lines)


def test_a_failure_says_where_to_look(daemon, tools):
    specs = [
        JobSpec.of({"name": "a", "command": "sh -c 'echo no such file; exit 3'", "seconds": 5}, tools.here),
        JobSpec.of({"name": "b", "command": "no-such-program", "seconds": 5}, tools.here),
    ]
    assert tools.run(daemon(), specs) == {"a": "failed", "b": "failed"}
    assert any("a failed with exit code 3; see" in line for line in daemon.lines)
    assert (tools.attempt(daemon.state, "a") / "0.log").read_text() == "no such file\n"
    log = tools.attempt(daemon.state, "b") / "0.log"
    assert "cannot run no-such-program: No such file or directory" in log.read_text()


def test_a_lost_node_moves_its_jobs(daemon, tools):
    live = daemon(nodes="2x1")
    live.submit([tools.counter("a", 60), tools.counter("b", 60)])
    until(live, lambda: all(row["done"] >= 15 for row in live.queue()))
    (daemon.state / "down").write_text("local0\n")
    until(live, lambda: "waiting" in [row["state"] for row in live.queue()])
    until(live, lambda: sum(row["state"] == "completed" for row in live.queue()) == 1)
    assert any("node local0 is gone, and with it a" in line for line in daemon.lines)
    assert not live.machine.state.nodes.up[0]
    (daemon.state / "down").unlink()
    assert tools.run(live) == {"a": "completed", "b": "completed"}
    assert "node local0 is back" in daemon.lines or live.machine.state.nodes.up[0] is False
    tools.once(daemon.state)


def test_cancelling(daemon, tools):
    live = daemon(nodes="1x1")
    live.submit([tools.counter("a", 1000), tools.counter("b", 1000), tools.counter("later", 10, submit=500)])
    until(live, lambda: live.queue()[0]["done"] >= 1)
    with pytest.raises(UnknownName, match="did you mean 'later'"):
        live.cancel("latr")
    assert (live.cancel("b"), live.cancel("a"), live.cancel("later")) == ("cancelled", "killed", "cancelled")
    with pytest.raises(SpecError, match="over already"):
        live.cancel("a")
    assert tools.run(live) == {"a": "killed", "b": "cancelled", "later": "cancelled"}


def test_a_job_that_ignores_term_is_forced(daemon, tools):
    spec = JobSpec.of(
        {
            "name": "a",
            "command": [
                tools.python,
                "-S",
                "-c",
                "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(100)",
            ],
            "seconds": 100,
        },
        tools.here,
    )
    live = daemon(grace_s=0.5)
    live.submit([spec])
    until(live, lambda: live.reconciler.settled() and live.ledger.runs)
    time.sleep(0.3)
    live.cancel("a")
    began = time.monotonic()
    assert tools.run(live) == {"a": "killed"}
    assert time.monotonic() - began < 20


def test_eta_has_an_interval_that_narrows(daemon, tools):
    live = daemon(nodes="1x1")
    live.submit([tools.counter("a", 200, each_s=0.05), tools.counter("b", 100)])
    until(live, lambda: live.queue()[0]["state"] == "running")
    first, second = live.eta("a"), live.eta("b")
    assert 10 < first.low_s < first.end_s < first.high_s < 35
    assert second.low_s > first.low_s and second.start_s == pytest.approx(first.end_s, rel=0.5), (
        "asked a moment later"
    )
    assert "four cases of five" in str(first) and second.state == "waiting"
    live.cancel("a"), live.cancel("b")
    tools.run(live)


def test_submitting_twice_is_once(daemon, tools):
    live = daemon()
    assert live.submit([tools.counter("a", 5)]) == ["a"]
    assert live.submit([tools.counter("a", 5)]) == []
    with pytest.raises(SpecError, match="submitted before, with other settings"):
        live.submit([tools.counter("a", 6)])
    with pytest.raises(SpecError, match="needs 5 devices of one kind, but the cluster has 4"):
        live.submit([tools.counter("b", 6, devices=5)])
    with pytest.raises(RunError, match="another scheduler runs in"):
        daemon()
    assert tools.run(live) == {"a": "completed"}


@pytest.mark.parametrize("policy", ["fifo", "srtf", ELASTIC])
def test_quotas_are_kept(daemon, tools, policy):
    """Three jobs of one tenant that may hold one device, and one of another, on four devices."""
    live = daemon(policy=policy, quotas={"vision": 1})
    live.submit(
        [tools.counter(name, 15, tenant="vision") for name in "abc"] + [tools.counter("d", 15, tenant="text")]
    )
    with pytest.raises(SpecError, match="needs 2 devices, but tenant 'vision' has a quota of 1"):
        live.submit([tools.counter("e", 5, devices=2, tenant="vision")])
    most = 0
    while not live.idle:
        live.turn()
        running = list(live.machine.state.running.values())
        most = max(most, len(running))
        assert sum(job.devices for job in running if job.job.tenant == "vision") <= 1
        time.sleep(0.02)
    assert most == 2, "the other tenant is not held up"
    live.close()
    live = daemon(policy="", quotas={"vision": 3})
    live.submit([tools.counter("later", 5)])
    assert live.ledger.era["quotas"] == {"vision": 3}, "another quota once no job is left"
    assert tools.run(live)["later"] == "completed"


def test_early_ends_are_learnt_from_the_past(daemon, tools):
    """Of one tenant's ten jobs four fail at half their work; the next of that tenant is known to do so, that
    of another is not.
    """
    live = daemon(nodes="4x1")
    fails = ["sh", "-c", "echo 50 >> $PACELINE_PROGRESS; exit 3"]
    specs = [tools.counter(f"good{i}", 3, tenant="vision") for i in range(6)]
    specs += [
        JobSpec.of(
            {"name": f"bad{i}", "command": fails, "work": 100, "rates": {"1": 10}, "tenant": "vision"},
            tools.here,
        )
        for i in range(4)
    ]
    live.submit(specs)
    until(live, lambda: live.idle)
    live.submit(
        [tools.counter("next", 3, tenant="vision", ends="history"), tools.counter("other", 3, ends="history")]
    )
    ends = live.ledger.job("next").ends
    assert (ends.shares, ends.success) == ((0.5,), pytest.approx(0.6)) and live.ledger.job(
        "other"
    ).ends is None
    assert live.submit([tools.counter("next", 3, tenant="vision", ends="history")]) == [], (
        "the same as before, whatever happened since"
    )
    live.close()
    again = daemon()
    assert again.ledger.job("next").ends == ends
    assert tools.run(again)["next"] == "completed"


def test_a_job_that_asks_for_more_than_there_is(daemon, tools):
    live = daemon(nodes="2x1")
    assert tools.run(live, [tools.counter("a", 10, devices=4, least=1, most=4)]) == {"a": "completed"}
    assert tools.decided(live)[0][1]["allocation"] == [[0, 1], [1, 1]], "it gets all of them"


def test_jobs_in_hand_keep_their_policy(daemon, tools):
    live = daemon()
    live.submit([tools.counter("a", 5)])
    live.close()
    with pytest.raises(SpecError, match="jobs in .* are under policy 'fifo', got 'srtf'"):
        daemon(policy="srtf")
    assert tools.run(daemon(policy="")) == {"a": "completed"}
    fresh = daemon(policy="srtf")
    assert fresh.ledger.era["policy"] == "srtf"
    fresh.close()
