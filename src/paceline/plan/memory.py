"""Memory of every plan of a block, as one array: the same figures as `predict/memory.py`, put together from what factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.cost import memory as device_memory
from paceline.plan.space import Block, Choice
from paceline.plan.table import Row, Table
from paceline.predict.memory import OFFLOADED_LAYERS, Kept, available_bytes, in_flight, kept, passing, placeholders, saved, update_bytes

Array = NDArray[np.float64]


def room(block: Block, table: Table) -> float:
    """Bytes that plans of a block may reserve."""
    return available_bytes(table.step(block, block.shapes[0]))


def peaks(block: Block, table: Table) -> Array:
    """Bytes that are reserved on the fullest device: (shapes, orders, states)."""
    steps = [table.step(block, shape) for shape in block.shapes]
    sizes = np.array([saved(step) for step in steps])  # of a layer, and of the embedding
    out = np.zeros((len(block.shapes), len(block.orders), len(block.states)))
    fixed, host = placeholders(steps[0]), device_memory.HOST_BYTES / block.cluster.node_devices
    offloaded = np.array([state["offload"] == "activations" for state in block.states])
    for s, order in enumerate(block.orders):
        for row, index in table.held(block, order):
            live = in_flight(order["schedule"], index, block.mesh.pp, block.micro_batches, order["vpp"])
            whole = live * (row.layers * sizes[:, 0] + row.first * sizes[:, 1])
            part = np.maximum(min(OFFLOADED_LAYERS, live * row.layers) * sizes[:, 0], live * row.layers * sizes[:, 0] - host)
            activations = np.where(offloaded, part[:, None], whole[:, None])
            states, gathered, reduced, update = _states(block, order, row, table)
            loss, layer = np.array([passing(step, row) for step in steps]).T[:, :, None]
            come = np.maximum(loss, layer + reduced) + gathered + fixed
            out[:, s] = np.maximum(out[:, s], states + np.maximum(steps[0].framework.slack * (activations + come), update))
    return out + device_memory.workspace_bytes(block.cluster.device)


def _states(block: Block, order: Choice, row: Row, table: Table) -> tuple[Array, Array, Array, Array]:
    """Of each state of a block: bytes kept for the whole step, whole for a while, reduced in a backward pass, and asked for by the update."""
    names = ("sharding", "shard", "reshard", "prefetch", "offload")
    key = (block.cluster.name, block.mesh, block.common["precision"], block.common["framework"], row.layers, row.first, row.last,
           tuple(tuple(state.get(name) for name in names) for state in block.states))
    return table.once(("memory", *key), lambda: _kept(block, order, row, table, names))


def _kept(block: Block, order: Choice, row: Row, table: Table, names: Sequence[str]) -> tuple[Array, Array, Array, Array]:
    seen: dict[tuple[Any, ...], tuple[Kept, float]] = {}
    found = []
    for state in block.states:
        key = tuple(state.get(name) for name in names)
        if key not in seen:
            step = table.at(block, order, state)
            seen[key] = kept(step, row), update_bytes(step, row)
        found.append(seen[key])
    return (
        np.array([of.parameters + of.gradients + of.optimizer for of, _ in found]), np.array([of.gathered for of, _ in found]),
        np.array([of.reduced for of, _ in found]), np.array([update for _, update in found]))
