"""Who may ask the explorer's server, and what it never does."""

import http.client
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCENARIO = {"model": "llama3-8b", "cluster": "1xdgx-h100", "plan": "fsdp"}


def status(explorer, method, path, **headers):
    """The status of a request without the token, unless given."""
    connection = http.client.HTTPConnection("127.0.0.1", explorer.port, timeout=60)
    connection.request(method, path, headers=headers)
    found = connection.getresponse().status
    connection.close()
    return found


def test_api_needs_the_token(explorer):
    assert status(explorer, "GET", "/api/catalog") == 401
    assert status(explorer, "GET", "/api/catalog", authorization="Bearer wrong") == 401
    assert status(explorer, "GET", "/api/catalog", cookie=f"paceline-{explorer.port}=wrong") == 401
    assert status(explorer, "GET", "/openapi.json") == 401
    assert status(explorer, "GET", "/api/catalog", authorization=f"Bearer {explorer.token}") == 200


def test_token_moves_from_the_address_into_a_cookie(explorer):
    code, headers, _ = explorer.call("GET", f"/?token={explorer.token}", headers={"authorization": ""})
    assert (code, headers["location"]) == (303, "/")
    assert "HttpOnly" in headers["set-cookie"] and "SameSite=strict" in headers["set-cookie"]
    cookie = headers["set-cookie"].partition(";")[0]
    assert status(explorer, "GET", "/api/catalog", cookie=cookie) == 200
    _, headers, _ = explorer.call("GET", "/?token=wrong", headers={"authorization": ""})
    assert headers["set-cookie"] is None


def test_other_hosts_and_origins_are_refused(explorer):
    here, token = f"127.0.0.1:{explorer.port}", f"Bearer {explorer.token}"
    assert status(explorer, "GET", "/api/catalog", host="evil.example", authorization=token) == 400
    assert status(explorer, "GET", "/", host=f"evil.example:{explorer.port}") == 400
    for origin in ("http://evil.example", "null", f"http://evil.example:{explorer.port}", f"https://{here}x"):
        assert status(explorer, "POST", "/api/view", origin=origin, authorization=token) == 403
    assert status(explorer, "GET", "/api/catalog", origin=f"http://{here}", authorization=token) == 200


def test_every_answer_carries_the_policy(explorer):
    for path in ("/", "/static/app.js", "/static/nothing", "/api/catalog", "/api/nothing"):
        _, headers, _ = explorer.call("GET", path)
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_server_listens_on_loopback_only(explorer):
    import socket

    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in others - {"127.0.0.1", "127.0.1.1"}:
        with pytest.raises(OSError):
            socket.create_connection((address, explorer.port), timeout=2)


def test_no_path_leads_out_of_the_static_files(explorer):
    for path in (
        "/static/../guard.py",
        "/static/%2e%2e/guard.py",
        "/static/..%2fguard.py",
        "/static//etc/passwd",
    ):
        assert explorer.call("GET", path)[0] in (404, 405)


@pytest.mark.parametrize(
    "part, text",
    [
        ("model", "/etc/passwd"),
        ("model", "evil.py:build"),
        ("model", "hf:/etc"),
        ("model", "timm:resnet18"),
        ("model", "upload:../../../../etc/passwd"),
        ("model", "upload:0123456789abcdef"),
        ("cluster", "/srv/pod.toml"),
        ("cluster", "4x/srv/POD.TOML"),
        ("plan", "/srv/plan.toml"),
        ("plan", "framework=/srv/mine.toml"),
        ("edits", ["device=/srv/device.toml"]),
    ],
)
def test_texts_never_name_files(explorer, part, text):
    code, _, body = explorer.call("POST", "/api/predict", {**SCENARIO, part: text})
    assert code == 422 and body["message"]


def test_bodies_are_limited(explorer):
    assert explorer.call("POST", "/api/view", "x" * 300_000)[0] == 413
    assert explorer.call("POST", "/api/upload", "x" * (17 << 20))[0] == 413


def test_text_is_escaped(explorer):
    name = "<img src=x onerror=alert(1)>"
    sizes = json.dumps({"name": name, "layers": 2, "hidden": 64, "heads": 4, "ffn": 64, "vocab": 9})
    ask = {"scenario": {**SCENARIO, "model": sizes}, "panels": ["headline", "time", "memory"]}
    code, _, body = explorer.call("POST", "/api/view", ask)
    assert code == 200
    assert "<img" not in "".join(body["panels"].values())


def test_workers_end_with_a_server_that_was_killed():
    command = [sys.executable, "-m", "paceline.cli", "explore", "gpt2-124m", "--cluster", "8xh100-sxm"]
    with subprocess.Popen([*command, "--no-browser"], stdout=subprocess.PIPE, text=True) as server:
        assert "http://" in server.stdout.readline()
        started = children(server.pid)
        server.kill()
    assert len(started) >= 2
    end = time.monotonic() + 30
    while any(map(alive, started)):
        assert time.monotonic() < end, "workers outlive the server"
        time.sleep(0.1)


def children(parent):
    """Processes that a process has started."""
    return [int(n) for n in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def alive(process):
    """Whether a process runs; one that has ended may wait to be collected."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
