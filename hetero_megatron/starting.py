"""Where a run begins: anew, or from a checkpoint and with what of it (`checkpoint` in a recipe)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_megatron.data.samples import DataPosition
from hetero_megatron.errors import CheckpointError
from hetero_megatron.program import Program
from hetero_megatron.recipe import Recipe
from hetero_megatron.runtime.checkpoint_choice import choose
from hetero_megatron.runtime.checkpoint_parts import shapes_of
from hetero_megatron.runtime.checkpoint_read import SavedState
from hetero_megatron.runtime.learning_rate import resumed_schedule
from hetero_megatron.runtime.optimizer import OptimizerSettings

Say = Callable[[str], None]


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        saved: the checkpoint to go on from, None to start anew.
        iteration: how many steps were made before.
        position: where the data goes on.
        settings: the optimizer's, with the learning-rate schedule that the run follows.
        memory: what the trainer's watches had seen, and how many tokens were trained on.
    """

    saved: SavedState | None
    iteration: int
    position: DataPosition
    settings: OptimizerSettings
    memory: Mapping[str, Any]


def find_start(
    recipe: Recipe,
    program: Program,
    settings: OptimizerSettings,
    identity: Mapping[str, object],
    say: Say,
) -> Start:
    """Choose the checkpoint and compare it with the recipe: its model, its data, its schedule.

    Raises:
        CheckpointError: the one that is asked for is not there or not whole, or is of another model or other data.
    """
    path = _chosen(recipe, say)
    if path is None:
        return Start(None, 0, DataPosition(), settings, {})
    saved = SavedState.open(path)
    saved.check(shapes_of(program))
    payload = saved.payload
    if "settings" in payload:
        override = recipe.checkpoint.override_lr_schedule
        settings, notices = resumed_schedule(payload["settings"], settings, override)
        for notice in notices:
            say(notice)
    position = DataPosition(saved.iteration)
    if "position" in payload and not recipe.checkpoint.new_data:
        _compare_data(path, payload["identity"], identity)
        position = DataPosition(saved.iteration, payload["position"])
    say(f"going on from {path}: iteration {saved.iteration}, sample {position.sample}")
    return Start(saved, saved.iteration, position, settings, payload.get("memory", {}))


def _chosen(recipe: Recipe, say: Say) -> Path | None:
    """The run's own checkpoint, or when it has none the newest of `checkpoint.load`."""
    section, folder = recipe.checkpoint, Path(recipe.output.folder)
    path = choose(folder, section.resume, say)
    if path is not None or section.load is None:
        return path
    found = choose(Path(section.load), "auto", say)
    if found is None:
        raise CheckpointError(f"checkpoint.load: {section.load} has no checkpoint")
    return found


def _compare_data(path: Path, saved: Mapping[str, object], now: Mapping[str, object]) -> None:
    changed = [
        f"{name} was {saved.get(name)} and is {now.get(name)}"
        for name in {**saved, **now}
        if saved.get(name) != now.get(name)
    ]
    if changed:
        raise CheckpointError(
            f"{path} was saved amid other data: {'; '.join(changed)}; its samples have other numbers now. "
            "Restore the recipe, or set checkpoint.new_data: true to go through the new data from its beginning"
        )
