"""Pipeline schedules, one file for each family: what each rank of a pipeline runs, in order.

The same lists that the classes of `torch.distributed.pipelining` hold (a test compares them), written out
here so that a prediction needs no torch. `register` adds one of your own.
"""

from __future__ import annotations

from paceline.spec.schedules.dual_pipe_v import DualPipeV
from paceline.spec.schedules.gpipe import GPipe, LoopedBFS
from paceline.spec.schedules.one_forward_one_backward import Interleaved, OneForwardOneBackward, ZeroBubbleH1
from paceline.spec.schedules.schedule import SCHEDULES, Action, Schedule, get, register
from paceline.spec.schedules.zero_bubble_v import ZeroBubbleV

__all__ = ["SCHEDULES", "Action", "Schedule", "get", "register"]

for _kind in (GPipe, OneForwardOneBackward, Interleaved, LoopedBFS, ZeroBubbleH1, ZeroBubbleV, DualPipeV):
    register(_kind())
