"""Write what other tools need to run a plan, each file with the step time and memory to check a run against.

`register` adds a tool of one's own.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import SpecError, UnknownName
from paceline.plan.emit import accelerate, deepspeed, launch, megatron, torchtitan
from paceline.plan.emit.emitter import EMITTERS, Emitter, register
from paceline.plan.emit.facts import Facts
from paceline.spec.planned import Planned

__all__ = ["EMITTERS", "Emitter", "Facts", "emit", "predicted", "register"]

for _name, _title, _files in (
    ("torchrun", "a training script with paceline.train, and the command that starts it", launch.torchrun),
    ("fsdp2", "a function that lays a model out on a DeviceMesh", launch.fsdp2),
    ("megatron", "arguments of Megatron-LM", megatron.files),
    ("deepspeed", "a configuration of DeepSpeed", deepspeed.files),
    ("accelerate", "a configuration of Accelerate", accelerate.files),
    ("torchtitan", "arguments of torchtitan", torchtitan.files),
    ("slurm", "a batch script that starts one torchrun per node", launch.slurm),
):
    register(Emitter(name=_name, title=_title, files=_files))


def emit(planned: Planned, names: Sequence[str], folder: Path | str) -> list[Path]:
    """Writes the files of some tools for the best plan, and `plan.json` with what was predicted; all of them
    or none.
    """
    folder = Path(folder)
    for name in names:
        if name not in EMITTERS:
            raise UnknownName("tool of --emit", name, EMITTERS, f"known: {', '.join(EMITTERS)}")
    facts = Facts.of(planned, names)
    to_do = deepspeed.to_do(facts) if "deepspeed" in names else []
    files = {"plan.json": json.dumps({**predicted(planned), "to_do": to_do}, indent=1) + "\n"}
    for name in names:
        files |= EMITTERS[name].files(facts)
    return _write(files, folder)


def predicted(planned: Planned) -> dict[str, object]:
    """What `paceline check` compares a run with: the plan and its prediction."""
    best = planned.best
    return {
        "model": planned.model,
        "plan": str(best.plan),
        "cluster": best.cluster.name,
        "prediction": best.prediction.to_dict(),
    }


def _write(files: Mapping[str, str], folder: Path) -> list[Path]:
    """Puts files into a folder; nothing is left there where one of them cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            for name, text in files.items():
                path = Path(place) / name
                path.write_text(text, encoding="utf-8")
                if name.endswith(".sh"):
                    path.chmod(0o755)
            for name in files:
                shutil.move(str(Path(place) / name), folder / name)
    except OSError as error:
        raise SpecError(f"cannot write to {str(folder)!r}: {error.strerror}") from None
    return [folder / name for name in files]
