"""`hetero-megatron convert`: Hugging Face folders to run folders and back, tensor by tensor."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from hetero_megatron.errors import CheckpointError, ModelError
from hetero_megatron.models.config import (
    LlamaConfig,
    config_from_values,
    config_to_values,
    count_parameters,
)
from hetero_megatron.models.hf_config import CONFIG_FILE, load_json, read_hf_config
from hetero_megatron.models.hf_export import MAX_SHARD_BYTES, TOKENIZER_FILES, copy_files, write_hf
from hetero_megatron.models.hf_names import parameter_shapes
from hetero_megatron.models.hf_weights import HfWeights
from hetero_megatron.runtime.checkpoint_choice import choose
from hetero_megatron.runtime.checkpoint_files import finished, iteration_of, numbers
from hetero_megatron.runtime.checkpoint_read import SavedState
from hetero_megatron.runtime.checkpoint_write import write_whole

ORIGIN = "hf"
"""The folder in a run's folder that keeps config.json and tokenizer of the Hugging Face folder it came from."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SAVED_AS = {"float32": "fp32", "bfloat16": "bf16"}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B", re.IGNORECASE)
Advance = Callable[[int, int], None]


def hf_to_run(source: Path, run: Path) -> Path:
    """Make the checkpoint of iteration 0 in run folder `run` from a Hugging Face folder; returns its folder.

    Raises:
        ModelError: the Hugging Face folder is broken, or holds another kind of model.
        CheckpointError: the run folder has checkpoints already, or cannot be written to.
    """
    config = read_hf_config(source)
    weights = HfWeights.open(source, config)
    there = finished(run)
    if there:
        raise CheckpointError(
            f"{run} has checkpoints of iterations {numbers(there)}; name another run folder"
        )
    # First, so that a finished checkpoint has its origin beside it.
    copied = copy_files(source, run / ORIGIN, (*TOKENIZER_FILES, CONFIG_FILE))
    payload = {"model": config_to_values(config), "origin": str(source)}
    with _progress("reading") as advance:
        path = write_whole(run, 0, payload, _tensors(weights, advance))
    _say(config, path, copied)
    return path


def run_to_hf(
    run: Path,
    target: Path,
    iteration: int | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer: Path | None = None,
) -> Path:
    """Write a checkpoint's master weights as a Hugging Face folder; returns the folder.

    Args:
        run: a run's folder, or one of its checkpoints.
        iteration: which one; None is the newest that is whole.
        dtype: `fp32`, which is exact, or `bf16`; None is what the run's Hugging Face origin has, else fp32.
        tokenizer: the folder whose tokenizer is copied; None is the run's origin, if there is one.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or does not say its model.
        ModelError: the target has a model already, or transformers has no such architecture.
    """
    run, path = _checkpoint(run, iteration)
    saved = SavedState.open(path)
    recipe = saved.payload.get("recipe", {})
    kept = _origin(run, recipe)
    origin = {} if kept is None else load_json(kept / CONFIG_FILE)
    config = _config(saved)
    saved.check(parameter_shapes(config))
    stored = origin.get("dtype") or origin.get("torch_dtype")
    chosen = dtype or _SAVED_AS.get(str(stored), "fp32")
    length = recipe.get("training", {}).get("seq_length")
    with _progress("writing") as advance:
        write_hf(target, config, saved.read, DTYPES[chosen], max_shard_bytes, origin, length, advance)
    source = tokenizer or kept
    copied = () if source is None else copy_files(source, target, TOKENIZER_FILES)
    _say(config, target, copied, f" of iteration {saved.iteration} in {chosen}")
    return target


def shard_bytes(text: str) -> int:
    """Bytes of a size such as `5GB` (10^9 each) or `512MiB` (2^20 each).

    Raises:
        ModelError: it is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ModelError(f"--max-shard-size {text!r} is no size; write one such as 5GB or 500MB")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** " KMGT".index(found[2].upper() or " "))


def _tensors(weights: HfWeights, advance: Advance) -> Iterator[tuple[str, Tensor]]:
    total = sum(weights.bytes(name) for name in weights.shapes)
    done = 0
    for name in weights.shapes:
        yield name, weights.read(name)
        done += weights.bytes(name)
        advance(done, total)


def _checkpoint(run: Path, iteration: int | None) -> tuple[Path, Path]:
    """The run's folder and the checkpoint in it."""
    if iteration_of(run) is not None:
        if iteration not in (None, iteration_of(run)):
            raise CheckpointError(f"{run} is the checkpoint of another iteration than {iteration}; drop one")
        return run.parent, run
    if not run.is_dir():
        raise CheckpointError(f"there is no run folder {run}")
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if iteration is None and not finished(run):
        raise CheckpointError(
            f"{run} has no checkpoint; a run saves one at its end, or every checkpoint.interval"
        )
    path = choose(
        run, "auto" if iteration is None else iteration, lambda text: console.print(text, markup=False)
    )
    assert path is not None, f"{run} has checkpoints, of which none was chosen"
    return run, path


def _origin(run: Path, recipe: Mapping[str, Any]) -> Path | None:
    """The Hugging Face folder that the run began with: kept beside its checkpoints, or named by its recipe."""
    model, load = recipe.get("model", {}), recipe.get("checkpoint", {}).get("load")
    named = [model.get("weights"), model.get("config")]
    places = [run / ORIGIN, *([Path(load) / ORIGIN] if load else []), *(Path(name) for name in named if name)]
    folders = [place if place.is_dir() else place.parent for place in places]
    return next((folder for folder in folders if (folder / CONFIG_FILE).is_file()), None)


def _config(saved: SavedState) -> LlamaConfig:
    values = saved.payload.get("model")
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{saved.path} does not say its model; its payload has {sorted(saved.payload)}")
    try:
        return config_from_values(values)
    except ModelError as error:
        raise CheckpointError(f"{saved.path}: {error}") from error


@contextmanager
def _progress(what: str) -> Iterator[Advance]:
    """A bar of bytes; nothing where there is no terminal."""
    console = Console()
    columns: tuple[Any, ...] = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _say(config: LlamaConfig, path: Path, copied: tuple[str, ...], more: str = "") -> None:
    with_tokenizer = f", with {', '.join(copied)}" if copied else ""
    Console(soft_wrap=True, highlight=False).print(
        f"wrote {count_parameters(config):,} parameters{more} to {path}{with_tokenizer}", markup=False
    )
