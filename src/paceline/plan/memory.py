"""Memory of every plan of a block, as one array: the same figures as `predict/memory.py`, put together from
what factors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.cost import memory as device_memory
from paceline.plan.bound import pipelines
from paceline.plan.space import Block, StateOptions
from paceline.plan.table import (
    Array,
    Records,
    Table,
    alike,
    largest,
    layer_bytes,
    layer_parts,
    of_parts,
    stage_b,
    usual_step,
)
from paceline.predict.memory import OFFLOADED_LAYERS, available_bytes, offloaded
from paceline.spec.cluster import Cluster
from paceline.spec.vocabulary import Offload


def room(block: Block, table: Table) -> float:
    """Bytes that plans of a block may reserve."""
    return available_bytes(table.sized(block.mesh, block.kernels))


def spare(block: Block, table: Table) -> Array:
    """Bytes of a device that each plan of a block leaves; below zero where it does not fit."""
    return room(block, table) - peaks(block, table)


def peaks(block: Block, table: Table) -> Array:
    """Bytes that are reserved on the fullest device: (shapes, orders, states)."""
    where, states = alike(block.states, "bucket_bytes")
    known = pipelines(block, table)
    ranks = known.ranks
    kept = of_parts(table, stage_b, (block.mesh, block.kernels), states, known.stages)[:, known.stage]
    # by shape, before states and ranks
    sizes = of_parts(table, layer_bytes, layer_parts(block), block.shapes)[:, None, None]
    activations = _activations(ranks, sizes, states, block.cluster)
    slack = usual_step(table, block.kernels.framework).framework.slack
    training = slack * (activations + _temporary(ranks, sizes, kept))
    fullest = known.most(kept["states"] + largest(training, kept["update"]))
    workspace = device_memory.workspace_bytes(block.cluster.device)
    return np.asarray((fullest + workspace)[:, where].transpose(0, 2, 1))


def _temporary(ranks: Records, sizes: Records, kept: Records) -> Array:
    """What comes and goes while passes run."""
    backward = np.where(ranks["first"], sizes["first"], sizes["inner"]) + kept["reduced"]
    return np.asarray(largest(ranks["last"] * sizes["loss"], backward) + kept["gathered"] + sizes["fixed"])


def _activations(ranks: Records, sizes: Records, states: Sequence[StateOptions], cluster: Cluster) -> Array:
    """What the micro-batches in flight have saved, on the device or away in the host's memory."""
    away = np.array([[state.offload is Offload.ACTIVATIONS] for state in states])
    layers = ranks["live"] * ranks["layers"]
    here = np.minimum(OFFLOADED_LAYERS, layers) * sizes["layer"]
    whole = layers * sizes["layer"]
    embedding = ranks["live"] * ranks["first"] * sizes["embedding"]
    return np.asarray(np.where(away, offloaded(here, whole, cluster), whole + embedding))
