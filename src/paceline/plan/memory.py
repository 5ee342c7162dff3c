"""Memory of every plan of a block, as one array: the same figures as `predict/memory.py`, put together from
what factors.
"""

from __future__ import annotations

import numpy as np

from paceline.cost import memory as device_memory
from paceline.plan.bound import pipelines
from paceline.plan.space import Block
from paceline.plan.table import Array, Rank, Table, alike, rank_bytes, room_bytes, stage_bytes
from paceline.predict.memory import OFFLOADED_LAYERS, offloaded
from paceline.spec.vocabulary import Offload


def room(block: Block, table: Table) -> float:
    """Bytes that plans of a block may reserve."""
    return room_bytes(table, block.mesh, block.kernels)


def peaks(block: Block, table: Table) -> Array:
    """Bytes that are reserved on the fullest device: (shapes, orders, states)."""
    where, states = alike(block.states, "bucket_bytes")
    known = pipelines(block, table)
    ranks = known.ranks
    of_states = stage_bytes(table, block.mesh, block.kernels, states, known.stages)[:, known.stage]
    # of each shape, before states and ranks
    sizes = rank_bytes(table, Rank.of(block), block.shapes)[:, None, None]
    layers = ranks["live"] * ranks["layers"]
    whole = layers * sizes["layer"]
    here = np.minimum(OFFLOADED_LAYERS, layers) * sizes["layer"]
    away = np.array([state.offload is Offload.ACTIVATIONS for state in states])[:, None]
    embedding = ranks["live"] * ranks["first"] * sizes["embedding"]
    activations = np.where(away, offloaded(here, whole, block.cluster), whole + embedding)
    backward = np.where(ranks["first"], sizes["first"], sizes["inner"]) + of_states["reduced"]
    comes = np.maximum(ranks["last"] * sizes["loss"], backward) + of_states["gathered"]
    slack = table.sized(block.plan(0)).framework.slack
    training = slack * (activations + comes + sizes["fixed"])
    fullest = known.most(of_states["states"] + np.maximum(training, of_states["update"]))
    found = fullest[:, where].transpose(0, 2, 1)
    return np.asarray(found + device_memory.workspace_bytes(block.cluster.device))
