"""In which order documents and rows are visited: a shuffle per pass that follows from the seed alone."""

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.errors import DataError

# Shuffles of different things under one seed must not be the same shuffle.
DOCUMENTS, ROWS, BLOCKS = 0, 1, 2


def epoch_order(count: int, seed: int, epoch: int, what: int = DOCUMENTS) -> NDArray[np.int64]:
    """The numbers below `count` in the order of pass `epoch`: each once, another order in every pass.

    The generator is numpy's legacy Mersenne Twister, whose stream numpy promises never to change: a run that
    is resumed elsewhere sees the same order.

    Raises:
        DataError: there is nothing to put in order, or the seed or epoch is negative.
    """
    if count < 1:
        raise DataError("there is no document to put in order")
    return _permutation(count, seed, epoch, what)


def block_order(count: int, seed: int, epoch: int, block: int) -> NDArray[np.int64]:
    """The numbers below `count` in the order of block `block` of pass `epoch` of a stream; `count` may be 0.

    Raises:
        DataError: the seed or epoch is negative.
    """
    return _permutation(count, seed, epoch, BLOCKS, block)


def document_at(documents: int, seed: int, index: int) -> int:
    """The document that the endless stream of passes holds at place `index`."""
    epoch, place = divmod(index, max(documents, 1))
    return int(epoch_order(documents, seed, epoch)[place])


def _permutation(count: int, seed: int, epoch: int, *what: int) -> NDArray[np.int64]:
    if seed < 0 or epoch < 0:
        raise DataError(f"seed {seed} and epoch {epoch} must not be negative")
    words = [seed % 2**32, seed // 2**32 % 2**32, epoch % 2**32, *what]
    return np.random.RandomState(words).permutation(count).astype(np.int64)
