"""Where a run begins: anew, or from a checkpoint and with what of it (`checkpoint` in a recipe)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_megatron.data.samples import DataPosition
from hetero_megatron.errors import CheckpointError
from hetero_megatron.models.config import LlamaConfig, config_from_values, differences
from hetero_megatron.program import Program
from hetero_megatron.recipe import Recipe
from hetero_megatron.runtime.checkpoint_choice import agree_on_checkpoint, choose, choose_together
from hetero_megatron.runtime.checkpoint_parts import shapes_of
from hetero_megatron.runtime.checkpoint_read import SavedState
from hetero_megatron.runtime.learning_rate import resumed_schedule
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.world import Say, World

SettingsAt = Callable[[DataPosition], OptimizerSettings]
"""The recipe's settings of the optimizer for a run that goes on from a position in its data."""


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
    settings_at: SettingsAt,
    identity: Mapping[str, object],
    say: Say,
) -> Start:
    """Choose the checkpoint and compare it with the recipe: its model, its data, its schedule.

    Raises:
        CheckpointError: the one that is asked for is not there or not whole, or is of another model or other data.
    """
    return _start(_chosen(recipe, say), recipe, program, settings_at, identity, say)


def agree_on_start(
    world: World,
    start: Start,
    recipe: Recipe,
    program: Program,
    settings_at: SettingsAt,
    identity: Mapping[str, object],
) -> Start:
    """Collective: `start`, if every rank sees its checkpoint and the checksums are right.

    Under `resume: auto` a damaged checkpoint is passed over for the one before, which is said.

    Raises:
        CheckpointError: ranks see different checkpoints, or a damaged one was asked for; the same on every rank.
    """
    own = Path(recipe.output.folder)
    path = start.saved.path if start.saved else None
    if recipe.checkpoint.resume == "never" or (path is not None and path.parent != own):
        agree_on_checkpoint(world, path)
        return start
    found = choose_together(world, own, recipe.checkpoint.resume, _damage_only)
    if found == path:
        return start
    return _start(found, recipe, program, settings_at, identity, world.once(print))


def _start(
    path: Path | None,
    recipe: Recipe,
    program: Program,
    settings_at: SettingsAt,
    identity: Mapping[str, object],
    say: Say,
) -> Start:
    if path is None:
        return Start(None, 0, DataPosition(), settings_at(DataPosition()), {})
    saved = SavedState.open(path)
    saved.check(shapes_of(program))
    payload = saved.payload
    if "model" in payload:
        _compare_model(path, config_from_values(payload["model"]), recipe.make_config())
    position = DataPosition(saved.iteration)
    if "position" in payload:
        changed = _changed(payload["identity"], identity)
        if changed and not recipe.checkpoint.new_data:
            raise CheckpointError(
                f"{path} was saved amid other data: {'; '.join(changed)}; its samples have other numbers now. "
                "Restore the recipe, or set checkpoint.new_data: true to go through the new data from its beginning"
            )
        # Saved amid the new data already: whatever starts a run again goes on there.
        if not changed:
            position = DataPosition(saved.iteration, payload["position"])
    settings = settings_at(position)
    if "settings" in payload:
        override = recipe.checkpoint.override_lr_schedule
        settings, notices = resumed_schedule(payload["settings"], settings, override)
        for notice in notices:
            say(notice)
    say(f"going on from {path}: iteration {saved.iteration}, sample {position.sample}")
    return Start(saved, saved.iteration, position, settings, payload.get("memory", {}))


def _chosen(recipe: Recipe, say: Say) -> Path | None:
    """The run's own checkpoint, or when it has none the newest of `checkpoint.load`."""
    section, folder = recipe.checkpoint, Path(recipe.output.folder)
    if section.load is None:
        return choose(folder, section.resume, say)
    path = choose(folder, section.resume, say, otherwise=f"looking in {section.load} (checkpoint.load)")
    if path is not None:
        return path
    found = choose(Path(section.load), "auto", say)
    if found is None:
        raise CheckpointError(f"checkpoint.load: {section.load} has no checkpoint")
    return found


def _compare_model(path: Path, saved: LlamaConfig, now: LlamaConfig) -> None:
    """Shapes do not show a rotary base, a scaling or an epsilon."""
    changed = [f"{name} was {was} and is {value}" for name, (was, value) in differences(saved, now).items()]
    if changed:
        raise CheckpointError(f"{path} is of another model: {'; '.join(changed)}; correct the recipe's model")


def _changed(saved: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """In what two corpora differ, in words."""
    return [
        f"{name} was {saved.get(name)} and is {now.get(name)}"
        for name in {**saved, **now}
        if saved.get(name) != now.get(name)
    ]


def _damage_only(text: str) -> None:
    """What the choice before the processes has said already is not said again."""
    if text.startswith("WARNING: rank"):
        print(text, flush=True)
