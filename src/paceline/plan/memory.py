"""Memory of every plan of a block, as one array: the same figures as `predict/memory.py`, put together from
what factors.
"""

from __future__ import annotations

import numpy as np

from paceline.cost import memory as device_memory
from paceline.plan.bound import LinesKey
from paceline.plan.space import Block
from paceline.plan.table import Array, RankKey, RoomKey, SizesKey, StageBytesKey, Table, alike
from paceline.predict.memory import OFFLOADED_LAYERS, offloaded
from paceline.spec.vocabulary import Offload


def room(block: Block, table: Table) -> float:
    """Bytes that plans of a block may reserve."""
    return table[RoomKey(block.mesh, block.kernels)]


def peaks(block: Block, table: Table) -> Array:
    """Bytes that are reserved on the fullest device: (shapes, orders, states)."""
    where, states = alike(block.states, "bucket_bytes")
    known = table[LinesKey.of(block)]
    lines = known.lines
    stages = table[StageBytesKey(block.mesh, block.kernels, states, known.stages)][:, known.stage]
    sizes = table[SizesKey(RankKey.of(block))]

    def by_shape(values: Array) -> Array:
        return values[:, None, None]

    layer, layers = by_shape(sizes.layer), lines.live * lines.layers
    here = np.minimum(OFFLOADED_LAYERS, layers) * layer
    away = np.array([state.offload is Offload.ACTIVATIONS for state in states])
    activations = np.where(
        away[:, None],
        offloaded(here, layers * layer, block.cluster),
        layers * layer + lines.live * lines.first * by_shape(sizes.embedding),
    )
    backward = np.where(lines.first, by_shape(sizes.first), by_shape(sizes.inner)) + stages["reduced"]
    comes = np.maximum(lines.last * by_shape(sizes.loss), backward) + stages["gathered"]
    slack = table.sized(block.plan(0)).framework.slack
    training = slack * (activations + comes + by_shape(sizes.fixed))
    needs = stages["states"] + np.maximum(training, stages["update"])
    fullest = np.maximum.reduceat(needs, known.starts, axis=-1)
    found = fullest[:, where].transpose(0, 2, 1)
    return np.asarray(found + device_memory.workspace_bytes(block.cluster.device))
