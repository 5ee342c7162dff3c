"""A request with a valid token may be wrong in any way: its answer is one line, and the scheduler goes on."""

import contextlib
import copy
import http.client
import http.server
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.errors import SpecError
from paceline.sched.live import Daemon, DaemonSettings, Driver, JobSpec, Node, drivers, forecast
from paceline.sched.live.client import DaemonClient
from paceline.sched.live.driver import RUNNING
from paceline.sched.policy import Policy

CLIENTS = 50


class Endless(Driver):
    """An engine of two nodes on which every run goes on for ever."""

    name = "local"
    poll_s = 0.002

    def nodes(self):
        return [Node(name="a", devices=2), Node(name="b", devices=2)]

    def launch(self, run, folder, node_names):
        pass

    def has(self, runs):
        return {run.token: RUNNING for run, _ in runs}


@contextlib.contextmanager
def serving(state, policy="fifo"):
    """A daemon whose loop runs in a thread of its own; it must come to its end only when it is told to."""
    daemon = Daemon(DaemonSettings(state=state, policy=policy, interval_s=0.0))
    failed = []

    def loop():
        try:
            daemon.run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield daemon
        assert thread.is_alive() and not failed, failed
    finally:
        daemon.stop()
        thread.join(30)
    assert not thread.is_alive() and not failed, failed


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(drivers, "make", lambda name, state, nodes: Endless(state))
    monkeypatch.setattr(forecast, "_SAMPLES", 2)


def post(daemon, body, limit_s=20.0):
    """(status, answer) of one request; `body` as bytes."""
    found = json.loads((daemon.setup.state / "daemon.json").read_text())
    connection = http.client.HTTPConnection("127.0.0.1", found["port"], timeout=limit_s)
    try:
        connection.request("POST", "/", body, {"Authorization": f"Bearer {found['token']}"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def order(named, **more):
    usual = {"name": named, "command": ["true"], "folder": "/tmp", "work": 100, "rates": {"1": 10, "2": 18}}
    return {**usual, **more}


#: what may be wrong with a job whose rates are known, and with one of which the run time is
WRONG_RATES = [
    {"most": 2**63},
    {"most": 10**400},
    {"devices": -1},
    {"least": 0},
    {"retries": -1},
    {"priority": 2**70},
    {"tenant": ["x"]},
    {"tenant": "a\nb"},
    {"folder": None},
    {"folder": "here"},
    {"folder": "/a\0"},
    {"command": ["a\0"]},
    {"command": ["\ud800"]},
    {"environment": {"A=B": "x"}},
    {"environment": {"": "x"}},
    {"environment": {"A": "\0"}},
    {"powers_of_two": "yes"},
    {"restart": 1e308},
    {"submit": 1e300},
    {"work": 1e308},
    {"work": 1e-300},
    {"rates": {"1": 1e-308}},
    {"rates": {"²": 3}},
    {"rates": {"9" * 5000: 3}},
    {"ends": {"at": [0.5], "chance": [10**400]}},
    {"speeds": {"cpu": {}}},
    {"name": "a\n"},
    {"speeds": {"cpu": {"0": [1, 1, 1, 1]}}},
    {"name": "x" * 100_000},
    {"plan": 3},
]
WRONG_LENGTHS = [
    {"overhead": -1},
    {"overhead": -0.4},
    {"overhead": None},
    {"overhead": "much"},
    {"overhead": 10**400},
    {"seconds": 10**400},
    {"work": 10, "most": 2**63},
]
LENGTH = {"name": "c", "command": "true", "folder": "/tmp", "seconds": 100, "devices": 4}
WRONG = [
    {"do": "eta", "job": None},
    {"do": "eta"},
    {"do": "eta", "job": ["a"]},
    {"do": "cancel", "job": {}},
    7,
    [],
    {},
    {"do": None},
    {"do": "quene"},
    {"do": "submit"},
    {"do": "submit", "orders": None},
    {"do": "submit", "orders": [[]]},
    {"do": "submit", "orders": [None]},
    {"do": "submit", "orders": [order("a"), order("a")]},
    *({"do": "submit", "orders": [order("b", **change)]} for change in WRONG_RATES),
    *({"do": "submit", "orders": [{**LENGTH, **change}]} for change in WRONG_LENGTHS),
]


@pytest.mark.parametrize("policy", ["fifo", "marginal"])
def test_each_of_these_is_answered_with_one_line(engine, tmp_path, policy):
    with serving(tmp_path / "state", policy) as daemon:
        for request in WRONG:
            status, answer = post(daemon, json.dumps(request).encode())
            assert status == 400 and set(answer) == {"error"}, request
            assert answer["error"] and "\n" not in answer["error"] and len(answer["error"]) < 1100
        for body in (b"", b"{", b"\xff\xfe", b'{"do": NaN}', b"[" * 100_000):
            assert post(daemon, body)[0] == 400
        assert post(daemon, b'{"do": "queue"}') == (200, {"ok": []}), "nothing was taken in"


VALUES = [
    None,
    True,
    -1,
    0,
    1,
    3,
    0.5,
    2**31,
    2**63,
    -(2**63),
    10**400,
    1e9,
    1e308,
    -1e308,
    1e-308,
    "",
    "x",
    "a\n",
    "\0",
    "\ud800",
    "../..",
    [],
    {},
    [[]],
    {"a": 1},
    [None],
    "5 steps",
    "3 epochs",
    "1 parsec",
    "x" * 5000,
    "history",
    {"early": 0.3},
    {"1": 1},
    {"1": "5 steps/s"},
]
KEYS = [
    "overhead",
    "most",
    "least",
    "devices",
    "ends",
    "learnt",
    "speeds",
    "seconds",
    "work",
    "rates",
    "retries",
    "priority",
    "tenant",
    "submit",
    "restart",
    "powers_of_two",
    "environment",
    "batch",
    "dataset",
    "noise_scale",
    "profile",
    "command",
    "folder",
    "name",
    "do",
    "job",
    "orders",
]


def sound(draw, index, names):
    """A request with nothing wrong in it."""
    early = {"tenant": "a", "ends": {"at": [0.5], "chance": [0.5]}}
    return draw.choice(
        [
            {"do": "submit", "orders": [order(f"j{index}", most=2)]},
            {"do": "submit", "orders": [order(f"s{index}", **early)]},
            {"do": "submit", "orders": [{**LENGTH, "name": f"t{index}", "devices": 2, "least": 1}]},
            {"do": "eta", "job": draw.choice(names)},
            {"do": "cancel", "job": draw.choice(names)},
            {"do": "queue"},
        ]
    )


def mutated(draw, index, names):
    """The bytes of a request of which something is changed."""
    request = sound(draw, index, names)
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        place, orders = request, request.get("orders")
        if isinstance(orders, list) and orders and isinstance(orders[0], dict) and draw.random() < 0.8:
            place = orders[0]
        key = draw.choice([*place, *KEYS])
        if draw.random() < 0.15:
            place.pop(key, None)
        else:
            place[key] = copy.deepcopy(draw.choice(VALUES))
    body = bytearray(json.dumps(request).encode())
    if draw.random() < 0.1:
        body[draw.randrange(len(body))] = draw.randrange(256)
    return bytes(body)


#: with each of these seeds one request in a few hundred ended the scheduler while errors could leave its loop
SEEDS = {"fifo": 1, "marginal": 2, "srtf": 5, "optimus(interval_s=0)": 4}


@pytest.mark.parametrize(("policy", "seed"), SEEDS.items())
def test_hundreds_of_mutated_requests(engine, tmp_path, policy, seed):
    draw, names, taken = random.Random(seed), ["none"], 0
    with serving(tmp_path / "state", policy) as daemon:
        for index in range(200):
            body = mutated(draw, index, names)
            status, answer = post(daemon, body)
            assert status in (200, 400), (body, answer)
            if status == 400:
                said = answer["error"]
                assert said and "\n" not in said and "Error: " not in said, (body, answer)
            elif isinstance(answer["ok"], list) and answer["ok"] and isinstance(answer["ok"][0], str):
                names += answer["ok"]
                taken += 1
        rows = post(daemon, b'{"do": "queue"}')[1]["ok"]
        assert taken >= 20 and len(rows) == len(names) - 1


class Failing(Policy):
    """A policy that fails when a job is over."""

    def decide(self, state):
        for job in list(state.waiting.values()):
            if state.fits(job.job.devices):
                state.start(job, job.job.devices, "it fits")

    def left(self, job, now_s):
        raise ZeroDivisionError("division by zero")


def test_a_policy_that_fails_in_a_request_changes_nothing(engine, tmp_path, monkeypatch):
    from paceline.sched import policies

    monkeypatch.setitem(policies.POLICIES, "failing", (Failing, ""))
    with serving(tmp_path / "state", "failing") as daemon:
        client = DaemonClient(tmp_path / "state")
        client.ask("submit", orders=[order("a")])
        end = time.monotonic() + 30
        while client.ask("queue")[0]["state"] != "running":
            assert time.monotonic() < end
        with pytest.raises(SpecError, match="policy 'failing' failed: ZeroDivisionError: division by zero"):
            client.ask("cancel", job="a")
        assert client.ask("queue")[0]["state"] == "running"
        assert daemon.machine.state.free == 3


def test_an_eta_does_not_hold_up_others(engine, tmp_path, monkeypatch):
    begun, go_on, real = threading.Event(), threading.Event(), forecast.eta

    def slow(*words):
        begun.set()
        assert go_on.wait(60)
        return real(*words)

    monkeypatch.setattr(forecast, "eta", slow)
    with serving(tmp_path / "state") as daemon, ThreadPoolExecutor(1) as pool:
        request = {"do": "submit", "orders": [order("a"), order("b")]}
        assert post(daemon, json.dumps(request).encode())[0] == 200
        try:
            asked = pool.submit(post, daemon, b'{"do": "eta", "job": "b"}', 60.0)
            assert begun.wait(30)
            for _ in range(3):
                assert len(post(daemon, b'{"do": "queue"}', 10.0)[1]["ok"]) == 2
            assert post(daemon, b'{"do": "cancel", "job": "a"}', 10.0)[0] == 200
            assert not asked.done()
        finally:
            go_on.set()
        status, answer = asked.result(30)
        assert status == 200 and answer["ok"]["name"] == "b"


def test_fifty_clients_at_once(engine, tmp_path, monkeypatch):
    """All of them connect while the accepting thread is held up, and all are answered."""
    go_on, process = threading.Event(), http.server.ThreadingHTTPServer.process_request

    def held(self, request, client_address):
        assert go_on.wait(60)
        process(self, request, client_address)

    monkeypatch.setattr(http.server.ThreadingHTTPServer, "process_request", held)
    with serving(tmp_path / "state") as daemon:
        found = json.loads((daemon.setup.state / "daemon.json").read_text())
        port = found["port"]
        clients = [http.client.HTTPConnection("127.0.0.1", port, timeout=5.0) for _ in range(CLIENTS)]
        try:
            for client in clients:
                client.connect()
                client.request("POST", "/", b'{"do": "queue"}', {"Authorization": f"Bearer {found['token']}"})
            go_on.set()
            for client in clients:
                client.sock.settimeout(60.0)
                assert json.loads(client.getresponse().read()) == {"ok": []}
        finally:
            go_on.set()
            for client in clients:
                client.close()
        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(lambda _: post(daemon, b'{"do": "queue"}', 60.0), range(4 * CLIENTS)))
        assert answers == [(200, {"ok": []})] * (4 * CLIENTS)


def test_jobs_are_not_copied_for_an_eta(engine, tmp_path):
    """What the loop itself does for an ETA is a copy in which jobs are shared: it is quick with many."""
    live = Daemon(DaemonSettings(state=tmp_path / "state"))
    try:
        live.submit([JobSpec.of(order(f"j{i}"), tmp_path) for i in range(20)])
        live.turn()
        question = live.ask("j19")
        assert question.machine is not live.machine and question.machine.state is not live.machine.state
        copied = question.machine.state.jobs
        assert all(copied[name].job is job.job for name, job in live.machine.state.jobs.items())
    finally:
        live.close()
