"""Write what other tools need to run a plan, each file with the step time and memory to check a run against."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paceline.errors import SpecError, nearest
from paceline.plan.emit import accelerate, deepspeed, launch, megatron, torchtitan
from paceline.plan.emit.facts import Facts
from paceline.spec.planned import Planned

#: name -> files it makes, by name; it raises PlanError for what the tool cannot do
EMITTERS: Mapping[str, Callable[[Facts], dict[str, str]]] = {
    "torchrun": launch.torchrun, "fsdp2": launch.fsdp2, "megatron": megatron.files, "deepspeed": deepspeed.files, "accelerate": accelerate.files,
    "torchtitan": torchtitan.files, "slurm": launch.slurm,
}


def emit(planned: Planned, names: Sequence[str], folder: Path | str) -> list[Path]:
    """Writes the files of some tools for the best plan, and `plan.json` with what was predicted; all of them or none."""
    folder = Path(folder)
    for name in names:
        if name not in EMITTERS:
            near = nearest(name, list(EMITTERS))
            raise SpecError(f"--emit: unknown {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"expected some of {', '.join(EMITTERS)}"))
    facts = Facts.of(planned)
    to_do = deepspeed.to_do(facts) if "deepspeed" in names else []
    files = {"plan.json": json.dumps({**predicted(planned), "to_do": to_do}, indent=1) + "\n"}
    for name in names:
        files |= launch.slurm(facts, names) if name == "slurm" else EMITTERS[name](facts)
    return _write(files, folder)


def predicted(planned: Planned) -> dict[str, object]:
    """What `paceline check` compares a run with: the plan and its prediction."""
    best = planned.best
    return {"model": planned.model, "plan": str(best.plan), "cluster": best.cluster.name, "prediction": best.prediction.to_dict()}


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

