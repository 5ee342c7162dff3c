"""What each way to communicate less, later or without waiting may cost in accuracy, and on what evidence.

A prediction is of time. Two plans of equal speed may need different numbers of steps; this says so beside the
time.
"""

from __future__ import annotations

from paceline.spec.prediction import Evidence
from paceline.spec.synchronisation import Relaxation

#: mode of a relaxation -> what it may cost, and who measured it
_KNOWN = {
    "local-sgd": (
        "small for 8 or 16 local steps after a warm-up, growing with the period",
        "Lin et al., Don't Use Large Mini-Batches, ICLR 2020 (ImageNet)",
    ),
    "diloco": (
        "none with 8 islands and 500 steps; more islands lose some",
        "Douillard et al., DiLoCo, 2023 (C4, up to 400M parameters)",
    ),
    "ps-sync": ("none: the sum of all gradients, every step", "definition of synchronous SGD"),
    "ps-async": (
        (
            "gradients are late by as many updates as there are other workers: more steps, lower final"
            " accuracy with many workers"
        ),
        "Chen et al., Revisiting Distributed Synchronous SGD, 2016 (Inception v3)",
    ),
    "ps-bounded": (
        "as synchronous where the bound is small",
        "Ho et al., Stale Synchronous Parallel, NIPS 2013",
    ),
    "ps-backup": (
        "the slowest gradients are dropped: a smaller batch, nothing is late",
        "Chen et al., 2016 (Inception v3)",
    ),
    "easgd": (
        "small with momentum for periods of about 10",
        "Zhang et al., Elastic Averaging SGD, NIPS 2015 (4 to 16 workers)",
    ),
    "gossip": (
        "copies differ, and agree the more slowly the larger the ring",
        "Lian et al., NIPS 2017; Assran et al., ICML 2019 (ImageNet, 4 to 32 nodes)",
    ),
    "hogwild": (
        "none where gradients are sparse; no guarantee for dense networks",
        "Niu et al., Hogwild!, NIPS 2011",
    ),
}


def accuracy(relax: Relaxation) -> Evidence:
    """What a scheme or a mode may cost in accuracy, and who says so; `derived` where nothing but the order of
    sums changes. Ways of averaging every step say it themselves.
    """
    what, source = (relax.scheme.accuracy, relax.scheme.evidence) if relax.compress else _KNOWN[relax.mode]
    return Evidence(what=what, kind="derived" if what.startswith("none: ") else "measured", source=source)


def reordered(source: str) -> Evidence:
    """Of ways that sum all gradients every step."""
    return Evidence(what="none: the same sums, in another order", kind="derived", source=source)
