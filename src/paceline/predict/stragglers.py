"""Waiting for the slowest: nodes that do the same work do not take the same time."""

from __future__ import annotations

from statistics import NormalDist

from paceline.spec.cluster import Cluster


def slowest_of(count: int) -> float:
    """By how many standard deviations the slowest of `count` normal draws is above the mean, on average (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def straggling(cluster: Cluster) -> float:
    """By what share of its computation a step is longer because all wait for the slowest node.

    `cluster.straggler_cv` is the spread of nodes: the devices of one share host, power and cooling, and are slow together.
    """
    return cluster.straggler_cv * slowest_of(cluster.nodes)
