"""A Hugging Face folder written tensor by tensor: shards, an exact index, config.json, tokenizer files.

The safetensors layout is an 8-byte little-endian header length, a JSON header, then the tensors' bytes one behind the
other; shapes are known beforehand, so the header comes first and no more than one tensor is in memory.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetero_megatron.errors import ModelError
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.hf_config import CONFIG_FILE, to_hf
from hetero_megatron.models.hf_names import hf_name, parameter_shapes
from hetero_megatron.models.hf_weights import DTYPES, INDEX_FILE, SINGLE_FILE

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
MAX_SHARD_BYTES = 5 * 10**9
_KINDS = {dtype: kind for kind, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    theirs: str
    shape: tuple[int, ...]
    bytes: int


def write_hf(
    folder: str | Path,
    config: LlamaConfig,
    read: Callable[[str], Tensor],
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    origin: Mapping[str, Any] | None = None,
    context: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write the model into a folder that has none yet; config.json comes last, so a folder that has it is complete.

    Args:
        read: the whole tensor of our parameter name, asked for once each in the model's order.
        max_shard_bytes: a file holds at most so many bytes of tensors, or one tensor.
        origin, context: as in `to_hf`.
        progress: called with bytes done and in all after every tensor.

    Raises:
        ModelError: the folder already has a model, or cannot be written to; the model cannot be described; a
            tensor has another shape than the model says.
    """
    folder = Path(folder)
    described = to_hf(config, str(dtype).removeprefix("torch."), origin, context)
    shards = _shards(config, dtype, max_shard_bytes)
    _make(folder)
    with _named(folder):
        _write_shards(folder, shards, read, dtype, progress)
        if len(shards) > 1:
            _write_json(folder / INDEX_FILE, _index(shards))
        _write_json(folder / CONFIG_FILE, described)
    return folder


def copy_files(source: str | Path, folder: str | Path, names: Sequence[str]) -> tuple[str, ...]:
    """Copy those of the named files that `source` has; returns their names.

    Raises:
        ModelError: `source` is no folder, or a file cannot be copied.
    """
    source, folder = Path(source), Path(folder)
    if not source.is_dir():
        raise ModelError(f"{source} is no folder")
    found = tuple(name for name in names if (source / name).exists())
    with _named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in found:
            shutil.copyfile(source / name, folder / name)
    return found


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Say which folder could not be written: a full disk, a name that is taken."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"{error.filename or folder} cannot be written: {error.strerror}") from error


def _write_shards(
    folder: Path,
    shards: Sequence[Sequence[_Entry]],
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    progress: Callable[[int, int], None],
) -> None:
    done, total = 0, sum(entry.bytes for shard in shards for entry in shard)
    for number, shard in enumerate(shards, 1):
        file = folder / _file_name(number, len(shards))
        part = file.with_name(file.name + ".part")
        with part.open("wb") as stream:
            stream.write(_header(shard, dtype))
            for entry in shard:
                stream.write(_bytes(entry, read(entry.name), dtype))
                done += entry.bytes
                progress(done, total)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(file)


def _index(shards: Sequence[Sequence[_Entry]]) -> dict[str, Any]:
    where = {
        entry.theirs: _file_name(number, len(shards))
        for number, shard in enumerate(shards, 1)
        for entry in shard
    }
    total = sum(entry.bytes for shard in shards for entry in shard)
    return {"metadata": {"total_size": total}, "weight_map": where}


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise ModelError(f"{folder} is no folder that can be written to: {error.strerror}") from error
    taken = [
        name for name in there if name.endswith((".safetensors", ".bin")) or name in (INDEX_FILE, CONFIG_FILE)
    ]
    if taken:
        rest = (
            ""
            if CONFIG_FILE in taken
            else "without config.json, the rest of an export that was never finished; "
        )
        raise ModelError(f"{folder} already has a model ({', '.join(taken[:3])}); {rest}name another folder")


def _shards(config: LlamaConfig, dtype: torch.dtype, limit: int) -> list[list[_Entry]]:
    """Tensors in the model's order, a new file where the next one would exceed the limit."""
    if limit < 1:
        raise ModelError(f"a shard of at most {limit} bytes holds nothing; give 1 or more")
    shards: list[list[_Entry]] = [[]]
    for name, shape in parameter_shapes(config).items():
        entry = _Entry(name, hf_name(name), shape, prod(shape) * dtype.itemsize)
        if shards[-1] and sum(each.bytes for each in shards[-1]) + entry.bytes > limit:
            shards.append([])
        shards[-1].append(entry)
    return shards


def _file_name(number: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"


def _header(shard: Sequence[_Entry], dtype: torch.dtype) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in shard:
        place = [at, at + entry.bytes]
        header[entry.theirs] = {"dtype": _KINDS[dtype], "shape": entry.shape, "data_offsets": place}
        at += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes(entry: _Entry, tensor: Tensor, dtype: torch.dtype) -> memoryview:
    if tuple(tensor.shape) != entry.shape:
        raise ModelError(
            f"{entry.name} has shape {list(tensor.shape)}, the model makes it {list(entry.shape)}"
        )
    plain = tensor.detach().to("cpu", dtype).contiguous().flatten()
    return plain.view(torch.uint8).numpy().data


def _write_json(file: Path, value: object) -> None:
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    part.replace(file)
