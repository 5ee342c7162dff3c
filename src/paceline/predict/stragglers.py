"""Waiting for the slowest: ranks that do the same work do not take the same time."""

from __future__ import annotations

from statistics import NormalDist

from paceline.spec.cluster import Cluster


def slowest_of(count: int) -> float:
    """By how many standard deviations the slowest of `count` normal draws is above the mean, on average
    (Blom's approximation).
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def straggling(cluster: Cluster) -> float:
    """By what share of its computation a step is longer because all wait for the slowest rank.

    Every device draws for itself: steps of one server slow down from two devices on as those of many servers
    do (`tf_cnn_benchmarks_2017`), and the traces that coefficients of variation come from are of workers.
    """
    return cluster.straggler_cv * slowest_of(cluster.device_count)
