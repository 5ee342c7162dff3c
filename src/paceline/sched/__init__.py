"""Many jobs, one cluster: throughput model, traces, policies, state machine, drivers."""

from paceline.sched.decision import Decision, Resize, Start, Stop
from paceline.sched.event import Ended, Event, NodeDown, NodeUp, Preempted, Report, Submit, Tick
from paceline.sched.job import Active, Job
from paceline.sched.machine import State, StateMachine, replay
from paceline.sched.nodes import ClusterShape
from paceline.sched.policy import Policy
from paceline.sched.speed import RateTable, ScaledSpeed, Speed

__all__ = [
    "Active",
    "ClusterShape",
    "Decision",
    "Ended",
    "Event",
    "Job",
    "NodeDown",
    "NodeUp",
    "Policy",
    "Preempted",
    "RateTable",
    "Report",
    "Resize",
    "ScaledSpeed",
    "Speed",
    "Start",
    "State",
    "StateMachine",
    "Stop",
    "Submit",
    "Tick",
    "replay",
]
