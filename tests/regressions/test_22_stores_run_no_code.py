"""Who reaches the port of a run, or hands over a checkpoint, cannot have code run."""

import contextlib
import hashlib
import io
import json
import os
import re
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.errors import PacelineError, RunError, SpecError
from paceline.train.asynchronous import server
from paceline.train.asynchronous.launch import Local
from paceline.train.asynchronous.wire import Rendezvous, serve_store
from paceline.train.checkpoint import Checkpoints
from paceline.train.launch import run

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
SOURCE = Path(__file__).parents[2] / "src"
COUNTING = str(Path(__file__).parents[1] / "train" / "asynchronous" / "counting.py")


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def pickled(marker):
    buffer = io.BytesIO()
    torch.save(Evil(marker), buffer)
    return buffer.getvalue()


def reached(address, port):
    try:
        socket.create_connection((address, port), timeout=5.0).close()
    except OSError:
        return False
    return True


def test_a_store_listens_on_the_address_it_is_given_only():
    store = serve_store("127.0.0.1")
    assert reached("127.0.0.1", store.port)
    assert not reached("127.0.0.2", store.port)


@pytest.mark.skipif(sys.platform != "linux", reason="which ports are open is read from /proc")
@pytest.mark.parametrize("plan", ["ddp", "ps-async"])
def test_ranks_of_one_machine_listen_on_its_loopback_interface_only(plan):
    ranks = run("workers_22:ports", world=2, arguments={"plan": plan}, environment=HERE, timeout_s=250)
    assert ranks == [[], []]


def test_other_machines_are_not_sent_to_a_loopback_address(monkeypatch):
    from paceline.train.asynchronous.meeting import _host

    told = {"MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert _host(object()) == "localhost"
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RunError, match="'localhost' is a loopback address on rank 0's machine"):
        _host(object())


@pytest.mark.parametrize(
    ("text", "host"), [("10.0.0.1:29500:abc", "10.0.0.1"), ("fe80::1:29500:abc", "fe80::1")]
)
def test_a_session_is_read_as_it_is_written(text, host):
    found = Rendezvous.parse(text, number=2)
    assert (found.host, found.port, found.run, found.prefix) == (host, 29500, "abc", "abc/2") and str(
        found
    ) == text
    for wrong in ("file:///rendezvous", "10.0.0.1:29500", "10.0.0.1:port:abc"):
        with pytest.raises(RunError, match="must be HOST:PORT:RUN"):
            Rendezvous.parse(wrong)


def test_a_run_has_a_secret_name_that_is_on_no_command_line():
    names = set()
    for _ in range(2):
        with Local(workers=1) as run:
            names.add(run.place.run)
            assert run.place.run not in repr(run.place)
            if len(names) == 2:
                run.start([sys.executable, COUNTING, "ps-async", "100000", "0.05", "{}"])
                deadline = time.monotonic() + 100
                while not run.supervisor.processes and time.monotonic() < deadline:
                    time.sleep(0.02)
                served = Path(f"/proc/{run.supervisor.processes[0].pid}/cmdline").read_bytes()
                assert run.place.run.encode() not in served
    assert len(names) == 2 and all(re.fullmatch("[0-9a-f]{32}", name) for name in names)


def test_a_server_runs_no_code_from_its_store(tmp_path):
    store = serve_store("127.0.0.1", timeout_s=5.0)
    place = Rendezvous(host="127.0.0.1", port=store.port, run="probe", timeout_s=5.0)
    client, marker = place.store(), tmp_path / "ran"
    for key in ("spec/0", "start/0"):
        client.set(f"{key}/0", pickled(marker))
        client.set(key, "1")
    with contextlib.suppress(Exception):
        server.run(place, 0)
    assert not marker.exists()
    with pytest.raises(RunError, match="server 0 cannot serve"):
        server.run(place, 0)
    assert client.check(["failed/0"])  # workers that wait for it hear of it


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("os:system", "servers run optimizers of torch.optim"),
        ("__main__:Mine", "put it into a module"),
        ("torch.optim:lr_scheduler", "no optimizer"),
    ],
)
def test_servers_run_known_optimizers_only(name, said, monkeypatch):
    with pytest.raises(SpecError, match=said):
        server.optimizer_class(name)
    monkeypatch.setenv("PACELINE_OPTIMIZERS", "collections:OrderedDict")
    with pytest.raises(SpecError, match="no optimizer"):
        server.optimizer_class("collections:OrderedDict")
    assert server.optimizer_class(server.name_of(torch.optim.AdamW)) is torch.optim.AdamW


def test_a_specification_comes_back_as_it_was(tmp_path):
    from paceline.train.asynchronous.flat import FlatVector
    from paceline.train.asynchronous.policy import UpdatePolicy

    layers = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)
    groups = [{"params": layers[0].parameters()}, {"params": layers[1].parameters(), "lr": torch.tensor(0.5)}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9))
    flat = FlatVector(optimizer)
    store = serve_store("127.0.0.1", timeout_s=5.0)
    place = Rendezvous(host="127.0.0.1", port=store.port, run="probe", timeout_s=5.0)
    ((_, parts),) = flat.shards(1)
    policy, name = UpdatePolicy(mode="sync", workers=3), server.name_of(torch.optim.AdamW)
    spec = server.ServerSpec(
        number=0,
        rendezvous=place,
        start=flat.values(),
        parts=parts,
        optimizer=name,
        policy=policy,
        groups=2,
        streams=2,
        checkpoint=tmp_path / "a.pt",
    )
    server.publish(place.store(), spec)
    found = server.published(place, 0)
    assert torch.equal(found.start, spec.start)
    assert [part.options["lr"] for part in found.parts] == [1e-3, 0.5]
    assert found.parts[0].options["betas"] == (0.8, 0.9)
    assert replace(found, start=spec.start, parts=parts) == spec


def checkpoint(folder):
    """A whole one of a small network."""
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    Checkpoints(folder, asynchronous=False).save(3, net, optimizer, extra={"epoch": 1, "names": ("a", "b")})
    return net, optimizer


@pytest.mark.parametrize("name", ["model.pt", "rank0.pt"])
def test_a_checkpoint_from_elsewhere_runs_no_code(tmp_path, name):
    net, optimizer = checkpoint(tmp_path / "saved")
    marker, place = tmp_path / "ran", tmp_path / "saved" / "step-000000003"
    (place / name).write_bytes(pickled(marker))
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["sha256"][name] = hashlib.sha256((place / name).read_bytes()).hexdigest()
    (place / "manifest.json").write_text(json.dumps(manifest))
    optimizer = parallel(net, optimizer)
    with contextlib.suppress(PacelineError):
        Checkpoints(tmp_path / "saved").load(net, optimizer)
    assert not marker.exists()
    with pytest.raises(RunError, match=f"{name} holds more than tensors and plain data") as caught:
        Checkpoints(tmp_path / "saved").load(net, optimizer)
    assert "\n" not in str(caught.value)


def parallel(net, optimizer):
    """The optimizer as a strategy holds it, so that what each rank keeps is loaded, too."""
    from types import SimpleNamespace

    load = optimizer.load_state_dict
    by = SimpleNamespace(name="", load_optimizer_state=load, load_state_dict=lambda state: None)
    optimizer._paceline = SimpleNamespace(by=by)
    return optimizer


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path):
    net, optimizer = checkpoint(tmp_path)
    saved = Checkpoints(tmp_path, asynchronous=False)
    with pytest.raises(SpecError, match=r"extra\['loader'\] is of type Evil; checkpoints hold tensors"):
        saved.save(4, net, optimizer, extra={"loader": Evil(tmp_path / "ran")})
    assert saved.load(net, optimizer) == 3


def test_every_load_in_the_sources_is_of_plain_data():
    forked = (
        SOURCE / "paceline" / "plan" / "workers.py"
    )  # speaks by pickle, over pipes, to processes that it forked
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        code = re.search(
            r"^\s*(import|from) (pickle|dill|cloudpickle|marshal|shelve)\b(?! import Un)", text, re.M
        )
        assert not code or path == forked, path
        assert "weights_only=False" not in text, path
        for call in re.finditer(r"torch\.load\(", text):
            assert "weights_only=True" in text[call.start() : call.start() + 200], path
