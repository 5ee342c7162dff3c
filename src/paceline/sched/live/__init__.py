"""The scheduler on real machines: drivers (this machine, Slurm, Ray), a daemon that survives being killed,
and its client.
"""

from paceline.sched.live.daemon import Daemon, Setup
from paceline.sched.live.driver import Driver, Node, Seen
from paceline.sched.live.order import Order, read
from paceline.sched.live.run import Run

__all__ = ["Daemon", "Driver", "Node", "Order", "Run", "Seen", "Setup", "read"]
