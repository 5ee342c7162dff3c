"""Fit the constants of the cost model and write `src/paceline/cost/fitted/*.toml`.

    python -m paceline.bench.fit --data DIR [--only hopper]

DIR holds the measurement sets that do not ship with the repository; profiles of our own ship in
`measurements/`. Needs torch, torchvision and transformers, to capture the steps that were profiled.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.bench.fit import fp32, hopper
from paceline.cost.curves import from_tables

ROOT = Path(__file__).parents[4]
OUT = Path(__file__).parents[2] / "cost" / "fitted"


def toml(source: str, tables: Mapping[str, Any], inherits: str | None = None) -> str:
    """The text of a curve file."""
    lines = [f"source = {_value(source)}"]
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
        return "{ " + ", ".join(f'{k if k.isidentifier() else chr(34) + k + chr(34)} = {_value(v)}' for k, v in value.items()) + " }"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the measurement sets")
    parser.add_argument("--only", help="fit one file only")
    args = parser.parse_args()
    if args.only in (None, "hopper"):
        report: list[str] = []
        observations = hopper.from_profiles(ROOT / "measurements" / "h200" / "profiled_steps.jsonl.gz")
        observations += hopper.from_microbenchmarks(args.data / "h200" / "ops.jsonl")
        tables = hopper.fit(observations, report)
        source = "one H200, torch 2.11, CUDA 13: measurements/h200/profiled_steps.jsonl.gz and h200/ops.jsonl"
        (OUT / "hopper.toml").write_text(toml(source, tables))
        print("\n".join(report))
    if args.only in (None, "fp32"):
        report = []
        rows = fp32.read(args.data / "kernels")
        base = from_tables("hopper", {"hopper": tomllib.loads((OUT / "hopper.toml").read_text())})
        source = "FP32 operators of sitar-lab/NeuSight (kernels/) on "
        for name, members in fp32.ARCHITECTURES.items():
            tables = fp32.fit(rows, members, base, report)
            (OUT / f"{name}.toml").write_text(toml(source + ", ".join(members), tables, "hopper"))
        everything = [name for members in fp32.ARCHITECTURES.values() for name in members]
        for left_out in everything:
            others = [name for name in everything if name != left_out]
            tables = fp32.fit(rows, others, base, report)
            (OUT / f"without-{left_out}.toml").write_text(toml(source + ", ".join(others), tables, "hopper"))
        print("\n".join(report))


if __name__ == "__main__":
    main()
