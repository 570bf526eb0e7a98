"""Small checkpoints for tests, written by one process, and ways to damage them."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hetero_megatron.runtime.checkpoint_write import write_whole


def tensors(seed: int = 0) -> list[tuple[str, Tensor]]:
    """Two parameters."""
    generator = torch.Generator().manual_seed(seed)
    return [
        ("first.weight", torch.randn(40, 8, generator=generator)),
        ("second.weight", torch.randn(40, 8, generator=generator)),
    ]


def checkpoint(folder: Path, iteration: int) -> Path:
    """The checkpoint of one iteration, unlike that of any other."""
    return write_whole(folder, iteration, {"sample": 8 * iteration}, tensors(iteration))


def _cut(path: Path) -> str:
    file = path / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1000])
    return file.name


def _flip(path: Path) -> str:
    file = path / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file.name


def _empty(path: Path) -> str:
    (path / "__0_0.distcp").write_bytes(b"")
    return "__0_0.distcp"


def _delete(path: Path) -> str:
    (path / "__0_0.distcp").unlink()
    return "__0_0.distcp"


def _swap(path: Path) -> str:
    first, second = path / "__0_0.distcp", path / "__1_0.distcp"
    a, b = first.read_bytes(), second.read_bytes()
    assert len(a) == len(b), "sizes tell nothing of two files that have changed places"
    first.write_bytes(b)
    second.write_bytes(a)
    return "__0_0.distcp"


DAMAGES: dict[str, tuple[Callable[[Path], str], str]] = {
    "cut": (_cut, r"has \d+ bytes instead of"),
    "flipped": (_flip, "has changed since it was written"),
    "empty": (_empty, "has 0 bytes instead of"),
    "missing": (_delete, "is missing"),
    "swapped": (_swap, "has changed since it was written"),
}
"""Each damages a checkpoint, returns the file that has to be named, and what has to be said of it."""
