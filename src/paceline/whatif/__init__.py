"""Edits, sweeps, bottlenecks and comparisons: what would change if the cluster or the plan did.

from paceline.whatif import Subject, change, compare, explain, sweep

subject = Subject.of("vgg16", "8xp100-node-10gbe", "ddp", batch=32)
change(subject, ["network.inter.bandwidth=40Gb/s"]).reasons
sweep(subject, "nodes=1..64").scaling.pays_to
explain(subject).resources.bottlenecks[0]
compare(subject, ["ddp", "overlap", "dgc"]).best
"""

from paceline.whatif.change import change
from paceline.whatif.compare import compare
from paceline.whatif.edits import Edit, apply
from paceline.whatif.explain import explain
from paceline.whatif.job import Budget, job
from paceline.whatif.subject import Subject
from paceline.whatif.sweep import sweep

__all__ = ["Budget", "Edit", "Subject", "apply", "change", "compare", "explain", "job", "sweep"]
