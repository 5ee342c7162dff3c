"""Fit the constants of the cost model and write `src/paceline/cost/fitted/*.toml`.

    python -m paceline.bench.fit --data DIR
    python -m paceline.bench.fit --only hopper

DIR holds the measurement sets that do not ship with the repository; ours do. Needs torch, torchvision,
timm and transformers, to capture the steps that were measured.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.bench.fit import collectives, compiled, fp16, fp32, hopper, steps
from paceline.cost.curves import from_tables

PROFILES = Path(__file__).parents[4] / "measurements" / "h200" / "profiled_steps.jsonl.gz"
OUT = Path(__file__).parents[2] / "cost" / "fitted"
SHIPPED = Path(__file__).parents[1] / "data"
#: file -> the one it departs from, the table it is fitted to, classes of operators told apart, reader
FROM_STEPS = {
    "rtx3090": ("hopper", "timm_train_rtx3090.csv", steps.VISION, steps.timm_steps),
    "kepler": ("pascal", "tf_cnn_benchmarks_2017.csv", steps.COARSE, steps.k80_steps),
}


def toml(
    source: str, tables: Mapping[str, Any], inherits: str | None = None, devices: Sequence[str] = ()
) -> str:
    """The text of a curve file; `devices` are those whose operators and whole steps it was fitted to."""
    lines = [f"source = {_value(source)}"]
    if devices:
        lines.append(f"devices = {_value(devices)}")
    if inherits:
        lines.append(f"inherits = {_value(inherits)}")
    for shape, groups in tables.items():
        if not groups:
            continue
        lines += ["", f"[{shape}]"]
        lines += [f'"{group}" = {_value(value)}' for group, value in sorted(groups.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            "{ "
            + ", ".join(
                f"{k if k.isidentifier() else chr(34) + k + chr(34)} = {_value(v)}" for k, v in value.items()
            )
            + " }"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with the measurement sets that do not ship")
    parser.add_argument(
        "--only", choices=("hopper", "fp32", *FROM_STEPS, "collectives"), help="fit these files only"
    )
    args = parser.parse_args()
    if args.only in (None, "hopper"):
        fit_hopper()
    if args.only != "hopper" and args.data is None:
        parser.error("this needs --data: the folder that holds kernels/, kernels_fp16/ and published/")
    if args.only in (None, "fp32"):
        fit_fp32(args.data)
    for name in FROM_STEPS:
        if args.only in (None, name):
            fit_steps(name, args.data / "published")
    if args.only in (None, "collectives"):
        fit_collectives(args.data)


def fit_hopper() -> None:
    report: list[str] = []
    observations = hopper.from_profiles(PROFILES)
    observations += hopper.from_microbenchmarks(SHIPPED / "h200" / "ops.jsonl.gz")
    tables = hopper.fit(observations, report)
    compiled.fit(PROFILES, tables, report)
    source = "one H200, torch 2.11, CUDA 13: measurements/h200/profiled_steps.jsonl.gz and h200/ops.jsonl"
    (OUT / "hopper.toml").write_text(toml(source, tables, devices=["h200"]))
    print("\n".join(report))


def fit_fp32(folder: Path) -> None:
    report: list[str] = []
    rows = fp32.read(folder / "kernels")
    base = from_tables("hopper", {"hopper": tomllib.loads((OUT / "hopper.toml").read_text())})
    wanted = dict(fp32.ARCHITECTURES)
    wanted |= {
        f"without-{name}": fp32.others(name) for members in fp32.ARCHITECTURES.values() for name in members
    }
    for name, members in wanted.items():
        report.append(f"-- {name}")
        tables = fp32.fit(rows, members, base, report)
        source = "FP32 operators of sitar-lab/NeuSight (kernels/) on " + ", ".join(members)
        if name == "ampere":
            tables = {
                shape: {**tables.get(shape, {}), **more}
                for shape, more in fp16.fit(folder / "kernels_fp16", base, report).items()
            }
            source += "; FP16 operators of DebarghaG/estimate-train-time (kernels_fp16/) on an A100-SXM-80GB"
        (OUT / f"{name}.toml").write_text(toml(source, tables, "hopper"))
    print("\n".join(report))


def fit_steps(name: str, folder: Path) -> None:
    base, source, classes, read = FROM_STEPS[name]
    tables = {name: tomllib.loads((OUT / f"{name}.toml").read_text()) for name in ("hopper", "pascal")}
    report = [f"-- {name}"]
    rows = list(read(folder / source, from_tables(base, tables)))
    (OUT / f"{name}.toml").write_text(
        toml(f"whole training steps: {source}", steps.fit(rows, classes, report), base)
    )
    print("\n".join(report))


def fit_collectives(folder: Path) -> None:
    report: list[str] = []
    source = (
        "published/collectives_busbw.csv, kernels_fp16/*/nccl_* (DebarghaG/estimate-train-time, MIT),"
        " h200/gloo_loopback_16core.jsonl"
    )
    source += (
        "; not measured, and only assumed: links aries, efa, ethernet, ici, pcie, qpi, slingshot and other of"
        " nccl, and all of mpi"
    )
    (OUT / "collectives.toml").write_text(toml(source, collectives.fit(folder, report)))
    print("\n".join(report))


if __name__ == "__main__":
    main()
