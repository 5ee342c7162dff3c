"""Many jobs, one cluster: throughput model, traces, policies, state machine, drivers."""

from paceline.sched.decision import Decision, Resize, Start, Stop
from paceline.sched.event import Ended, Event, NodeDown, NodeUp, Preempted, Report, Submit, Tick
from paceline.sched.job import Active, Job
from paceline.sched.machine import Machine, State, replay
from paceline.sched.nodes import Shape
from paceline.sched.policy import Policy
from paceline.sched.speed import Scaling, Speed, Table

__all__ = [
    "Active",
    "Decision",
    "Ended",
    "Event",
    "Job",
    "Machine",
    "NodeDown",
    "NodeUp",
    "Policy",
    "Preempted",
    "Report",
    "Resize",
    "Scaling",
    "Shape",
    "Speed",
    "Start",
    "State",
    "Stop",
    "Submit",
    "Table",
    "Tick",
    "replay",
]
