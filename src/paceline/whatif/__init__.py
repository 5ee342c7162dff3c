"""Edits, sweeps, bottlenecks and comparisons: what would change if the cluster or the plan did."""
