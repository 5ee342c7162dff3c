"""The search for the best plan: a process that reports progress, and when stopped gives the best so far."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from paceline import extend
from paceline.errors import PacelineError, RunError, UnknownName
from paceline.spec.planned import Planned
from paceline.web.panels import problem
from paceline.web.scenario import Scenario, Sources

#: searches that run at a time, and that are kept
MOST_RUNNING, MOST_KEPT = 2, 16
#: seconds between two reports, and that a search has to end after it was stopped
EVERY_S, PATIENCE_S = 0.1, 10.0


@dataclass(slots=True, kw_only=True)
class Search:
    """One search: how far it is, and what it found."""

    key: str
    scenario: Scenario
    objective: str
    state: str = "running"
    doing: str = "starting"
    done: int = 0
    total: int = 0
    started_s: float = field(default_factory=time.monotonic)
    planned: Planned | None = None
    problem: dict[str, Any] | None = None

    def status(self) -> dict[str, Any]:
        """Plain data for the page."""
        return {
            "id": self.key,
            "state": self.state,
            "doing": self.doing,
            "done": self.done,
            "total": self.total,
            "elapsed_s": time.monotonic() - self.started_s,
            "problem": self.problem,
        }


class Searches:
    """All searches of one server."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._found: dict[str, Search] = {}
        self._processes: dict[str, Any] = {}

    def start(self, scenario: Scenario, objective: str) -> Search:
        """A new search; refused where enough are running."""
        if sum(search.state == "running" for search in self._found.values()) >= MOST_RUNNING:
            raise RunError(f"{MOST_RUNNING} searches are running; stop one, or wait")
        search = Search(key=secrets.token_hex(8), scenario=scenario, objective=objective)
        context = get_context("spawn")
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(
            target=_run, args=(writer, scenario, objective, self._sources, extend.loaded()), daemon=True
        )
        process.start()
        writer.close()
        self._keep(search, process)
        threading.Thread(target=_listen, args=(search, reader, process), daemon=True).start()
        return search

    def _keep(self, search: Search, process: Any) -> None:
        self._found[search.key], self._processes[search.key] = search, process
        over = [key for key, one in self._found.items() if one.state != "running"]
        for key in over[: max(0, len(self._found) - MOST_KEPT)]:
            del self._found[key], self._processes[key]

    def get(self, key: str) -> Search:
        """The search of a key."""
        if key not in self._found:
            raise UnknownName("search", key, ())
        return self._found[key]

    def stop(self, key: str) -> Search:
        """Asks a search for the best so far; one that does not answer in time is killed."""
        search, process = self.get(key), self._processes[key]
        if search.state == "running" and process.is_alive():
            search.doing = "stopping"
            os.kill(process.pid, signal.SIGINT)
            killer = threading.Timer(PATIENCE_S, process.kill)
            killer.daemon = True
            killer.start()
        return search

    def close(self) -> None:
        """Ends all."""
        for process in self._processes.values():
            if process.is_alive():
                process.kill()


def _listen(search: Search, reader: Connection, process: Any) -> None:
    """Takes in what the process of a search says, until it has ended."""
    try:
        while search.state == "running":
            kind, value = reader.recv()
            if kind == "progress":
                search.doing, search.done, search.total = value
            elif kind == "planned":
                search.planned, search.state = value, "stopped" if value.interrupted else "done"
            else:
                search.problem, search.state = value, "failed"
    except EOFError:
        search.problem = {"message": "the search was stopped before it had a plan", "offers": []}
        search.state = "stopped"
    finally:
        reader.close()
        process.join()


def _run(
    writer: Connection, scenario: Scenario, objective: str, sources: Sources, extensions: tuple[str, ...]
) -> None:
    """In the process of a search: plans, and sends progress, then the answer."""
    from paceline.api import plan

    extend.load_all(extensions)
    try:
        subject = sources.subject(scenario)
        found = plan(
            subject.model,
            subject.cluster,
            gbs=subject.plan.gbs or None,
            seq=subject.plan.seq or None,
            objective=objective,
            pareto=["time", "memory"],
            processes=1,
            progress=_reporter(writer),
        )
        writer.send(("planned", found))
    except PacelineError as error:
        writer.send(("problem", problem(error)))
    except KeyboardInterrupt:
        pass  # stopped before there was any plan: the listener says so


def _reporter(writer: Connection) -> Callable[[str, int, int, float], None]:
    """Sends progress, ten times a second at most."""
    last = 0.0

    def report(doing: str, done: int, total: int, best: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= EVERY_S:
            last = now
            writer.send(("progress", (doing, done, total)))

    return report
