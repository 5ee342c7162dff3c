"""An emulated cluster: rates as asked, bytes as sent, nothing left behind however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.bench.emulate import EmulatedCluster, sweep, system
from paceline.bench.emulate import cluster as module
from paceline.errors import RunError, SpecError

pytest.importorskip("pyroute2")
allowed = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs the right to make network namespaces"
)

#: rank 0 sends `size` bytes to rank 1 over a plain socket and says how long it took
SEND = """
import os, socket, sys, time
size, address = int(sys.argv[1]), os.environ["MASTER_ADDR"]
if os.environ["RANK"] == "0":
    with socket.create_server((address, 5000)) as server:
        peer, _ = server.accept()
        start = time.perf_counter()
        peer.sendall(bytes(size))
        peer.recv(1)
        print(time.perf_counter() - start)
else:
    for _ in range(200):
        try:
            peer = socket.create_connection((address, 5000)); break
        except OSError:
            time.sleep(0.02)
    left = size
    while left:
        left -= len(peer.recv(1 << 20))
    peer.sendall(b"x")
"""


def send(cluster, size):
    """Seconds that `size` bytes took, and the traffic of both hosts."""
    before = cluster.traffic()
    seconds = float(cluster.launch([sys.executable, "-c", SEND, str(size)], timeout_s=60)[0])
    return seconds, [after - earlier for after, earlier in zip(cluster.traffic(), before, strict=True)]


@allowed
def test_links_have_the_rate_and_count_the_bytes():
    size = 4_000_000
    with EmulatedCluster(hosts=2, link_Bps=12.5e6) as cluster:
        slow, traffic = send(cluster, size)
        assert slow == pytest.approx(size / 12.5e6, rel=0.15)
        assert size <= traffic[0].sent_bytes <= size * 1.06  # headers
        assert traffic[1].received_bytes == pytest.approx(traffic[0].sent_bytes, abs=2000)
        assert traffic[1].sent_bytes < 0.05 * size  # acknowledgements
        cluster.shape(125e6)
        faster, _ = send(cluster, size)
        cluster.shape(None)
        unshaped, _ = send(cluster, size)
        assert unshaped < slow / 4 and faster < slow / 4


@allowed
@pytest.mark.skipif(
    not Path("/sys/class/net/lo/queues/rx-0/rps_cpus").exists() or len(os.sched_getaffinity(0)) < 2,
    reason="needs two cores, and a kernel that steers packets to them",
)
def test_what_a_host_receives_is_handled_on_its_own_cores():
    """Left to chance, packets of one connection are handled on two cores, and overtake each other: TCP takes
    that for loss.
    """

    def steered():
        """Of each core, how often another one has handed packets to it."""
        rows = [line.split() for line in Path("/proc/net/softnet_stat").read_text().splitlines()]
        return {int(row[12], 16): int(row[9], 16) for row in rows}

    with EmulatedCluster(hosts=2, pin=True) as cluster:
        before = steered()
        send(cluster, 20_000_000)
        after = steered()
        assert all(any(after[core] > before[core] for core in cores) for cores in cluster._cores)


def test_cores_as_the_kernel_writes_them(tmp_path):
    for queue in ("rx-0", "rx-1", "tx-0"):
        (tmp_path / "queues" / queue).mkdir(parents=True)
    for cores, written in ((range(8), "000000ff"), ([1, 33], "00000002,00000002")):
        system.steer(tmp_path, cores)
        assert [path.read_text() for path in sorted(tmp_path.glob("queues/*/rps_cpus"))] == [written] * 2


@allowed
def test_a_handler_of_term_does_not_keep_its_helpers_alive():
    """Ray leaves such a handler behind; the package that speaks to the kernel forks, and ends its forks by
    TERM.
    """
    code = (
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\nfrom"
        " paceline.bench.emulate import EmulatedCluster\nfor _ in range(4):\n    with"
        " EmulatedCluster(hosts=2): pass\nprint('made')"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.stdout == "made\n", found.stderr


@allowed
def test_cpu_limit_slows_a_host_down():
    if system.cpu_root() is None:
        pytest.skip("no writable cgroup with the cpu controller")
    burn = [
        sys.executable,
        "-c",
        (
            "import time; e = time.perf_counter() + 1.0\nwhile time.perf_counter() < e:"
            " pass\nprint(time.process_time())"
        ),
    ]
    with EmulatedCluster(hosts=1, cpus=0.2) as cluster:
        assert float(cluster.launch(burn)[0]) < 0.35


@allowed
def test_nothing_is_left_after_leaving_or_failing():
    with EmulatedCluster(hosts=2, link_Bps=1e6, cpus=0.5) as cluster:
        name = cluster.name
        process = cluster.start(0, [sys.executable, "-c", "import time; time.sleep(100)"])
        assert name in system.remains()
    assert process.returncode == -signal.SIGKILL
    assert name not in system.remains()
    with pytest.raises(RuntimeError, match="on purpose"), EmulatedCluster(hosts=2) as cluster:
        name = cluster.name
        raise RuntimeError("on purpose")
    assert name not in system.remains()


@allowed
def test_nothing_is_left_after_the_owner_is_killed():
    code = (
        "import sys, time\nfrom paceline.bench.emulate import EmulatedCluster\nwith EmulatedCluster(hosts=2,"
        " cpus=0.5) as cluster:\n    child = cluster.start(1, ['sleep', '100'])\n    print(cluster.name,"
        " child.pid, flush=True)\n    time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        name, child = owner.stdout.readline().split()
        time.sleep(0.3)
        assert name in system.remains()
        owner.kill()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (name in system.remains() or system.alive(int(child))):
        time.sleep(0.05)
    assert name not in system.remains()
    assert not system.alive(int(child))


@allowed
def test_sweep_removes_what_has_no_owner():
    from pyroute2 import netns

    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    netns.create(f"{system.PREFIX}{gone.pid}-0-host0")
    assert f"{system.PREFIX}{gone.pid}-0" in sweep()
    assert f"{system.PREFIX}{gone.pid}-0" not in system.remains()


@allowed
def test_a_rank_that_fails_ends_the_others_and_is_named():
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no such layer')\ntime.sleep(100)"
    with EmulatedCluster(hosts=2) as cluster:
        with pytest.raises(RunError, match="rank 1 ended with 1; its last line: no such layer"):
            cluster.launch([sys.executable, "-c", code])
        with pytest.raises(RunError, match="rank 0 did not end within 0.3 s"):
            cluster.launch(["sleep", "100"], timeout_s=0.3)


def test_refused_in_one_line(monkeypatch):
    with pytest.raises(SpecError, match="1 to 200 hosts, got 0"):
        EmulatedCluster(hosts=0)
    with pytest.raises(SpecError, match="at least 10 kB/s"):
        EmulatedCluster(hosts=2, link_Bps=5.0)
    monkeypatch.setattr(module.os, "geteuid", lambda: 1000)
    with (
        pytest.raises(RunError, match="needs the right to make network namespaces"),
        EmulatedCluster(hosts=2),
    ):
        pass
