"""`python -m paceline.train.worker [--extend FILE.py] MODULE:FUNCTION JSON`: one rank of `launch.run`."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from paceline import extend
from paceline.errors import PacelineError
from paceline.train.comm import TIMEOUT_S
from paceline.train.job import join
from paceline.train.launch import RESULTS
from paceline.train.transport import said


def main(target: str, arguments: str) -> None:
    """Joins the group, calls the function, leaves its result for the launcher."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    join(timeout_s=TIMEOUT_S)
    module, _, name = target.partition(":")
    try:
        result = getattr(import_module(module), name)(**json.loads(arguments))
    except PacelineError as error:
        print(error, flush=True)
        os._exit(1)  # peers may hang: leave without waiting for their sockets
    Path(os.environ[RESULTS], f"{dist.get_rank()}.json").write_text(json.dumps(result))
    try:
        dist.barrier()
    except RuntimeError as error:
        print(f"rank {dist.get_rank()}: another rank is gone at the end, or hangs: {said(error)}", flush=True)
        os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*extend.taken(sys.argv[1:]))
