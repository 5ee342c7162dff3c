"""Memory of every plan of a block, as one array: the same figures as `predict/memory.py`, put together from
what factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from paceline.cost import memory as device_memory
from paceline.plan.space import Block, Choice, distinct
from paceline.plan.table import Row, Table
from paceline.predict.memory import (
    OFFLOADED_LAYERS,
    available_bytes,
    in_flight,
    kept,
    passing,
    placeholders,
    saved,
    update_bytes,
)

Array = NDArray[np.float64]


def room(block: Block, table: Table) -> float:
    """Bytes that plans of a block may reserve."""
    return available_bytes(table.step(block, block.shapes[0]))


def peaks(block: Block, table: Table) -> Array:
    """Bytes that are reserved on the fullest device: (shapes, orders, states)."""
    sizes, comes = _shapes(block, table)
    where, kinds = distinct(block.states, ("sharding", "shard", "reshard", "prefetch", "offload"))
    mesh = (block.cluster.name, block.mesh, block.common["precision"], block.common["framework"], len(where))
    slack, host = (
        table.step(block, block.shapes[0]).framework.slack,
        device_memory.HOST_BYTES / block.cluster.node_devices,
    )
    out = np.zeros((len(block.shapes), len(block.orders), len(kinds)))
    offloaded = np.array([state["offload"] == "activations" for state in kinds])
    for s, order in enumerate(block.orders):
        for row, index in table.held(block, order):
            live = in_flight(order["schedule"], index, block.mesh.pp, block.micro_batches, order["vpp"])
            whole = live * (row.layers * sizes[:, 0] + row.first * sizes[:, 1])
            part = np.maximum(
                min(OFFLOADED_LAYERS, live * row.layers) * sizes[:, 0], live * row.layers * sizes[:, 0] - host
            )
            activations = np.where(offloaded, part[:, None], whole[:, None])
            states, gathered, reduced, update = table.once(
                ("states", *mesh, row.layers, row.first, row.last),
                partial(_kept, block, order, row, kinds, table),
            )
            loss, layer, fixed = comes[row.first, row.last]
            come = np.maximum(loss, layer + reduced) + gathered + fixed
            out[:, s] = np.maximum(out[:, s], states + np.maximum(slack * (activations + come), update))
    return out[:, :, where] + device_memory.workspace_bytes(block.cluster.device)


def _shapes(block: Block, table: Table) -> tuple[Array, dict[tuple[bool, bool], Array]]:
    """Of each shape of a block: bytes that a layer and the embedding save; and, by which ends a rank holds,
    what comes and goes.
    """

    def find() -> tuple[Array, dict[tuple[bool, bool], Array]]:
        steps = [table.step(block, shape) for shape in block.shapes]
        inner, ends = (
            np.array([passing(step, Row(0, 1, both, both, 0, 0)) for step in steps]).T
            for both in (False, True)
        )
        fixed = np.array([placeholders(step) for step in steps])
        # the loss is a matter of the head alone, and what a layer needs one of the embedding
        comes = {
            (first, last): np.array([(ends if last else inner)[0], (ends if first else inner)[1], fixed])[
                :, :, None
            ]
            for first in (False, True)
            for last in (False, True)
        }
        return np.array([saved(step) for step in steps]), comes

    return table.once(("shapes", *block.alike), find)


def _kept(
    block: Block, order: Choice, row: Row, kinds: Sequence[Choice], table: Table
) -> tuple[Array, Array, Array, Array]:
    """Of some states: bytes kept for the whole step, whole for a while, reduced in a backward pass, and asked
    for by the update.
    """
    steps = [table.at(block, order, state) for state in kinds]
    found = [kept(step, row) for step in steps]
    return (
        np.array([of.parameters + of.gradients + of.optimizer for of in found]),
        np.array([of.gathered for of in found]),
        np.array([of.reduced for of in found]),
        np.array([update_bytes(step, row) for step in steps]),
    )
