"""Asks the daemon of a state folder."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import RunError, SpecError
from paceline.sched.live.job_spec import JobSpec
from paceline.sched.live.server import ENDPOINT
from paceline.sched.nodes import ClusterShape


def default_state() -> Path:
    """`$XDG_STATE_HOME/paceline`, else `~/.local/state/paceline`."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "paceline"


class DaemonClient:
    """One daemon, found by its state folder."""

    def __init__(self, state: Path) -> None:
        self.state = state
        try:
            found = json.loads((state / ENDPOINT).read_text())
            self._port, self._token = int(found["port"]), str(found["token"])
        except FileNotFoundError:
            raise RunError(
                f"no scheduler runs in {state}; start one with: paceline schedule --state {state}"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"cannot read {state / ENDPOINT}: {error}") from None

    def ask(self, do: str, **more: Any) -> Any:
        """The answer to one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=90)
        try:
            connection.request(
                "POST", "/", json.dumps({"do": do, **more}), {"Authorization": f"Bearer {self._token}"}
            )
            body = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RunError(
                f"the scheduler of {self.state} does not answer ({error or type(error).__name__}); start it"
                f" again with: paceline schedule --state {self.state}"
            ) from None
        finally:
            connection.close()
        if "error" in body:
            raise SpecError(body["error"])
        return body["ok"]

    def submit(self, specs: Sequence[JobSpec]) -> list[str]:
        """Hands in jobs, with the speeds that models and profiles say they have there; returns the names of
        those that were new.
        """
        found = self.ask("cluster")
        shape = ClusterShape(
            devices=tuple(found["devices"]),
            kinds=tuple(found["kinds"]),
            racks=tuple(found["racks"]),
            name=found["name"],
        )
        specs = [spec.resolved(shape) for spec in specs]
        return [str(name) for name in self.ask("submit", orders=[dict(spec.fields) for spec in specs])]
