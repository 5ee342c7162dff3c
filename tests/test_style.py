"""Rules of the house that ruff has no rule for: class names, nested conditionals, the glossary."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: `paceline.train.Job` is a loop of a user, `paceline.sched.Job` what a cluster is given: users know both
SHARED_NAMES = {"Job"}


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def inner_conditionals(tree: ast.AST) -> list[int]:
    """Lines of conditional expressions that hold another one."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.IfExp)
        and any(
            isinstance(inner, ast.IfExp) for child in ast.iter_child_nodes(node) for inner in ast.walk(child)
        )
    ]


def test_a_public_class_name_is_defined_once():
    places = defaultdict(list)
    for path in modules("src/paceline"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 300
    doubled = {name: where for name, where in places.items() if len(where) > 1 and name not in SHARED_NAMES}
    assert not doubled


def test_no_conditional_expression_holds_another():
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules("src", "tests", "benchmarks", "examples")
        for line in inner_conditionals(ast.parse(path.read_text()))
    }
    assert not found, "use if statements, or name the inner value"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a if b else c", []),
        ("(a if b else c), (d if e else f)", []),
        ("a if b else c if d else e", [1]),
        ("x = f(a if b else c) if d else e", [1]),
    ],
)
def test_nested_conditionals_are_seen(text, lines):
    assert inner_conditionals(ast.parse(text)) == lines


def glossary() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.split("## Glossary")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
    return [word.strip() for row in rows if row not in ("word", "---") for word in row.split(",")]


def test_glossary_is_short():
    words = glossary()
    assert 20 < len(words) <= 40 and len(set(words)) == len(words)


def recipes() -> dict[str, str]:
    """Recipes of CONTRIBUTING.md by what they add."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Recipes")[1].split("\n## ")[0]
    return dict(re.findall(r"^\*\*([^*]+)\.\*\*(.*?)(?=^\*\*|\Z)", text, re.M | re.S))


def test_recipes_name_files_that_exist():
    missing = set()
    for body in recipes().values():
        for path in re.findall(r"`([\w./-]+/[\w.-]+\.\w+)`", body):
            place = path.rpartition("/")[0] if re.search(r"NAME|FAMILY", path) else path
            if not any((ROOT / root / place).exists() for root in ("", "src/paceline")):
                missing.add(path)
    assert len(recipes()) >= 11 and not missing


@pytest.mark.parametrize("what", ["A pipeline schedule", "A compressor"])
def test_recipes_are_short(what):
    first = recipes()[what].split(":")[0].split()
    counts = {"One": 1, "Two": 2, "Three": 3}
    listed = re.findall(r"`([\w./-]+/(?:NAME|__init__)\.py)`", recipes()[what])
    assert counts[first[0]] == len(listed) <= 3
