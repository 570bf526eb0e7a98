"""README's tree names every module, and nothing that is not there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("hetero_megatron", "layers", "models", "data", "planner", "benchmarks")
NAME = re.compile(r"[\w./-]+\.(?:py|yaml|toml|txt|md)")


def tree() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.split("## Tree", 1)[1]


def modules() -> set[str]:
    found: set[str] = set()
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            if not any(parent.is_symlink() for parent in path.parents) and path.name not in (
                "__init__.py",
                "__main__.py",
            ):
                found.add(path.name)
    return found


def test_every_module_has_its_line_in_the_tree() -> None:
    missing = sorted(name for name in modules() if name not in tree())
    assert not missing, f"README.md's tree does not name {missing}"


def test_the_tree_names_nothing_that_is_gone() -> None:
    present = (
        modules()
        | {path.name for path in ROOT.iterdir()}
        | {p.name for p in (ROOT / "recipes").rglob("*.yaml")}
    )
    gone = sorted({Path(name).name for name in NAME.findall(tree())} - present)
    assert not gone, f"README.md's tree names {gone}, which do not exist"
