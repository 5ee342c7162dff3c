"""Runs cells of the matrix on two ranks: python tests/train/matrix/matrix.py [STRATEGY,...] [SCRIPT,...] prints what came of each."""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from contracts import CONTRACTS, verdict
from scripts import SCRIPTS

from paceline.errors import RunError
from paceline.train.asynchronous import NAMES
from paceline.train.asynchronous.launch import Local
from paceline.train.launch import run

HERE = Path(__file__).parent
TIMEOUT_S = 400
#: ranks find the scripts, and Paceline where this process does
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])}


def outcomes(cells):
    """By cell, (strategy, script): what came of it, "equal", "within", "refused" or "failed", and why."""
    references = sorted({(f"reference {reference}", script) for strategy, script in cells
                         for reference in ("ddp", CONTRACTS[strategy].reference)})
    logs = launched([*references, *cells])
    return {cell: _outcome(cell, logs) for cell in cells}


def _outcome(cell, logs):
    strategy, script = cell
    contract = CONTRACTS[strategy]
    try:
        for wanted in ((f"reference {contract.reference}", script), cell):
            for rank, log in enumerate(logs[wanted]):
                assert "failed" not in log, f"{' '.join(wanted)}, rank {rank}: {log['failed']}"
        reference = logs[f"reference {contract.reference}", script]
        return verdict(contract, script, logs[cell], reference)
    except AssertionError as error:
        return "failed", str(error)


def launched(cells):
    """What both ranks logged in each cell: those that wait for each other in one pair of processes, the others in another."""
    free = [cell for cell in cells if cell[0] in NAMES]
    together = [cell for cell in cells if cell[0] not in NAMES]
    return {**_logs(together, _as_ranks), **_logs(free, _as_workers)}


def _as_ranks(cells, folder):
    run("cells:run", world=2, arguments={"cells": cells, "folder": folder}, environment=ENVIRONMENT, timeout_s=TIMEOUT_S)


def _as_workers(cells, folder):
    with Local(workers=2) as session, Path(folder, "said").open("wb") as output:
        session.start([sys.executable, str(HERE / "cells.py"), json.dumps(cells), folder], environment=ENVIRONMENT, output=output)
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


def main(strategies=",".join(CONTRACTS), scripts=",".join(SCRIPTS)):
    found = outcomes([(strategy, script) for strategy in strategies.split(",") for script in scripts.split(",")])
    for (strategy, script), (outcome, why) in found.items():
        print(f"{strategy:12} {script:14} {outcome:8} {why[-300:].strip()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
