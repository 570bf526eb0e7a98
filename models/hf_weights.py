"""Weights of a Hugging Face folder, checked by their headers and then read slice by slice.

An index names the shards; without one, model.safetensors is the only file. Of a file only the pages of the slices that are
asked for are read, so a rank reads its own part. Files have no checksums: a flipped bit in a value goes unseen.
"""

import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetero_megatron.annotation.region import Bounds
from hetero_megatron.errors import ModelError
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.hf_config import load_json
from hetero_megatron.models.hf_names import hf_name, parameter_shapes
from hetero_megatron.runtime.state import ParameterSlot

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
HEAD, EMBEDDING = "head.weight", "embedding.weight"
# Old files hold the rotary frequencies as a buffer; they follow from config.json.
_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_MOST_LISTED = 3


class HfWeights:
    """The tensors of one folder, by our parameter names.

    Attributes:
        folder: where the files are.
        shapes: global shape by our name.
    """

    def __init__(self, folder: Path, files: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.folder, self.shapes = folder, shapes
        self._files, self._handles = files, dict[str, Any]()

    @classmethod
    def open(cls, folder: str | Path, config: LlamaConfig) -> "HfWeights":
        """Check that the folder holds exactly the tensors of `config`; no value is read but those of a tied head.

        Raises:
            ModelError: a file or tensor is missing, cut off, unexpected, or of another shape or type; with its name.
        """
        folder = Path(folder)
        files = _tensors(folder)
        weights = cls(folder, files, parameter_shapes(config))
        wanted = {hf_name(name): name for name in weights.shapes}
        missing = [name for name in wanted if name not in files]
        if missing:
            why = "; tie_word_embeddings is false" if missing == [hf_name(HEAD)] else ""
            raise ModelError(f"{folder}: {_listed(missing)} missing from the files{why}")
        extra = [name for name in files if name not in wanted and not _BUFFER.fullmatch(name)]
        if config.tie_word_embeddings and hf_name(HEAD) in extra:
            extra.remove(hf_name(HEAD))
            weights._check_tied_head()
        if extra:
            raise ModelError(
                f"{folder / files[extra[0]]}: unexpected tensor {_listed(extra)}; the model of config.json has none "
                f"of that name{_switch_of(extra[0])}"
            )
        for theirs, name in wanted.items():
            weights._check_tensor(theirs, name)
        return weights

    def read(self, name: str, bounds: Bounds | None = None) -> Tensor:
        """The part within `bounds` (global [lo, hi) per dim; None: all) of our parameter `name`, in the file's dtype.

        Raises:
            ModelError: the bounds lie outside the tensor.
        """
        part, full = self._slice(hf_name(name)), self.shapes[name]
        bounds = tuple((0, size) for size in full) if bounds is None else bounds
        inside = (0 <= lo <= hi <= size for (lo, hi), size in zip(bounds, full, strict=False))
        if len(bounds) != len(full) or not all(inside):
            raise ModelError(f"{hf_name(name)}: bounds {bounds} lie outside the shape {full}")
        shape = [hi - lo for lo, hi in bounds]
        if 0 in shape:
            return torch.empty(shape, dtype=DTYPES[part.get_dtype()])
        found: Tensor = part[tuple(slice(lo, hi) for lo, hi in bounds)]
        return found

    def bytes(self, name: str) -> int:
        """Bytes of our parameter `name` in its file."""
        return prod(self.shapes[name]) * DTYPES[self._slice(hf_name(name)).get_dtype()].itemsize

    def _file(self, theirs: str) -> Path:
        return self.folder / self._files[theirs]

    def _slice(self, theirs: str) -> Any:
        file = self._files[theirs]
        if file not in self._handles:
            self._handles[file] = _open(self.folder / file)
        return self._handles[file].get_slice(theirs)

    def _check_tensor(self, theirs: str, name: str) -> None:
        part = self._slice(theirs)
        shape, kind = tuple(part.get_shape()), part.get_dtype()
        if shape != self.shapes[name]:
            raise ModelError(
                f"{self._file(theirs)}: {theirs} has shape {list(shape)}, config.json makes it "
                f"{list(self.shapes[name])}"
            )
        if kind not in DTYPES:
            raise ModelError(
                f"{self._file(theirs)}: {theirs} is {kind}; weights of {', '.join(DTYPES)} can be read"
            )

    def _check_tied_head(self) -> None:
        """A tied model's file may repeat the embedding as its head."""
        head, embedding = self._slice(hf_name(HEAD)), self._slice(hf_name(EMBEDDING))
        if head.get_shape() != embedding.get_shape() or not torch.equal(head[:], embedding[:]):
            raise ModelError(
                f"{self._file(hf_name(HEAD))}: tie_word_embeddings is true, but {hf_name(HEAD)} differs from "
                f"{hf_name(EMBEDDING)}; set it to false, or drop the head"
            )


def hf_initial(weights: HfWeights) -> Callable[[ParameterSlot], Tensor]:
    """What a Session starts from: this rank's part of the weights, in FP32."""
    return lambda slot: weights.read(slot.name, slot.bounds).float()


def _tensors(folder: Path) -> dict[str, str]:
    """The file of every tensor; the index and the shards must agree on it."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder")
    index = folder / INDEX_FILE
    if not index.exists():
        if not (folder / SINGLE_FILE).exists():
            raise ModelError(
                f"{folder} has neither {INDEX_FILE} nor {SINGLE_FILE}; other formats are not read, "
                "save_pretrained of transformers writes these"
            )
        return dict.fromkeys(_open(folder / SINGLE_FILE).keys(), SINGLE_FILE)
    listed = load_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise ModelError(f"{index}: weight_map is no mapping of tensors to files")
    for file in dict.fromkeys(listed.values()):
        if Path(file).name != file:
            raise ModelError(f"{index}: {file!r} is no file beside it")
        names = [name for name in listed if listed[name] == file]
        if not (folder / file).exists():
            raise ModelError(f"{folder / file} is missing; {INDEX_FILE} puts {_listed(names)} there")
        there = set(_open(folder / file).keys())
        ghosts = [name for name in names if name not in there]
        if ghosts:
            raise ModelError(f"{folder / file} has no {_listed(ghosts)}, which {INDEX_FILE} puts there")
        strays = sorted(name for name in there if listed.get(name) != file)
        if strays:
            raise ModelError(
                f"{folder / file}: unexpected tensor {_listed(strays)}; {INDEX_FILE} has none there"
            )
    return listed


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{file} is no complete safetensors file ({file.stat().st_size} bytes): {error}"
        ) from error


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more


def _switch_of(theirs: str) -> str:
    if not theirs.endswith(".bias"):
        return ""
    return "; is mlp_bias false there?" if ".mlp." in theirs else "; is attention_bias false there?"
