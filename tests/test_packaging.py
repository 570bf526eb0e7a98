"""Packaging: the links, the names, and the promises of Makefile and setup.py."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("layers", "data", "models", "planner", "recipes")


@pytest.mark.parametrize("folder", LINKED)
def test_a_top_level_folder_is_the_package_through_a_relative_link(folder: str) -> None:
    assert os.readlink(ROOT / "hetero_megatron" / folder) == f"../{folder}"
    assert (ROOT / folder / "__init__.py").is_file()


@pytest.mark.parametrize("folder", LINKED)
def test_a_top_level_folder_refuses_its_bare_name(folder: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {folder}"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"ImportError: import hetero_megatron.{folder}, not {folder}" in shown.stderr


def setup_arguments() -> dict[str, ast.expr]:
    """The arguments of setup(), without running it."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    call = next(call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "setup")
    return {keyword.arg or "": keyword.value for keyword in call.keywords}


def test_setup_names_the_package_its_extras_and_its_command() -> None:
    arguments = setup_arguments()
    extras = ast.literal_eval(arguments["extras_require"])
    assert ast.literal_eval(arguments["name"]) == "hetero-megatron"
    assert ast.literal_eval(arguments["python_requires"]) == ">=3.10"
    assert "torch>=2.10" in ast.literal_eval(arguments["install_requires"])
    assert extras["gpu"] == ["transformer-engine[pytorch]", "flash-attn"]
    assert ast.literal_eval(arguments["entry_points"]) == {
        "console_scripts": ["hetero-megatron = hetero_megatron.cli.main:main"]
    }


def test_apex_is_never_installed_from_the_index() -> None:
    arguments = setup_arguments()
    wanted = [*ast.literal_eval(arguments["install_requires"])]
    wanted += [name for names in ast.literal_eval(arguments["extras_require"]).values() for name in names]
    assert not any("apex" in name for name in wanted)
    assert "apex" not in (ROOT / "constraints.txt").read_text()


def test_constraints_pin_every_direct_dependency() -> None:
    arguments = setup_arguments()
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    wanted = [*ast.literal_eval(arguments["install_requires"])]
    wanted += ast.literal_eval(arguments["extras_require"])["dev"]
    assert {name.split(">=")[0] for name in wanted} <= pinned
    assert "torch==2.13.0\n" in (ROOT / "constraints.txt").read_text()


def test_an_environment_that_is_not_ours_keeps_its_torch() -> None:
    shown = subprocess.run(
        [sys.executable, ROOT / ".ci" / "constraints.py", ROOT / "constraints.txt"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    from importlib.metadata import version

    assert shown.count(f"torch=={version('torch')}") == 1
    assert not any(line.startswith("numpy==") for line in shown)


def make(*arguments: str, **environment: str) -> str:
    """What make would do, without doing it."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = ["make", "--no-print-directory", "-C", str(ROOT), *arguments]
    return subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=True).stdout


def test_make_alone_lists_its_targets() -> None:
    shown = make()
    for target in ("help", "venv", "pretrain", "test", "lint", "types"):
        assert f"make {target} " in shown


def test_make_creates_and_uses_its_own_environment() -> None:
    shown = make("--dry-run", "--always-make", "pretrain")
    assert "python3 -m venv .venv" in shown
    assert "-m pip install --quiet -c constraints.txt -e '.[dev]'" in shown
    assert ".venv/bin/python -m hetero_megatron pretrain recipes/quickstart.yaml" in shown


@pytest.mark.parametrize("variable", ["PYTHON", "VIRTUAL_ENV", "CONDA_PREFIX"])
def test_make_uses_the_interpreter_that_is_given_or_active(variable: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    value = str(tmp_path / "bin" / "python") if variable == "PYTHON" else str(tmp_path)
    shown = make("--dry-run", "--always-make", "test", **{variable: value})
    assert "venv .venv" not in shown
    assert f"{tmp_path}/bin/python .ci/constraints.py constraints.txt" in shown
    assert f"{tmp_path}/bin/python -m pytest -q" in shown


def test_make_refuses_an_interpreter_that_does_not_run() -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        make("venv", "PYTHON=/nowhere/python")
    assert "/nowhere/python does not run" in failed.value.stderr
