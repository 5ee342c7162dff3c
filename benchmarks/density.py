"""How much a reader must hold in mind: syntax nodes of the code, large functions, nested conditional
expressions, long lines.

    python benchmarks/density.py             # the folders that the redesign of November 2026 is measured by
    python benchmarks/density.py cost sim    # others, below src/paceline

Nodes are those of Python's `ast`. BEFORE holds the same counts of revision 3d91dac, from before the redesign;
`sync` did not exist then, and what it holds was in the other three folders.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "paceline"
FOLDERS = ("predict", "plan", "train/strategies", "sync")
#: syntax nodes of a function above which it is counted as large
LARGE = 250
WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Density:
    """Counts over some files."""

    lines: int = 0
    nodes: int = 0
    functions: int = 0
    large: int = 0
    nested: int = 0
    long_lines: int = 0

    def __add__(self, other: Density) -> Density:
        return Density(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


BEFORE = Density(lines=8639, nodes=87_993, functions=662, large=96, nested=5, long_lines=867)


def measure(path: Path) -> Density:
    """The counts of one file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.splitlines()
    found = list(functions(tree))
    return Density(
        lines=len(lines),
        nodes=size(tree),
        functions=len(found),
        large=sum(size(f) > LARGE for f in found),
        nested=sum(1 for _ in nested_conditionals(tree)),
        long_lines=sum(len(line) > WIDTH for line in lines),
    )


def size(tree: ast.AST) -> int:
    """Syntax nodes of a tree."""
    return sum(1 for _ in ast.walk(tree))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods, those inside others too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def nested_conditionals(tree: ast.AST) -> Iterator[ast.IfExp]:
    """Conditional expressions that have another one as a branch or a condition."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp) and any(
            isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse)
        ):
            yield node


def folder(name: str) -> Density:
    """The counts of a folder of `src/paceline`; of one that does not exist, nothing."""
    return sum(map(measure, sorted((SOURCE / name).rglob("*.py"))), Density())


def main() -> None:
    names = sys.argv[1:] or list(FOLDERS)
    print(f"{'folder':20s}" + "".join(f"{name:>12s}" for name in Density.__slots__) + "  nodes/line")
    total = Density()
    for name in names:
        found = folder(name)
        total += found
        show(name, found)
    show("together", total)
    if not sys.argv[1:]:
        print(
            f"before: {BEFORE.nodes:,} nodes, {BEFORE.large} large functions; now"
            f" {total.nodes / BEFORE.nodes - 1:+.1%} nodes"
        )


def show(name: str, found: Density) -> None:
    """One line of the table."""
    columns = "".join(f"{getattr(found, column):12,d}" for column in Density.__slots__)
    print(f"{name:20s}{columns}{found.nodes / max(1, found.lines):12.1f}")


if __name__ == "__main__":
    main()
