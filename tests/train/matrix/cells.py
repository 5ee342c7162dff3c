"""One rank of the matrix: runs scripts under strategies, a fresh model for each, and leaves what they logged
in files.

    torchrun ... or `paceline.train.launch.run(
        "cells:run", world=2, arguments={"cells": [["overlap", "clipping"]], "folder": DIR})`
"""

import faulthandler
import functools
import inspect
import json
import os
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path

import references
import torch
from contracts import CONTRACTS
from scripts import SCRIPTS, STOP, snapshot

import paceline.train as pt
from paceline.errors import PacelineError

#: seconds that a cell may take; then the processes end
PATIENCE_S = 40


class Training:
    """The `parallelize` that a script is given, and the models that it was called with."""

    def __init__(self, strategy):
        kind, _, name = strategy.rpartition(" ")
        self.by_hand = references.REFERENCES[name] if kind == "reference" else None
        self.contract = None if self.by_hand else CONTRACTS[name]
        self.nets, self.models = [], []
        self.begun = {}

    def parallelize(self, net, optimizer):
        self.nets.append(net)
        self.begun |= snapshot(net)
        if self.by_hand:
            model, optimizer = self.by_hand(net, optimizer)
        else:
            for group in optimizer.param_groups:
                group["lr"] /= self.contract.updates
            model, optimizer = pt.parallelize(net, optimizer, plan=self.contract.words)
        self.models.append(model)
        return model, optimizer

    def close(self):
        """What a script's last lines are."""
        for ending in references.endings:
            ending()
        references.endings.clear()
        for model in self.models:
            if self.by_hand is None:
                pt.close(model)
        self.models.clear()

    def parameters(self):
        """Of the models that were parallelized last."""
        return functools.reduce(lambda all, net: all | snapshot(net), self.nets[-2:], {})


def cell(strategy, script, rank, folder, meet):
    """What one script logged under one strategy, or why it did not."""
    log = defaultdict(list)
    training = Training(strategy)
    begin = torch.get_rng_state()
    try:
        running = SCRIPTS[script](training.parallelize, log, rank, folder)
        if inspect.isgenerator(running):
            for _ in running:
                training.close()
                meet()
        training.close()
        log["parameters"], log["begun"] = training.parameters(), training.begun
    except PacelineError as error:
        passes = 4 if script == "accumulation" else 1
        saving = script == "resume" and len(log["losses"]) == STOP
        log["refused"] = f"{type(error).__name__}: {error}"
        log["at_once"] = len(log["losses"]) < passes or saving
        abandon(training)
    except Exception:
        log["failed"] = traceback.format_exc()
        abandon(training)
    torch.set_rng_state(begin)
    return dict(log)


def abandon(training):
    """After an error: what is left of the strategy is put away as well as it goes."""
    references.endings.clear()
    try:
        training.close()
    except Exception:
        traceback.print_exc()


class Meeting:
    """A place in a folder where both ranks wait for each other; also those that have no process group."""

    def __init__(self, folder, rank):
        self.folder, self.rank, self.times = folder, rank, 0

    def __call__(self):
        self.times += 1
        Path(self.folder, f"met{self.times}.{self.rank}").touch()
        while not Path(self.folder, f"met{self.times}.{1 - self.rank}").exists():
            time.sleep(0.002)


def run(cells, folder):
    """Each cell in turn; what rank r logged in cell i is in i.r.pt."""
    rank = int(os.environ["RANK"])
    meet = Meeting(folder, rank)
    for number, (strategy, script) in enumerate(cells):
        scratch = Path(folder, f"scratch{number}")
        scratch.mkdir(exist_ok=True)
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
        start = time.perf_counter()
        log = cell(strategy, script, rank, scratch, meet)
        log["seconds"] = time.perf_counter() - start
        partial = Path(folder, f"{number}.{rank}.partial")
        torch.save(log, partial)
        partial.rename(Path(folder, f"{number}.{rank}.pt"))
        meet()
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(json.loads(sys.argv[1]), sys.argv[2])
