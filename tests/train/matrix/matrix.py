"""Runs cells of the matrix on two ranks: python tests/train/matrix/matrix.py [STRATEGY,...] [SCRIPT,...]
prints what came of each.
"""

import json
import os
import re
import sys
import tempfile
import threading
from pathlib import Path
from unittest import mock

import torch
from contracts import CONTRACTS, reference_of, verdict
from scripts import SCRIPTS

from paceline.errors import RunError
from paceline.train.asynchronous import NAMES, launch, server
from paceline.train.asynchronous.launch import Local
from paceline.train.launch import run

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[2] / "docs" / "training.md"
CELLS = [(strategy, script) for strategy in CONTRACTS for script in SCRIPTS]
TIMEOUT_S = 400
#: ranks find the scripts, and Paceline where this process does
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])}


def outcomes(cells):
    """By cell, (strategy, script): what came of it ("equal", "within", "refused" or "failed"), and why."""
    references = sorted({_reference(cell) for cell in cells})
    logs = launched([*references, *cells])
    return {cell: _outcome(cell, logs) for cell in cells}


def _reference(cell):
    strategy, script = cell
    return f"reference {reference_of(strategy, script)}", script


def _outcome(cell, logs):
    strategy, script = cell
    try:
        for wanted in (_reference(cell), cell):
            for rank, log in enumerate(logs[wanted]):
                assert "failed" not in log, f"{' '.join(wanted)}, rank {rank}: {log['failed']}"
        return verdict(CONTRACTS[strategy], script, logs[cell], logs[_reference(cell)])
    except AssertionError as error:
        return "failed", str(error)


def launched(cells):
    """What both ranks logged in each cell: those that wait for each other in one pair of processes, the
    others in another.
    """
    free = [cell for cell in cells if cell[0] in NAMES]
    together = [cell for cell in cells if cell[0] not in NAMES]
    return {**_logs(together, _as_ranks), **_logs(free, _as_workers)}


def _as_ranks(cells, folder):
    run(
        "cells:run",
        world=2,
        arguments={"cells": cells, "folder": folder},
        environment=ENVIRONMENT,
        timeout_s=TIMEOUT_S,
    )


class ServerThread:
    """A parameter server in this process: a matter of milliseconds, where a process of its own needs seconds
    to start.
    """

    def __init__(self, place, number):
        self._thread = threading.Thread(target=server.run, args=(place, number), daemon=True)
        self._thread.start()

    def poll(self):
        return None if self._thread.is_alive() else 0

    def wait(self, timeout=None):
        self._thread.join(timeout)

    def kill(self):
        pass


def _as_workers(cells, folder):
    here = mock.patch.object(launch._Run, "_start", lambda run, number, _: ServerThread(run._place, number))
    with here, Local(workers=2) as session, Path(folder, "said").open("wb") as output:
        session.start(
            [sys.executable, str(HERE / "cells.py"), json.dumps(cells), folder],
            environment=ENVIRONMENT,
            output=output,
        )
        session.wait(TIMEOUT_S)


def _logs(cells, start):
    """A pair that dies or hangs in one cell goes on with the next in new processes."""
    left, logs = list(cells), {}
    while left:
        with tempfile.TemporaryDirectory() as folder:
            said = ""
            try:
                start(left, folder)
            except RunError as error:
                said = str(error)
                if Path(folder, "said").exists():
                    said += Path(folder, "said").read_text()[-3000:]
            done = 0
            for number, cell in enumerate(left):
                paths = [Path(folder, f"{number}.{rank}.pt") for rank in range(2)]
                if not all(path.exists() for path in paths):
                    break
                logs[cell] = [torch.load(path) for path in paths]
                done += 1
            if not done and "EADDRINUSE" in said:  # another process took the port that was free a moment ago
                continue
            if done < len(left):
                logs[left[done]] = [{"failed": f"the processes ended: {said}"}] * 2
            left = left[done + 1 :]
    return logs


# -- the table of docs/training.md -----------------------------------------------------------------------


def table(found):
    """All outcomes as the document shows them: a table, and what is said where a script is refused."""
    rows = ["| strategy | " + " | ".join(SCRIPTS) + " |", "|---|" + "---|" * len(SCRIPTS)]
    for strategy in CONTRACTS:
        words = CONTRACTS[strategy].words
        rows.append(f"| `{words}` | " + " | ".join(found[strategy, script][0] for script in SCRIPTS) + " |")
    lines = {}
    for (strategy, script), (outcome, why) in found.items():
        if outcome == "refused":
            lines.setdefault((script, gist(strategy, why)), []).append(f"`{strategy}`")
    refusals = [f"- `{script}` under {', '.join(names)}: {line}" for (script, line), names in lines.items()]
    return "\n".join([*rows, "", *refusals])


def gist(strategy, why):
    """What a refusal says, whichever strategy says it."""
    line = why.partition(": ")[2]
    return re.sub(rf"\b{re.escape(strategy)}\b", "STRATEGY", line).replace("'STRATEGY'", "STRATEGY")


def documented():
    """By cell, the outcome that docs/training.md tells; and the text of the whole section."""
    text = DOCUMENT.read_text().partition("<!-- matrix -->")[2].partition("<!-- end matrix -->")[0]
    rows = [
        [word.strip() for word in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    scripts = rows[0][1:] if rows else []
    names = {f"`{contract.words}`": strategy for strategy, contract in CONTRACTS.items()}
    found = {
        (names.get(row[0], row[0]), script): outcome
        for row in rows[2:]
        for script, outcome in zip(scripts, row[1:], strict=True)
    }
    return found, text


def main(strategies="", scripts=""):
    found = outcomes(
        [
            (strategy, script)
            for strategy in (strategies.split(",") if strategies else CONTRACTS)
            for script in (scripts.split(",") if scripts else SCRIPTS)
        ]
    )
    for (strategy, script), (outcome, why) in found.items():
        print(f"{strategy:12} {script:14} {outcome:8} {why[-300:].strip()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
