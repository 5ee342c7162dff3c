"""The scheduler on real machines: drivers (this machine, Slurm, Ray), a daemon that survives being killed,
and its client.
"""

from paceline.sched.live.daemon import Daemon, DaemonSettings
from paceline.sched.live.driver import AttemptStatus, Driver, Node
from paceline.sched.live.job_spec import JobSpec, read
from paceline.sched.live.run import Attempt

__all__ = ["Attempt", "AttemptStatus", "Daemon", "DaemonSettings", "Driver", "JobSpec", "Node", "read"]
