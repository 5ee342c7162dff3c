"""A whole job from one step: time to train for a budget of tokens or epochs, goodput, money and energy.

samples    budget * (1 + batch / critical batch)        more of them the larger the batch (McCandlish et al.
2018), where it is given time       steps * step time, evaluation, and what checkpoints and failures cost
(`cost/failures.py`)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.cost import failures, money
from paceline.cost.energy import NODE_FACTOR, PUE, PowerDraw, power
from paceline.cost.money import Price, price
from paceline.errors import SpecError
from paceline.spec.cluster import Cluster
from paceline.spec.device import Device
from paceline.spec.prediction import DistributedPrediction, Evidence
from paceline.spec.vocabulary import BoundBy
from paceline.spec.whatif import FigureRange, TrainingCost

#: samples of an epoch where nobody says, and those of an evaluation after each, by unit: ImageNet-1k
EPOCHS = {"images": (1_281_167, 50_000)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What is trained, and what is known about the machine. Seconds, bytes."""

    tokens: float = 0.0
    epochs: float = 0.0
    #: samples of an epoch, and of one evaluation after it
    samples: float = 0.0
    evaluation: float = 0.0
    #: batch, in the unit of throughput, at which twice the samples are needed; 0: not known, no more are
    critical_batch: float = 0.0
    mtbf_s: float = failures.DEVICE_MTBF_S
    restart_s: float = failures.RESTART_S
    storage_Bps: float = failures.STORAGE_BPS
    #: seconds between checkpoints; 0: the best
    interval_s: float = 0.0
    price_per_s: float | None = None


def job(step: DistributedPrediction, cluster: Cluster, budget: Budget) -> TrainingCost:
    """The job that trains for a budget by repeating a step."""
    units, evaluated = _units(step, budget)
    per_step = step.throughput * step.step_s
    extra = per_step / budget.critical_batch if budget.critical_batch else 0.0
    steps = math.ceil(units * (1 + extra) / per_step)
    training = FigureRange(
        value=steps * step.step_s, low=steps * step.step_s_low, high=steps * step.step_s_high
    )
    forward = sum(part.seconds for part in step.breakdown if part.name == "forward") / step.step_s
    evaluation = evaluated / step.throughput * forward
    written = step.parameters * failures.CHECKPOINT_BYTES
    write = written / (budget.storage_Bps * cluster.nodes)
    between = failures.interrupted_s(step.devices, budget.mtbf_s)
    interval = budget.interval_s or failures.best_interval_s(write, between)
    good = FigureRange(
        **{
            name: failures.goodput(
                interval, write_s=write, restart_s=budget.restart_s * slow, interrupted_s=between / slow
            )
            for name, slow in (("value", 1.0), ("low", 2.0), ("high", 0.5))
        }
    )
    if good.low <= 0:
        raise SpecError(
            f"{step.devices} devices are interrupted every {between:.0f} s: no checkpoint of"
            f" {written / 1e9:.0f} GB is ever complete"
        )
    time = FigureRange(
        value=(training.value + evaluation) / good.value,
        low=(training.low + evaluation) / good.high,
        high=(training.high + evaluation) / good.low,
    )
    hours = time.times(step.devices / 3600)
    cost = price(cluster.device, budget.price_per_s)
    drawn = power(cluster.device, step.flops / step.step_s / step.devices, _busy(step), step.precision)
    energy = None
    if drawn is not None:
        factors = [NODE_FACTOR[i] * PUE[i] for i in range(3)]
        energy = FigureRange(
            value=drawn.watts * factors[0] * time.value * step.devices,
            low=drawn.low * factors[1] * time.low * step.devices,
            high=drawn.high * factors[2] * time.high * step.devices,
        )
    return TrainingCost(
        unit=step.unit,
        units=units,
        steps=steps,
        step_s=step.step_s,
        devices=step.devices,
        extra=extra,
        training_s=training,
        evaluation_s=evaluation,
        checkpoint_s=write,
        checkpoint_bytes=written,
        interval_s=interval,
        interrupted_s=between,
        goodput=good,
        time_s=time,
        device_hours=hours,
        money=hours.times(3600 * cost.per_s) if cost is not None else None,
        energy_j=energy,
        watts=drawn.watts if drawn is not None else None,
        provenance=tuple(_evidence(cluster.device, budget, cost, drawn)),
    )


def _units(step: DistributedPrediction, budget: Budget) -> tuple[float, float]:
    """What is trained in all, and what is evaluated, in the unit of throughput."""
    if (budget.tokens > 0) == (budget.epochs > 0):
        raise SpecError("a job is given by --tokens or by --epochs, one of them")
    if budget.tokens:
        if step.unit != "tokens":
            raise SpecError(f"{step.model} counts {step.unit}, not tokens; give --epochs (and --samples)")
        return budget.tokens, 0.0
    known = EPOCHS.get(step.unit, (0, 0))
    samples = budget.samples or known[0]
    if not samples:
        raise SpecError(f"an epoch of {step.unit} has no usual size; give --samples")
    return budget.epochs * samples, budget.epochs * (
        budget.evaluation or (known[1] if not budget.samples else 0)
    )


def _busy(step: DistributedPrediction) -> float:
    """The share of a step in which devices compute."""
    return (
        sum(part.seconds for part in step.breakdown if part.bound_by in (BoundBy.COMPUTE, BoundBy.MEMORY))
        / step.step_s
    )


def _evidence(device: Device, budget: Budget, cost: Price | None, drawn: PowerDraw | None) -> list[Evidence]:
    fleet = "419 interruptions in 54 days of 16,384 H100 (Dubey et al. 2024); x2 each way"
    said = {
        "device MTBF": (budget.mtbf_s != failures.DEVICE_MTBF_S, "measured", fleet),
        "restart": (budget.restart_s != failures.RESTART_S, "guessed", "no source; x2 each way"),
        "storage": (budget.storage_Bps != failures.STORAGE_BPS, "guessed", "2 GB/s per node, no source"),
        "critical batch": (
            bool(budget.critical_batch),
            "guessed",
            "not given: no more samples at large batches",
        ),
    }
    out = [
        Evidence(what=name, kind="declared" if given else kind, source="given" if given else why)
        for name, (given, kind, why) in said.items()
    ]
    out.append(money.evidence(device, cost, money.FLAG))
    if drawn is not None:
        hosts = (
            f"hosts x{NODE_FACTOR[0]:g} ({NODE_FACTOR[1]:g} to {NODE_FACTOR[2]:g}), cooling x{PUE[0]:g}"
            f" ({PUE[1]:g} to {PUE[2]:g})"
        )
        out += [
            Evidence(what=f"{drawn.watts:.0f} W per device", kind=drawn.kind, source=drawn.source),
            Evidence(what=hosts, kind="guessed", source="ratings of DGX systems; Uptime Institute surveys"),
        ]
    return out
