"""Imports point down only, and only the runtime and what stands above it knows torch (DESIGN §2)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS: tuple[
    list[tuple[str, ...]], ...
] = (  # files of one pair of brackets are one room; rooms of one floor do not import each other
    [("errors",), ("trace_file",)],
    [("cluster", "device_specs"), ("annotation",)],
    [("comm",)],
    [("graph",)],
    [("pipeline",)],
    [
        (
            "strategy",
            "strategy_check",
            "layout",
            "program",
            "switch_plan",
            "switch_rounds",
            "shrink",
            "losses",
            "recompute",
            "activations",
            "memory",
        )
    ],
    [("runtime",)],
    [("layers",), ("data",)],
    [("models",)],
    [("planner",)],
    [
        (
            "recipe",
            "recipe_data",
            "preparing",
            "recipe_model",
            "recipe_plan",
            "strategy_yaml",
            "recipe_check",
            "recipe_sections",
            "recipe_strategy",
            "recipe_strategy_sections",
            "recipe_text",
            "recipe_refusals",
            "recipes",
            "report",
            "metrics",
            "watch",
            "starting",
            "run",
            "run_picture",
            "data_path",
            "profile_file",
            "turns",
            "length_strategies",
            "journal",
            "loop",
            "train",
            "next_program",
            "tracing",
            "pace",
            "stragglers",
            "change_request",
            "elastic",
            "recipe_elastic",
            "cli",
            "__main__",
        )
    ],
)
ROOM = {name: (floor, room) for floor, rooms in enumerate(FLOORS) for room in rooms for name in room}
TOP = ("layers", "data", "models", "planner", "recipes")


def faults(module: str, source: str, is_package: bool = False) -> list[str]:
    """What the imports of `module`, such as `hetero_megatron.comm.steps`, do wrong."""
    name = module.split(".")[1]
    if name not in ROOM:
        return [f"{module}: {name} has no floor in this test; give it one"]
    floor, room = ROOM[name]
    found = []
    for line, target in _imports(module, source, is_package):
        first, _, rest = target.partition(".")
        other = ROOM.get(rest.split(".")[0]) if first == "hetero_megatron" else None
        if first in TOP:
            found.append(f"{module}:{line} imports {target}; write hetero_megatron.{target}")
        if other and other[1] != room and other[0] >= floor:
            found.append(f"{module}:{line} (floor {floor}) imports {target} (floor {other[0]})")
        if floor <= 5 and first == "torch" and module != "hetero_megatron.graph.trace":
            found.append(f"{module}:{line} (floor {floor}) imports {target}; floors 0-5 know no torch")
        if floor <= 5 and (target + ".").startswith("torch.distributed."):
            found.append(f"{module}:{line} (floor {floor}) imports {target}; floors 0-5 know no processes")
    return found


def _imports(module: str, source: str, is_package: bool) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level + is_package or None] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def _files() -> list[tuple[str, Path]]:
    """Module name and path of every file; the five top-level folders under the name they are imported by."""
    package = ROOT / "hetero_megatron"
    found = []
    for base, entries in ((package, package.iterdir()), (ROOT, (ROOT / top for top in TOP))):
        for entry in sorted(entry for entry in entries if not entry.is_symlink()):
            for path in sorted(entry.rglob("*.py")) if entry.is_dir() else [entry]:
                if path.suffix == ".py" and path != package / "__init__.py":
                    name = ".".join(("hetero_megatron", *path.relative_to(base).with_suffix("").parts))
                    found.append((name.removesuffix(".__init__"), path))
    return found


def test_imports_point_down_only() -> None:
    files = _files()
    assert {module.split(".")[1] for module, _ in files} >= {"errors", "comm", "pipeline", *TOP}
    assert [
        fault
        for module, path in files
        for fault in faults(module, path.read_text(encoding="utf-8"), path.name == "__init__.py")
    ] == []


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        (
            "comm.steps",
            "from hetero_megatron.graph.nodes import Node",
            "(floor 2) imports hetero_megatron.graph",
        ),
        ("comm.steps", "from ..graph import nodes", "imports hetero_megatron.graph.nodes (floor 3)"),
        ("comm.steps", "def f():\n    from hetero_megatron import runtime", "comm.steps:2 (floor 2) imports"),
        (
            "layers.norm",
            "import hetero_megatron.data.rows",
            "(floor 7) imports hetero_megatron.data.rows (floor 7)",
        ),
        (
            "cluster",
            "from hetero_megatron.annotation import Region",
            "imports hetero_megatron.annotation.Region",
        ),
        (
            "runtime.session",
            "from hetero_megatron.layers import Linear",
            "(floor 6) imports hetero_megatron.layers",
        ),
        ("program", "import torch", "floors 0-5 know no torch"),
        ("graph.trace", "from torch import distributed as d", "floors 0-5 know no processes"),
        ("models.llama", "from layers.linear import Linear", "write hetero_megatron.layers.linear.Linear"),
        ("helpers", "", "helpers has no floor"),
    ],
)
def test_a_made_up_import_that_points_up_or_sideways_is_found(module: str, source: str, fault: str) -> None:
    found = faults(f"hetero_megatron.{module}", source)
    assert len([text for text in found if fault in text]) == 1, found


def test_imports_that_point_down_or_stay_in_the_room_are_fine() -> None:
    assert (
        faults(
            "hetero_megatron.graph.trace", "import torch.fx\nfrom . import nodes\nfrom ..comm import steps"
        )
        == []
    )
    assert (
        faults("hetero_megatron.comm", "from .steps import Copy\nfrom ..errors import HeteroError", True)
        == []
    )
    assert (
        faults("hetero_megatron.train", "from hetero_megatron.recipe import Recipe\nimport torch.distributed")
        == []
    )
