"""One host of a measurement: waits for a part in a run, plays it, reports.

python -m paceline.bench.throughput.agent RANK        meets the others where PACELINE_RENDEZVOUS says
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from paceline.bench.throughput.jobs import JOBS
from paceline.train.asynchronous import server, strategies
from paceline.train.asynchronous.remote import SLOW, Distributed
from paceline.train.asynchronous.store import VARIABLE, Rendezvous, RunStore

#: steps of each worker that are not counted
WARM_UP = 2
#: what is kept of a step
FIELDS = (
    "at_s",
    "compute_s",
    "round_s",
    "up_s",
    "update_s",
    "down_s",
    "waited_s",
    "staleness",
    "leads",
    "lead_s",
)


def serve_parts(place: Rendezvous, rank: int) -> None:
    """Plays one part after another until the part is `end`."""
    torch.set_num_threads(1)
    store, number = place.store(), 0
    store.set(f"here/{rank}", "1")
    while True:
        key = f"part/{rank}/{number}"
        while not store.check([key]):
            time.sleep(0.004)
        part = json.loads(store.get(key))
        if part["role"] == "end":
            return
        try:
            result = _work(part, place) if part["role"] == "worker" else _serve(part, place)
        except Exception:
            result = {"error": traceback.format_exc(limit=4)}
        store.set(f"result/{rank}/{number}", json.dumps(result))
        number += 1


def _inside(part: dict[str, Any], place: Rendezvous) -> Rendezvous:
    return Rendezvous(host=place.host, port=place.port, run=part["run"], timeout_s=30.0)


def _serve(part: dict[str, Any], place: Rendezvous) -> dict[str, Any]:
    return server.run(_inside(part, place), part["number"]).report()


def _work(part: dict[str, Any], place: Rendezvous) -> dict[str, Any]:
    """Steps for a while; the end of each and what it was made of."""
    inside = _inside(part, place)
    os.environ.update(
        {VARIABLE: str(inside), "PACELINE_SERVERS": str(part["servers"]), SLOW: str(part.get("slow", 1.0))}
    )
    job = JOBS[part["model"]]
    torch.manual_seed(0)
    model = job.build()
    plain = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    options = {"overlap": part["overlap"], **({"pace_Bps": part["pace_Bps"]} if part.get("pace_Bps") else {})}
    model, optimizer = strategies()[f"ps-{part['mode']}"](
        model, plain, workers=part["workers"], checkpoint_every=10**9, **options
    )
    x, y = job.data(seed=part["number"])
    _together(inside.store(), part["workers"])
    rows = _steps(model, optimizer, x, y, part["seconds"])
    optimizer.close()
    return {"steps": rows, "parameters": optimizer.flat.count}


def _steps(
    model: torch.nn.Module, optimizer: Distributed, x: torch.Tensor, y: torch.Tensor, seconds: float
) -> list[list[Any]]:
    rows: list[list[Any]] = []
    begin = last = time.time()
    while last - begin < seconds or len(rows) < WARM_UP + 3:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        now, trip = time.time(), optimizer.last
        assert trip is not None
        times = (
            now,
            now - last - trip.round_s,
            trip.round_s,
            trip.up_s,
            trip.update_s,
            trip.down_s,
            trip.waited_s,
        )
        rows.append(
            [
                *(round(value, 6) for value in times),
                trip.staleness,
                [round(lead, 6) for lead in trip.leads],
                round(trip.lead_s, 6),
            ]
        )
        last = now
        if last - begin > 6 * seconds + 5:
            break
    return rows


def _together(store: RunStore, count: int) -> None:
    """Waits until all workers are this far."""
    store.add("ready", 1)
    while store.add("ready", 0) < count:
        time.sleep(0.002)


if __name__ == "__main__":
    serve_parts(Rendezvous.parse(os.environ[VARIABLE]), int(sys.argv[1]))
