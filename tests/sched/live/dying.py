"""A daemon that kills itself at a point: `dying.py POINT SETUP.json ORDERS.json`. In a process of its own:
Ray does not survive a fork.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from paceline.sched.live import Daemon, DaemonSettings, JobSpec
from paceline.sched.live.driver import Driver
from paceline.sched.live.local import LocalDriver
from paceline.sched.live.on_ray import RayDriver
from paceline.sched.live.slurm import SlurmDriver
from paceline.sched.live.store import Store

#: calls before and after which a daemon dies: around each write (journal, database), around each order to the
#: engine
POINTS = [
    (Store, "commit"),
    (Store, "_write"),
    (Driver, "start"),
    (LocalDriver, "launch"),
    (SlurmDriver, "launch"),
    (RayDriver, "launch"),
    (Driver, "stop"),
    (Driver, "observe"),
]


def die_at(point):
    """Kills this process with SIGKILL at that point, counted over all calls above."""
    left = [point]

    def step():
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(call):
        def wrapped(self, *args, **more):
            step()
            try:
                return call(self, *args, **more)
            finally:
                step()

        return wrapped

    for owner, name in POINTS:
        setattr(owner, name, around(getattr(owner, name)))


def main(point, setup, specs):
    die_at(int(point))
    given = json.loads(Path(setup).read_text())
    daemon = Daemon(DaemonSettings(**{**given, "state": Path(given["state"])}))
    daemon.submit([JobSpec.of(spec, Path(spec["folder"])) for spec in json.loads(Path(specs).read_text())])
    end = time.monotonic() + 300
    while not daemon.idle:
        daemon.turn()
        time.sleep(0.02)
        assert time.monotonic() < end, daemon.queue()
    daemon.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
